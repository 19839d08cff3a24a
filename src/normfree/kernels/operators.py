"""The stage as PyTorch operators: usable eagerly, under `torch.compile` and inside a CUDA graph, with gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor

from normfree.kernels.compile import why_no_compiler
from normfree.kernels.driver import Kernels, chosen_kernels, device_index, multiprocessors, shared_memory
from normfree.kernels.tiling import (
    PACK_THREADS,
    REDUCE_THREADS,
    SCALARS,
    Form,
    choose_tiling,
    neutral_mask,
    why_not_shape,
)

SCRATCH_BYTES = 512 * 2**20
"""Memory for the signal gradients that the weight gradients read; longer stages run backward in segments."""

_SUMS = 8  # numbers that a warp of the backward kernel sums per block


def why_not(channels: int, size: int, form: str = "post", *, device: torch.device | None = None) -> str | None:
    """Return why the kernels cannot run this stage, in one sentence, or None if they can.

    Args:
        channels: channels of every layer of the stage.
        size: height and width of its images.
        form: the position of the activation around the branch ("post", "pre" or "linear").
        device: where it would run; the current CUDA device if left out.
    """
    reason = why_not_shape(channels, size, form)
    if reason:
        return reason
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return "the stage kernels need a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"the stage kernels need compute capability 9.0 or later, not {capability[0]}.{capability[1]}"
    index = torch.cuda.current_device() if device is None else device_index(device)
    try:
        choose_tiling(
            channels, size, cast(Form, form), images=1, multiprocessors=132, shared_memory=shared_memory(index)
        )
    except ValueError as error:
        return str(error)
    return why_no_compiler()


def stage(
    x: Tensor,
    weights: Tensor,
    scalars: Tensor,
    biases: Tensor | None = None,
    *,
    form: Form = "post",
    neutral: Collection[str] = (),
    recompute: bool = False,
) -> Tensor:
    """Run consecutive residual blocks with identity shortcuts, x' = p(c·(a·x + β·f(e(α·x)) + δ)), as one kernel.

    With the scalars of `SCALARS`, one block is

        v = entry_gain · act(alpha · x + entry_bias)                  act is ReLU in the form "pre", else nothing
        r = inner_gain · relu(conv1(v + bias_before_conv1) + bias_after_conv1)
        t = a · x + beta · conv2(r + bias_before_conv2) + delta
        x' = exit_gain · relu(c · t) in the form "post", else c · t

    The biases per channel are added by the convolutions. A bias before a convolution does not reach its zero padding.
    Gains must be positive and c must not be 0. Gradients of all inputs are exact sums in a fixed order, so that two
    runs give the same bits.

    Args:
        x: images (N, C, S, S) in bfloat16 or float32, which is also the type of the residual stream.
        weights: effective weights (B, 2, C, C, 3, 3) in float32 or bfloat16; the kernels round them to bfloat16.
        scalars: (B, 12) in float32, in the order of `SCALARS`.
        biases: (B, 2, C) in float32, or None.
        form: "post", "pre" or "linear".
        neutral: names of scalars that are neutral in all blocks and do not learn: they cost nothing and get gradient 0.
        recompute: keep only the stream and compute the inner activation again in the backward pass.

    Returns:
        The stage's output, in the type and shape of `x`, channels last.

    Raises:
        ValueError: the stage has no kernels, or an input has the wrong shape or type.
    """
    _check(x, weights, scalars, biases, form)
    inputs = (x, weights, scalars, biases)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    keep = (1 if recompute else 2) if needs_grad else 0
    out: Tensor = torch.ops.normfree.stage_forward(x, weights, scalars, biases, form, neutral_mask(neutral), keep)[0]
    return out


def _check(x: Tensor, weights: Tensor, scalars: Tensor, biases: Tensor | None, form: str) -> None:
    square = x.dim() == 4 and x.shape[0] > 0 and x.shape[2] == x.shape[3]
    if not square or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"expected one or more images (N, C, S, S) in bfloat16 or float32, got {tuple(x.shape)} in {x.dtype} as "
            "'x' of stage; convert them first"
        )
    reason = why_not_shape(x.shape[1], x.shape[2], form)
    if reason:
        raise ValueError(f"{reason}; use the compiled path for this stage")
    blocks, channels = weights.shape[0], x.shape[1]
    for name, tensor, shape, types in (
        ("weights", weights, (blocks, 2, channels, channels, 3, 3), (torch.float32, torch.bfloat16)),
        ("scalars", scalars, (blocks, len(SCALARS)), (torch.float32,)),
        ("biases", biases, (blocks, 2, channels), (torch.float32,)),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in types or not blocks):
            raise ValueError(
                f"expected {shape} in {' or '.join(map(str, types))}, got {tuple(tensor.shape)} in {tensor.dtype} as "
                f"'{name}' of stage; stack one entry per block"
            )


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _empty_outputs(x: Tensor, blocks: int, form: str, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the tensors that `stage_forward` fills. The stream of the post form has one more, for its last mask."""
    images, channels, size = x.shape[:3]
    streams, inner = blocks + (form == "post") if keep else 0, blocks if keep == 2 else 0
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty((streams, images, size, size, channels), dtype=torch.bfloat16),
        x.new_empty((inner, images, size, size, channels), dtype=torch.bfloat16),
        x.new_empty((2 if keep else 1, 2 * blocks, 9 * channels**2), dtype=torch.bfloat16),
        x.new_empty((2 * blocks, channels), dtype=torch.float32),
    )


