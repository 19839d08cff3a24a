"""Which residual blocks of a model run by the stage kernels, and how their parameters become the kernels' inputs.

Consecutive blocks of one shape become one `Stage`. Its weights, gains, biases and scalars are stacks of the master
vector (`MasterWeights.stacks`), so a step copies nothing per layer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normfree.kernels import NEUTRAL, SCALARS, Form, prepare, stage, why_not
from normfree.kernels.tiling import why_not_shape
from normfree.models import Network
from normfree.models.base import every_module
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import stacked_weight, weight_kind
from normfree.train.config import TrainConfig

_log = logging.getLogger("normfree.train")
KEPT_BYTES = 8 * 2**30
"""Activations above this size are not all kept: the backward pass computes the inner ones again."""

Scalar = ScalarBias | ScalarMultiplier


class NoStageError(ValueError):
    """Some blocks cannot run by the stage kernels; the message says why, in one clause."""


@dataclass(frozen=True)
class BlockParts:
    """The parts of a residual block by their meaning for the kernels."""

    form: Form
    layers: tuple[nn.Conv2d, nn.Conv2d]
    scalars: dict[str, Scalar]

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that all blocks of a stage share."""
        layers = ((weight_kind(layer), layer.bias is None) for layer in self.layers)
        return self.form, *layers, tuple(self.learnable)

    @property
    def learnable(self) -> list[str]:
        """The names of the scalars that learn, in the order of the kernels."""
        return [name for name in SCALARS if name in self.scalars and self.scalars[name].learnable]


def read_block(block: nn.Module) -> BlockParts:
    """Find the convolutions and scalars of a block. Raises `NoStageError` if its equation is not the kernels'."""
    if not isinstance(block, Residual) or block.branch is None:
        raise NoStageError(f"{type(block).__name__} blocks without a branch have no kernel")
    if not isinstance(block.shortcut, nn.Identity):
        raise NoStageError("the blocks' shortcuts are not the identity")
    if block.shortcut_reads_entry:
        raise NoStageError("the blocks' shortcuts read the entry of the branch")
    entry, branch, exit = (_leaves(part) for part in (block.entry, block.branch, block.exit))
    scalars: dict[str, Scalar] = {}
    pre = any(isinstance(part, nn.ReLU) for part in entry)
    if pre:
        _take(entry, ScalarBias, scalars, "entry_bias")
        _take(entry, nn.ReLU)
    _take(entry, ScalarBias, scalars, "bias_before_conv1")
    first = _take_layer(branch)
    _take(branch, ScalarBias, scalars, "bias_after_conv1")
    if not _take(branch, nn.ReLU):
        raise NoStageError(f"{_name(branch)} has no kernel between the convolutions of a branch")
    _take(branch, ScalarBias, scalars, "bias_before_conv2")
    second = _take_layer(branch)
    post = _take(exit, nn.ReLU)
    if entry or branch or exit or (pre and post):
        raise NoStageError(f"{_name([*entry, *branch, *exit])} has no kernel around the convolutions of a branch")
    if first.in_channels != second.out_channels or first.out_channels != second.out_channels:
        raise NoStageError("the blocks' branches change the number of channels")
    for name in ("alpha", "beta", "a", "delta", "c"):
        part = getattr(block, name)
        if isinstance(part, ScalarBias | ScalarMultiplier):
            scalars[name] = part
        elif not isinstance(part, nn.Identity):
            raise NoStageError(f"{type(part).__name__} has no kernel")
    held = [first, second, *(scalar for scalar in scalars.values() if scalar.learnable)]
    if not all(p.requires_grad for part in held for p in part._parameters.values() if p is not None):
        raise NoStageError("some parameters of the blocks do not learn")
    if any(part._forward_hooks or part._forward_pre_hooks for part in every_module(block)):
        raise NoStageError("the blocks have forward hooks")
    return BlockParts("pre" if pre else "post" if post else "linear", (first, second), scalars)


def _leaves(module: nn.Module) -> list[nn.Module]:
    parts = [*module] if isinstance(module, nn.Sequential) else [module]
    return [part for part in parts if not isinstance(part, nn.Identity)]


def _name(parts: Sequence[nn.Module]) -> str:
    return type(parts[0]).__name__ if parts else "nothing"


def _take(parts: list[nn.Module], kind: type[nn.Module], into: dict[str, Scalar] | None = None, name: str = "") -> bool:
    """Remove the first part if it is of this kind; return whether it was."""
    if not parts or not isinstance(parts[0], kind):
        return False
    part = parts.pop(0)
    if into is not None and isinstance(part, ScalarBias):
        into[name] = part
    return True


