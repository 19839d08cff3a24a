"""The forward pass in training: precision, stages that run by kernels, compiled regions, and recomputed segments.

Blocks are compiled instead of the network. Blocks of the same shape share one compiled program, so 10,000 layers
compile as fast as ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normfree.models import Network
from normfree.models.base import BaseModel
from normfree.nn.residual import Residual, lower_precision_, set_precision_
from normfree.nn.weight_layers import weight_kind
from normfree.train.engine.kernel_stages import Stage

Region = tuple[nn.Module, ...]
Forward = Callable[..., Tensor]
_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
# nn/weight_gradient_stream.py: a buffer that the second stream still reads must not be written again.
_OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}


def apply_precision_(model: nn.Module, precision: str) -> torch.dtype:
    """Convert the weight layers to the type of a precision, in place, and return the type of the inputs.

    "bf16" computes all weight layers in bf16, and in a third-party model everything except scalars and norms with
    running statistics. "mixed" computes only the residual branches, the embeddings and the classifier of a Transformer
    in bf16, and keeps the residual stream in float32.

    Raises `ValueError` for "mixed" and a third-party model, whose branches are unknown.
    """
    if precision == "float32":
        return torch.float32
    if precision == "mixed":
        if not isinstance(model, BaseModel) and not any(isinstance(module, Residual) for module in model.modules()):
            raise ValueError(
                f"expected a normfree model for precision 'mixed', got {type(model).__name__}; use bf16 or float32"
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
    """Convert the parameters outside weight layers too: in float32 they would turn the signal into float32."""
    for module in model.modules():
        if isinstance(module, _STATISTICS):
            continue
        own = ("bias",) if weight_kind(module) != "plain" else module._parameters  # a direction and a gain stay
        for parameter in (module._parameters.get(name) for name in own):
            if parameter is not None and parameter.dim() > 0 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)


def forward_of(
    model: nn.Module,
    *,
    compile: bool = False,
    region: int = 1,
    recompute: int = 0,
    stages: Sequence[Stage] = (),
) -> Forward:
    """Return the function that training calls in place of the model.

    The layers of a Transformer are compiled one by one for any length; `uncompile_` undoes it. A third-party model is
    compiled as a whole.

    Args:
        model: The model.
        compile: Whether to compile it.
        region: The number of consecutive blocks in one compiled program.
        recompute: Activation checkpointing: the number of regions per segment. Only the input of a segment is kept, and
            the backward pass computes the segment again. 0 keeps all activations. Stages of kernels have a setting of
            their own.
        stages: The stages that run by kernels.

    Raises:
        ValueError: If segments are asked for and the model is not a sequence of blocks.
    """
    if not isinstance(model, Network):
        if recompute:
            raise ValueError(f"expected a normfree model for recompute, got {type(model).__name__}; use recompute=0")
        if isinstance(model, BaseModel):
            for layer in _layers(model) if compile else ():
                layer.compile(dynamic=True)
            return model
        return torch.compile(model, dynamic=False, options=_OPTIONS) if compile else model
    by_block = {block: stage for stage in stages for block in stage.blocks}
    parts = list(_regions(model, region if compile else 1, by_block))
    run: Callable[[Region, Tensor], Tensor] = _run
    if compile:
        run = torch.compile(_run, dynamic=False, options=_OPTIONS)

    def through(segment: Sequence[Region | Stage], x: Tensor) -> Tensor:
        for part in segment:
            x = part(x) if isinstance(part, Stage) else run(part, x)
        return x

    segments = [(part, _changing_buffers(part)) for part in _batched(parts, recompute)] if recompute else []
    draws = bool(recompute) and any(getattr(m, "dropout", 0.0) for m in model.modules())  # numbers, to be drawn again

    def forward(x: Tensor) -> Tensor:
        x = model.stem(x)
        if not recompute:
            x = through(parts, x)
        for segment, buffers in segments:
            if isinstance(segment[0], Stage):
                x = through(segment, x)
                continue
            again = partial(_repeatable, buffers)
            x = checkpoint(through, segment, x, use_reentrant=False, preserve_rng_state=draws, context_fn=again)
        return model.classifier(model.head(x))  # type: ignore[no-any-return]

    return forward


def uncompile_(model: nn.Module) -> None:
    """Undo the compilation of the layers of a Transformer, in place."""
    for layer in _layers(model) if isinstance(model, BaseModel) else ():
        layer._compiled_call_impl = None


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a Transformer, encoder and decoder."""
    return [layer for stack in model.children() if isinstance(stack, nn.ModuleList) for layer in stack]


def _run(blocks: Region, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _changing_buffers(parts: Sequence[Region | Stage]) -> list[Tensor]:
    """Return the buffers that a pass in training changes: running statistics, their counts, singular vectors."""
    regions = [part for part in parts if not isinstance(part, Stage)]
    buffers = [b for region in regions for block in region for b in block.buffers()]
    return [b for b in buffers if b.dim() > 0 or not b.is_floating_point()]


def _repeatable(buffers: list[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the two contexts that `checkpoint` needs: one for a pass, one for its repetition.

    The repetition starts from the buffers of the first pass, and restores the current ones afterwards.
    """
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


def _regions(model: Network, size: int, stages: Mapping[nn.Module, Stage] | None = None) -> Iterator[Region | Stage]:
    """Yield the blocks of the body, `size` at a time, or a stage of kernels for all of its blocks.

    A block that changes the shape is a region of its own, so that other regions have equal shapes.
    """
    children = list(model.body)
    staged = all(isinstance(part, nn.Sequential) for part in children)
    for blocks in [list(part) for part in children if isinstance(part, nn.Sequential)] if staged else [children]:
        for stage, group in groupby(blocks, key=(stages or {}).get):
            run: list[nn.Module] = []
            for block in group if stage is None else ():
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
            if stage is not None:
                yield stage


def _batched(parts: Sequence[Region | Stage], size: int) -> Iterator[Sequence[Region | Stage]]:
    """Split into segments of `size` regions; a stage is a segment of its own."""
    for alone, group in groupby(parts, key=lambda part: isinstance(part, Stage)):
        members, length = list(group), 1 if alone else size
        yield from (members[i : i + length] for i in range(0, len(members), length))