@torch.library.custom_op("normfree::stage_forward", mutates_args=(), device_types="cuda")
def stage_forward(
    x: Tensor, weights: Tensor, scalars: Tensor, biases: Tensor | None, form: str, neutral: int, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output and the saved tensors for backward: stream, inner activations, packed weights, shifts.

    `keep` is 0 for inference, 1 to keep the stream and 2 to keep the inner activations, too.
    """
    with torch.cuda.device(x.device):
        kernels = chosen_kernels(x, form, neutral, keep == 1)
        images, channels = x.shape[:2]
        blocks = weights.shape[0]
        x, weights, scalars = _channels_last(x), weights.contiguous(), scalars.contiguous()
        biases = None if biases is None else biases.contiguous()
        out, stream, inner, packed, shifts = _empty_outputs(x, blocks, form, keep)
        is_float = int(weights.dtype == torch.float32)
        raw = (weights, is_float, scalars, biases, packed[0], packed[1] if keep else None, shifts)
        kernels.pack.launch((2 * blocks, channels // 16), PACK_THREADS, 0, *raw)
        tiling, grid = kernels.tiling, (images * kernels.tiling.split, 1)
        arguments = (x, packed[0], shifts, scalars, stream if keep else None, inner if keep == 2 else None, out)
        kernels.forward.launch(grid, tiling.threads, tiling.chain_bytes[0], *arguments, blocks, images)
        return out, stream, inner, packed, shifts


@stage_forward.register_fake
def _(
    x: Tensor, weights: Tensor, scalars: Tensor, biases: Tensor | None, form: str, neutral: int, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(x, weights.shape[0], form, keep)


@torch.library.custom_op("normfree::stage_backward", mutates_args=(), device_types="cuda")
def stage_backward(
    gradient: Tensor,
    scalars: Tensor,
    biases: Tensor | None,
    stream: Tensor,
    inner: Tensor,
    packed: Tensor,
    shifts: Tensor,
    form: str,
    neutral: int,
    needs_weights: bool,
    needs_scalars: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the input, weights (float32), scalars and biases; those that are not needed have no elements."""
    with torch.cuda.device(gradient.device):
        recompute = inner.shape[0] == 0
        kernels = chosen_kernels(gradient, form, neutral, recompute)
        gradient, scalars = _channels_last(gradient), scalars.contiguous()
        blocks = scalars.shape[0]
        images, channels, size = gradient.shape[:3]
        out = _empty_gradients(gradient, scalars, biases, needs_weights, needs_scalars)
        image = images * size * size * channels * 2
        length = max(1, min(blocks, SCRATCH_BYTES // ((3 if recompute else 2) * image)))
        parts = [(first, min(first + length, blocks)) for first in range(0, blocks, length)]
        gradients = gradient.new_empty((2 * length, *stream.shape[1:]), dtype=torch.bfloat16)
        again = torch.empty_like(gradients[:length]) if recompute else None
        for first, end in reversed(parts):
            into = out[0] if first == 0 else torch.empty_like(gradient)
            here = slice(first, end)
            _segment(
                kernels,
                gradient,
                into,
                scalars[here],
                None if biases is None else biases[here],
                stream[first:],
                inner[here] if again is None else again,
                packed[:, 2 * first : 2 * end],
                shifts[2 * first : 2 * end],
                gradients,
                out[1][here] if needs_weights else None,
                out[2][here] if needs_scalars else None,
                out[3][here] if needs_scalars and biases is not None else None,
            )
            gradient = into
        return out


def _segment(
    kernels: Kernels,
    gradient: Tensor,
    input_gradient: Tensor,
    scalars: Tensor,
    biases: Tensor | None,
    stream: Tensor,
    inner: Tensor,
    packed: Tensor,
    shifts: Tensor,
    gradients: Tensor,
    weight_gradients: Tensor | None,
    scalar_gradients: Tensor | None,
    bias_gradients: Tensor | None,
) -> None:
    """The backward pass of some consecutive blocks; every tensor begins at the first of them."""
    tiling, blocks, images = kernels.tiling, scalars.shape[0], gradient.shape[0]
    warps = tiling.threads // 32
    sums = gradient.new_empty((blocks, images * tiling.split * warps, _SUMS), dtype=torch.float32)
    grid = (images * tiling.split, 1)
    chain = (gradient, packed[1], packed[0], shifts, scalars, stream, inner, gradients, input_gradient, sums)
    kernels.backward.launch(grid, tiling.threads, tiling.chain_bytes[1], *chain, blocks, images)
    if weight_gradients is None and scalar_gradients is None:
        return
    squares = (tiling.channels // tiling.weight_channels) ** 2
    workers = max(1, tiling.weight_blocks * multiprocessors(gradient.device.index) // squares)
    partials = gradient.new_empty((workers + 2 * blocks, tiling.partial), dtype=torch.float32)
    read = (stream, inner, gradients, scalars, partials)
    kernels.weights.launch((workers, squares), tiling.weight_threads, tiling.weight_bytes, *read, 2 * blocks, images)
    arguments = (sums, partials, scalars, biases, weight_gradients, scalar_gradients, bias_gradients)
    grid = ((tiling.channels // 16) ** 2 + 1, 2 * blocks)
    kernels.reduce.launch(grid, REDUCE_THREADS, 0, *arguments, 2 * blocks, images, workers)


def _empty_gradients(
    gradient: Tensor, scalars: Tensor, biases: Tensor | None, needs_weights: bool, needs_scalars: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks, channels = scalars.shape[0], gradient.shape[1]
    shape = (blocks if needs_weights else 0, 2, channels, channels, 3, 3)
    return (
        torch.empty_like(gradient, memory_format=torch.channels_last),
        gradient.new_empty(shape, dtype=torch.float32),
        gradient.new_empty((blocks if needs_scalars else 0, len(SCALARS)), dtype=torch.float32),
        gradient.new_empty((blocks if needs_scalars and biases is not None else 0, 2, channels), dtype=torch.float32),
    )


@stage_backward.register_fake
def _(
    gradient: Tensor,
    scalars: Tensor,
    biases: Tensor | None,
    stream: Tensor,
    inner: Tensor,
    packed: Tensor,
    shifts: Tensor,
    form: str,
    neutral: int,
    needs_weights: bool,
    needs_scalars: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(gradient, scalars, biases, needs_weights, needs_scalars)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, scalars, biases, ctx.form, ctx.neutral, _ = inputs
    ctx.weight_type = weights.dtype
    ctx.save_for_backward(scalars, biases, *output[1:])
    ctx.set_materialize_grads(False)  # the kept tensors have no gradient, and zeros of their size would be large


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    _, weights, scalars, biases = ctx.needs_input_grad[:4]
    values, bias_values, stream, inner, packed, shifts = ctx.saved_tensors
    dx, dw, ds, db = torch.ops.normfree.stage_backward(
        gradient, values, bias_values, stream, inner, packed, shifts, ctx.form, ctx.neutral, weights, scalars or biases
    )
    return (
        dx,
        dw.to(ctx.weight_type) if weights else None,
        ds if scalars else None,
        db if biases else None,
        None,
        None,
        None,
    )


torch.library.register_autograd("normfree::stage_forward", _backward, setup_context=_setup_context)