def _take_layer(parts: list[nn.Module]) -> nn.Conv2d:
    """Remove and return the first part, a convolution that the kernels compute."""
    layer = parts.pop(0) if parts else None
    if not isinstance(layer, nn.Conv2d):
        raise NoStageError(f"{type(layer).__name__} has no kernel in the place of a convolution")
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    if shape != ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros"):
        raise NoStageError("the kernels need 3×3 convolutions with stride 1 and zero padding of 1")
    if weight_kind(layer) == "spectral":
        raise NoStageError("spectral norm has no kernel")
    return layer


class Stage:
    """Consecutive residual blocks of one shape that run as one kernel.

    Args:
        blocks: The blocks.
        parts: The parts of each of them.
        channels: Their channels.
        size: The height and width of their images.
        stream: The dtype of the residual stream.
        recompute: Whether the backward pass computes the inner activations again.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        parts: Sequence[BlockParts],
        *,
        channels: int,
        size: int,
        stream: torch.dtype,
        recompute: bool,
    ) -> None:
        self.blocks, self.parts, self.channels, self.size = blocks, parts, channels, size
        self.stream, self.recompute = stream, recompute
        self.form = parts[0].form
        self._layers = [layer for block in parts for layer in block.layers]
        self._kind = weight_kind(self._layers[0])
        self._effective = stacked_weight
        here = {name for block in parts for name in block.scalars}
        self._columns = parts[0].learnable
        self._fixed = [(i, name) for i, name in enumerate(SCALARS) if name in here and name not in self._columns]
        self.neutral = [name for name in SCALARS if name not in here]

    def prepare(self, device: torch.device, images: int) -> None:
        """Start to compile the kernels for batches of this size, in another thread."""
        prepare(
            self.channels,
            self.size,
            images=images,
            form=self.form,
            neutral=self.neutral,
            stream=self.stream,
            recompute=self.recompute,
            device=device,
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the blocks."""
        return (parameter for stack in self.stacks() for parameter in stack)

    def stacks(self) -> list[list[nn.Parameter]]:
        """Return the parameters that must be adjacent: weights, then gains, biases and scalars if there are any."""
        layers = self._layers
        stacks: list[list[Any]] = [[layer.weight for layer in layers]]
        if self._kind != "plain":
            stacks.append([layer.gain for layer in layers])
        if layers[0].bias is not None:
            stacks.append([layer.bias for layer in layers])
        scalars: list[Any] = [block.scalars[name].value for block in self.parts for name in self._columns]
        return [*stacks, scalars] if scalars else stacks

    def attach_(self, stacks: Sequence[Tensor], *, compile: bool = False) -> None:
        """Let the stage compute with these stacks, in the order of `stacks`."""
        rest, count = list(stacks), len(self.parts)
        self._weights = rest.pop(0)
        self._gains = rest.pop(0) if self._kind != "plain" else None
        self._biases = rest.pop(0) if self._layers[0].bias is not None else None
        self._scalars = rest.pop(0) if rest else None
        self._base = torch.tensor(NEUTRAL, device=self._weights.device).repeat(count, 1)
        self._places = torch.tensor([SCALARS.index(name) for name in self._columns], device=self._weights.device)
        if compile and self._gains is not None:
            self._effective = torch.compile(stacked_weight, dynamic=False)
        self.refresh_()

    @torch.no_grad()
    def refresh_(self) -> None:
        """Read the fixed scalars of the blocks again."""
        for column, name in self._fixed:
            found = [(row, block.scalars[name].value) for row, block in enumerate(self.parts) if name in block.scalars]
            rows = torch.tensor([row for row, _ in found], device=self._base.device)
            self._base[rows, column] = torch.cat([value for _, value in found]).to(self._base)

    def __call__(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        count, channels = len(self.parts), self.channels
        weights, scalars, biases = self._weights, self._base, self._biases
        if self._gains is not None:
            weights = self._effective(self._kind, weights, self._gains)
        if self._scalars is not None:
            scalars = scalars.index_copy(1, self._places, self._scalars.view(count, -1))
        return stage(
            x.to(self.stream),
            weights.view(count, 2, channels, channels, 3, 3),
            scalars,
            None if biases is None else biases.view(count, 2, channels),
            form=self.form,
            neutral=self.neutral,
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class StageChoice:
    """The stages of a model that run by the kernels, and why other blocks do not; empty reasons mean that all run."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """Return the line for the log: which path runs, and why not the other."""
        why = "; ".join(self.reasons)
        if not self.stages:
            return f"kernels: compiled, because {why}"
        shapes = ", ".join(f"{len(s.parts)} blocks of {s.channels} channels at {s.size}×{s.size}" for s in self.stages)
        again = ", inner activations computed again" if self.stages[0].recompute else ""
        rest = f"compiled where {why}" if why else "compiled for the blocks that change the shape"
        return f"kernels: stage for {shapes}{again}; {rest}"


def prepare_stages(model: nn.Module, config: TrainConfig, device: torch.device, images: int) -> tuple[Stage, ...]:
    """Choose the stages, begin to compile their kernels, and log which path runs; see `choose_stages`."""
    choice = choose_stages(model, config, device, images)
    for chosen in choice.stages:
        chosen.prepare(device, images)
    _log.log(logging.INFO if device.type == "cuda" else logging.DEBUG, choice.explain())
    return choice.stages


def choose_stages(model: nn.Module, config: TrainConfig, device: torch.device, images: int) -> StageChoice:
    """Choose the blocks that run by the kernels, by a resolved configuration.

    Args:
        model: The model, before its precision is lowered.
        config: The configuration; `kernels` is "auto", "stage" or "compiled".
        device: Where it trains.
        images: The images of one pass.

    Raises:
        ValueError: If `kernels` is "stage" and no block can run by them.
    """
    found: list[tuple[Sequence[nn.Module], Sequence[BlockParts], int, int]] = []
    reasons: list[str] = []
    if config.kernels == "compiled":
        return StageChoice((), ("kernels=compiled",))
    if not isinstance(model, Network):
        reasons.append(f"the stage kernels run normfree's image models, not {type(model).__name__}")
    elif config.precision == "float32":
        reasons.append("the stage kernels compute in bfloat16, and the precision is float32")
    elif not all(isinstance(part, nn.Sequential) for part in model.body) or len(model.input_shape) != 3:
        reasons.append(f"the stage kernels run stages of residual blocks of images, and {model.name} has none")
    else:
        shared = _shared_parameters(model)
        for blocks, channels, size in _blocks_of_one_shape(model):
            try:
                found.append((blocks, _read_blocks(blocks, channels, size, device, shared), channels, size))
            except NoStageError as error:
                reasons.append(str(error))
        if not found and not reasons:
            reasons.append("every block changes the shape")
    reasons = list(dict.fromkeys(reasons))
    if config.kernels == "stage" and not found:
        raise ValueError(
            f"expected blocks that the stage kernels can run for kernels=stage, got none: {'; '.join(reasons)}; use "
            "kernels=auto"
        )
    kept = sum(4 * len(parts) * images * channels * size**2 for _, parts, channels, size in found)
    recompute = bool(config.recompute) or kept > KEPT_BYTES
    stream = torch.float32 if config.precision == "mixed" else torch.bfloat16
    stages = (Stage(b, p, channels=c, size=s, stream=stream, recompute=recompute) for b, p, c, s in found)
    return StageChoice(tuple(stages), tuple(reasons))


def count_stage_layers(model: Network) -> int:
    """Return how many layers of an image model the stage kernels could run on a GPU that they support."""
    if not all(isinstance(part, nn.Sequential) for part in model.body) or len(model.input_shape) != 3:
        return 0
    shared, count = _shared_parameters(model), 0
    for blocks, channels, size in _blocks_of_one_shape(model):
        with suppress(NoStageError):
            count += 2 * len(_read_blocks(blocks, channels, size, None, shared))
    return count


def _read_blocks(
    blocks: Sequence[nn.Module], channels: int, size: int, device: torch.device | None, shared: Collection[int]
) -> list[BlockParts]:
    """Read the blocks of a stage. Raises `NoStageError` if the kernels cannot run it; without a device, on no GPU."""
    parts = [read_block(block) for block in blocks]
    form = parts[0].form
    reason = why_not_shape(channels, size, form) if device is None else why_not(channels, size, form, device=device)
    if reason is not None:
        raise NoStageError(reason)
    if len({block.kind for block in parts}) > 1:
        raise NoStageError("the blocks of a stage differ in their scalars or layers")
    if shared and any(id(p) in shared for block in blocks for p in block.parameters()):
        raise NoStageError("blocks share parameters")
    return parts


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules hold, or one module with several names."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in every_module(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _blocks_of_one_shape(model: Network) -> Iterator[tuple[list[nn.Module], int, int]]:
    """Iterate over the blocks between two changes of shape, with the channels and the side of their images."""
    x = _shape_after(model.stem, torch.empty((1, *model.input_shape), device="meta"))
    for part in model.body:
        run: list[nn.Module] = []
        for block in part:  # type: ignore[attr-defined]
            if not (isinstance(block, Residual) and block.transition):
                run.append(block)
                continue
            if run:
                yield run, x.shape[1], x.shape[2]
            run, x = [], _shape_after(block, x)
        if run:
            yield run, x.shape[1], x.shape[2]


@torch.no_grad()
def _shape_after(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = copy.deepcopy(module).to("meta").eval()(x)
    return out
