"""How a model is run in training: its precision, compiled regions, and segments that are computed again.

Compiling a block instead of the network lets blocks of one shape share one compiled program, so that 10,000 layers
compile as fast as ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normfree.models import Network
from normfree.models.base import BaseModel
from normfree.nn.residual import Residual, lower_precision_, set_precision_
from normfree.nn.weight_layers import weight_kind

Region = tuple[nn.Module, ...]
Forward = Callable[..., Tensor]
_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
# A buffer that a weight gradient on the second stream still reads must not be written again; see `nn.overlap`.
_OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}


def apply_precision_(model: nn.Module, precision: str) -> torch.dtype:
    """Give the weight layers the type that a precision says, in place, and return the type of the inputs.

    "bf16" computes all weight layers in it, and of a model of others all but scalars and norms that keep statistics;
    "mixed" only the residual branches, and what turns tokens into vectors and back, and keeps the stream in float32.

    Raises `ValueError` for "mixed" and a model of others, whose branches are not known.
    """
    if precision == "float32":
        return torch.float32
    if precision == "mixed":
        if not isinstance(model, BaseModel) and not any(isinstance(module, Residual) for module in model.modules()):
            raise ValueError(
                f"expected a model of ours for precision 'mixed', got {type(model).__name__}; use bf16 or float32"
            )
        set_precision_(model, stream=torch.float32, branch=torch.bfloat16)
        if isinstance(model, BaseModel) and model.skip == "sequence":
            for part in model.children():
                if isinstance(part, nn.Linear | nn.Embedding):
                    lower_precision_(part, torch.bfloat16)
        return torch.float32
    lower_precision_(model, torch.bfloat16)
    if not isinstance(model, BaseModel):
        _lower_rest_(model, torch.bfloat16)
    return torch.bfloat16


def _lower_rest_(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters that stand outside of weight layers the type of the signal, which they would widen."""
    for module in model.modules():
        if isinstance(module, _STATISTICS):
            continue
        own = ("bias",) if weight_kind(module) != "plain" else module._parameters  # a direction and a gain stay
        for parameter in (module._parameters.get(name) for name in own):
            if parameter is not None and parameter.dim() > 0 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)


def forward_of(model: nn.Module, *, compile: bool = False, region: int = 1, recompute: int = 0) -> Forward:
    """The function that training calls in place of the model.

    With `compile`, `region` consecutive blocks are one compiled program; with `recompute`, that many regions keep only
    their input and are computed again in the backward pass. The layers of a Transformer are compiled one by one for any
    length; `uncompile_` undoes it. A model that is not ours is compiled whole.

    Raises `ValueError` when segments are asked for of a model without a sequence of blocks.
    """
    if not isinstance(model, Network):
        if recompute:
            raise ValueError(f"expected a model of ours to recompute segments of, got {type(model).__name__}; use 0")
        if isinstance(model, BaseModel):
            for layer in _layers(model) if compile else ():
                layer.compile(dynamic=True)
            return model
        return torch.compile(model, dynamic=False, options=_OPTIONS) if compile else model
    regions = list(_regions(model, region if compile else 1))
    run: Callable[[Region, Tensor], Tensor] = _run
    if compile:
        run = torch.compile(_run, dynamic=False, options=_OPTIONS)

    def through(segment: Sequence[Region], x: Tensor) -> Tensor:
        for part in segment:
            x = run(part, x)
        return x

    segments = [(part, _changing(part)) for part in _batched(regions, recompute)] if recompute else []
    draws = any(getattr(module, "dropout", 0.0) for module in model.modules())  # random numbers, which must come again

    def forward(x: Tensor) -> Tensor:
        x = model.stem(x)
        if not recompute:
            x = through(regions, x)
        for segment, buffers in segments:
            again = partial(_twice, buffers)
            x = checkpoint(through, segment, x, use_reentrant=False, preserve_rng_state=draws, context_fn=again)
        return model.classifier(model.head(x))  # type: ignore[no-any-return]

    return forward


def uncompile_(model: nn.Module) -> None:
    """Let the layers of a Transformer run as they are written again."""
    for layer in _layers(model) if isinstance(model, BaseModel) else ():
        layer._compiled_call_impl = None


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a Transformer, encoder and decoder."""
    return [layer for stack in model.children() if isinstance(stack, nn.ModuleList) for layer in stack]


def _run(blocks: Region, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _changing(regions: Sequence[Region]) -> list[Tensor]:
    """The buffers that a pass in training changes: running statistics, their counts, singular vectors."""
    buffers = [b for region in regions for block in region for b in block.buffers()]
    return [b for b in buffers if b.dim() > 0 or not b.is_floating_point()]


def _twice(buffers: list[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a pass and of its repetition, which finds the buffers as the pass did and leaves them as they are."""
    start = [b.clone() for b in buffers]

    @contextmanager
    def repetition() -> Iterator[None]:
        now = [b.clone() for b in buffers]
        _write_(buffers, start)
        try:
            yield
        finally:
            _write_(buffers, now)

    return nullcontext(), repetition()


@torch.no_grad()
def _write_(buffers: list[Tensor], values: list[Tensor]) -> None:
    if buffers:
        torch._foreach_copy_(buffers, values)


def _regions(model: Network, size: int) -> Iterator[Region]:
    """The parts of the body in order, `size` at a time; a change of shape stands alone, so that regions repeat."""
    parts = list(model.body)
    staged = all(isinstance(part, nn.Sequential) for part in parts)
    for stage in [list(part) for part in parts if isinstance(part, nn.Sequential)] if staged else [parts]:
        run: list[nn.Module] = []
        for block in stage:
            alone = isinstance(block, Residual) and block.transition
            if run and (alone or len(run) == size):
                yield tuple(run)
                run = []
            if alone:
                yield (block,)
            else:
                run.append(block)
        if run:
            yield tuple(run)


def _batched(regions: Sequence[Region], size: int) -> Iterator[Sequence[Region]]:
    return (regions[i : i + size] for i in range(0, len(regions), size))
