"""Convolutions whose weight gradient is computed beside the backward pass instead of in it.

The chain of a backward pass needs only the gradient of the input; the weight's is not read before the update. In a deep
narrow network neither fills a GPU, so on a stream of its own the weight's costs next to no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_AHEAD = 8  # weight gradients that may be under way, whose operands are kept until then


class _Lane:
    """The second stream of a device, and the operands of what runs on it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, operands: tuple[Tensor, ...], work: Callable[[], Tensor]) -> Tensor:
        """Start `work`, and wait for what was started a while ago, so that its operands may go."""
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            done = work()
            event = torch.cuda.Event()
            event.record(self.stream)
        self._under_way.append((event, operands))
        if len(self._under_way) > _AHEAD:
            main.wait_event(self._under_way.popleft()[0])
        return done

    def join(self) -> None:
        """Let the current stream wait for all of it, if there is any: a capture knows no stream that was not used."""
        if self._under_way:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._under_way.clear()


_open: dict[torch.device, _Lane] = {}  # the backward pass runs in a thread of its own, so no context variable would do
_lanes: dict[torch.device, _Lane] = {}


@contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """While it is open, weight gradients on a GPU run on a second stream; at the end they are there."""
    if device.type != "cuda":
        yield
        return
    lane = _open[device] = _lanes.setdefault(device, _Lane(device))
    try:
        yield
    finally:
        del _open[device]
        lane.join()


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
    """∂L/∂W of W * x, given ∂L/∂(W * x), on the second stream where one is open."""

    def work() -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )[1]
        # The compiler counts on the strides of the weight.
        return found if found.stride() == weight.stride() else torch.empty_like(weight).copy_(found)

    lane = _open.get(x.device)
    return work() if lane is None else lane.run((x, gradient), work)


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
        of_weight = _weight_gradient(x, gradient, weight, *ctx.settings)  # first, so that it starts at once
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:  # nobody asks for that of the images
            of_x = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
            )[0]
        return of_x, of_weight, None


class OverlappedConv2d(nn.Conv2d):
    """A plain convolution whose weight gradient may run beside the backward pass; see `overlap_`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = (list(self.stride), list(self.padding), list(self.dilation), self.groups)
        out: Tensor = _Convolution.apply(input, weight, settings)  # type: ignore[no-untyped-call]
        return out


def overlap_(model: nn.Module, on: bool = True) -> nn.Module:
    """Turn plain convolutions without bias into `OverlappedConv2d`, in place, or back when not `on`.

    One that pads by a word ('same') or with other than zeros stays as it is.
    """
    before, after = (nn.Conv2d, OverlappedConv2d) if on else (OverlappedConv2d, nn.Conv2d)
    for module in model.modules():
        plain = type(module) is before and module.bias is None and module.padding_mode == "zeros"
        if plain and not isinstance(module.padding, str):
            module.__class__ = after
    return model
