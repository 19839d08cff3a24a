"""Compute the weight gradients of convolutions on a second CUDA stream, in parallel to the backward pass.

The backward pass itself needs only the gradients of the inputs; nothing reads a weight's gradient before the update. In
a deep narrow network neither kernel fills a GPU, so the second stream costs almost no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_AHEAD = 8  # the most weight gradients in flight; their operands are kept until they are done


class _SideStream:
    """The second stream of a device, and the operands of the work in flight."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, operands: tuple[Tensor, ...], work: Callable[[], Tensor]) -> Tensor:
        """Start `work` on the side stream.

        If more than `_AHEAD` operations are in flight, the main stream waits for the oldest, so its operands can be
        freed.
        """
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            done = work()
            event = torch.cuda.Event()
            event.record(self.stream)
        self._in_flight.append((event, operands))
        if len(self._in_flight) > _AHEAD:
            main.wait_event(self._in_flight.popleft()[0])
        return done

    def join(self) -> None:
        """Let the current stream wait for all work in flight.

        It does not wait if there is none, because a CUDA graph capture would not know the side stream.
        """
        if self._in_flight:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._in_flight.clear()


_active: dict[torch.device, _SideStream] = {}  # no context variable, because the backward pass is another thread
_streams: dict[torch.device, _SideStream] = {}


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run weight gradients on a second stream inside the context; they are complete at its end. No effect on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = _active[device] = _streams.setdefault(device, _SideStream(device))
    try:
        yield
    finally:
        del _active[device]
        stream.join()


@torch.library.custom_op("normfree::weight_gradient", mutates_args=())
def _weight_gradient(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return ∂L/∂W of W * x, given ∂L/∂(W * x); computed on the second stream inside `side_stream`."""

    def work() -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )[1]
        # The compiler relies on the strides of the weight.
        return found if found.stride() == weight.stride() else torch.empty_like(weight).copy_(found)

    stream = _active.get(x.device)
    return work() if stream is None else stream.run((x, gradient), work)


@_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(weight)


class _Convolution(torch.autograd.Function):
    """W * x, with the gradient of W from `_weight_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        out: Tensor = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        of_weight = _weight_gradient(x, gradient, weight, *ctx.settings)  # first, so that it starts early
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:  # the images need none
            of_x = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
            )[0]
        return of_x, of_weight, None


class SideStreamConv2d(nn.Conv2d):
    """A convolution whose weight gradient is computed on the second stream inside `side_stream`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = (list(self.stride), list(self.padding), list(self.dilation), self.groups)
        out: Tensor = _Convolution.apply(input, weight, settings)  # type: ignore[no-untyped-call]
        return out


def use_side_stream_(model: nn.Module, on: bool = True) -> nn.Module:
    """Make plain convolutions without bias `SideStreamConv2d`, in place; with `on=False`, make them plain again.

    Convolutions stay unchanged if their padding is a text ('same') or pads with other values than zeros.
    """
    before, after = (nn.Conv2d, SideStreamConv2d) if on else (SideStreamConv2d, nn.Conv2d)
    for module in model.modules():
        plain = type(module) is before and module.bias is None and module.padding_mode == "zeros"
        if plain and not isinstance(module.padding, str):
            module.__class__ = after
    return model
