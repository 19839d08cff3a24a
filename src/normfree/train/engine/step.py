"""One training step: batch, loss, gradient, clipping, update, moving average, as one function of device tensors.

Everything a step reads that changes from step to step (its number, the learning rate, whether the run is alive) is a
tensor on the device, so that on a GPU the whole step, data and augmentation included, is captured once as a CUDA graph
and then replayed without the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data.images.image_batches import ImageBatch
from normfree.nn.overlap import overlapping
from normfree.optim.clipping import agc_, norm_
from normfree.optim.master_weights import MasterWeights
from normfree.optim.update_rules import UpdateRule
from normfree.train.engine.forward import Forward

_WARM_UP = 3  # steps before a capture: they compile, and let the libraries choose their kernels


class Feed(Protocol):
    """Where batches come from; `batch` of a capturable one is a function of device tensors."""

    steps: int
    capturable: bool

    def start_epoch(self, epoch: int) -> None:
        """Make ready the batches of an epoch."""
        ...

    def batch(self, step: Tensor) -> Any:
        """The batch of a step of the epoch."""
        ...


@runtime_checkable
class ShapedFeed(Protocol):
    """A feed whose batches have one of a few shapes, which the host knows beforehand; see `TokenBatches`."""

    steps: int
    shapes: Sequence[Any]

    def start_epoch(self, epoch: int) -> None:
        """Make ready the batches of an epoch."""
        ...

    def shape_of(self, step: int) -> int:
        """The number of the shape of a step's batch."""
        ...

    def gather(self, shape: int, step: Tensor) -> Any:
        """The batch of a step that has this shape, a function of device tensors."""
        ...


Loss = Callable[[Callable[..., Tensor], Any, float], tuple[Tensor, Tensor]]
"""A mean loss and the share of hits, from what runs the model, a batch, and label smoothing."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step does besides its model, data and update rule."""

    label_smoothing: float = 0.0
    accumulate: int = 1
    clip: Literal["none", "agc", "norm"] = "none"
    clip_at: float = 0.01
    unclipped: tuple[str, ...] = ()  # the classifier's parameters, which adaptive clipping leaves alone
    ema: float = 0.0
    loss_limit: float = 1e4


def loss_of(logits: Tensor, batch: ImageBatch, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy in float32; of a mixed batch, of both labels by their shares."""
    logits = logits.float()
    losses = F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=label_smoothing)
    if batch.other is not None and batch.share is not None:
        others = F.cross_entropy(logits, batch.other, reduction="none", label_smoothing=label_smoothing)
        losses = batch.share * losses + (1 - batch.share) * others
    return losses.mean()


def image_loss(forward: Callable[..., Tensor], batch: ImageBatch, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of a batch of images, and the share of those that are recognized."""
    logits = forward(batch.inputs)
    loss = loss_of(logits, batch, label_smoothing)
    return loss, (logits.detach().argmax(1) == batch.labels).float().mean()


def _pieces(batch: Any, parts: int) -> list[Any]:
    """A batch of images as micro-batches; the share of mixup is one number and the same in all."""
    if parts == 1:
        return [batch]
    # Every parts-th sample, so that the micro-batches of several processes together are those of one process.
    pieces = [slice(first, None, parts) for first in range(parts)]
    return [
        ImageBatch(
            batch.inputs[piece], batch.labels[piece], None if batch.other is None else batch.other[piece], batch.share
        )
        for piece in pieces
    ]


class Step:
    """Trains `model` by one batch of `feed` at every call.

    `forward` stands in for the model (compiled, or recomputed in segments), `masters` hold its parameters, `loss` says
    what is made small. `reduce` averages a tensor over all processes, in place. A loss or gradient that is not finite,
    or a loss above the limit, makes the run not alive: from then on weights, optimizer, average and `count` stay as
    they are, so that `count` tells the host, when it looks, how many steps were good.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        masters: MasterWeights,
        rule: UpdateRule,
        feed: Feed | ShapedFeed,
        settings: StepSettings,
        *,
        loss: Loss = image_loss,
        reduce: Callable[[Tensor], None] | None = None,
        compile: bool = False,
    ) -> None:
        self.model, self.masters, self.settings, self.rule = model, masters, settings, rule
        self._forward, self._loss, self._reduce = forward, loss, reduce
        self.feed: ShapedFeed = feed if isinstance(feed, ShapedFeed) else _OneShape(feed, compile=compile)
        self._update = torch.compile(rule.update_, dynamic=False) if compile else rule.update_
        self._clipped = [name for name in masters.parameters if name not in settings.unclipped]
        device = masters.values.device
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.alive = torch.ones((), dtype=torch.bool, device=device)
        self.factors = torch.ones(feed.steps, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.float64, device=device)
        self.memory = [torch.zeros_like(masters.values) for _ in range(rule.memories)]
        self.average = masters.values.clone() if settings.ema else None
        self._step_on_host = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def start_epoch(self, epoch: int, factors: Sequence[float], step: int = 0) -> None:
        """Make ready for step `step` of an epoch, whose steps multiply the learning rates by `factors`."""
        if len(factors) != self.feed.steps:
            raise ValueError(f"expected a factor for each of {self.feed.steps} steps, got {len(factors)}")
        self.feed.start_epoch(epoch)
        self.factors.copy_(torch.tensor(factors))
        self.number.fill_(step)
        self._step_on_host = step

    def clear_metrics(self) -> None:
        """Start new sums of loss and hits."""
        self.loss_sum.zero_()
        self.correct.zero_()

    def __call__(self) -> None:
        """Train on the next batch; it may still be running on the device when this returns."""
        shape = self.feed.shape_of(self._step_on_host)
        self._fetch()
        self._step_on_host += 1
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self._step(shape)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the run consists of, to be saved, and to be written in place when it is resumed.

        The model's are under "model." and their own names, in float32; the moving average's under "average.".
        """
        vectors = {"model": self.masters.values, **{f"memory{i}": v for i, v in enumerate(self.memory)}}
        if self.average is not None:
            vectors["average"] = self.average
        parts = {f"{what}.{n}": t for what, v in vectors.items() for n, t in self.masters.named(v).items()}
        buffers = {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
        frozen = {f"model.{name}": value for name, value in self.masters.frozen().items()}
        return {**parts, **buffers, **frozen, "count": self.count, "loss_sum": self.loss_sum, "correct": self.correct}

    @torch.no_grad()
    def restore_(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state, alive.

        Raises `ValueError` when it is not one of this model and optimizer; nothing is changed then.
        """
        own = self.state()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in state.items()}:
            wrong = sorted(
                n for n in {*own, *state} if n not in own or n not in state or own[n].shape != state[n].shape
            )
            raise ValueError(
                f"expected the state of this model and optimizer, got one that differs in '{wrong[0]}' "
                f"and {len(wrong) - 1} more; resume with the configuration of the run"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.alive.fill_(True)
        self.masters.gradient.zero_()  # of a dead run it may be NaN, in the gaps between parameters, too
        self.masters.publish_()
        self.masters.publish_frozen_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in the place of the weights, where there is one."""
        if self.average is None:
            yield
            return
        kept = self.masters.values.clone()
        self._write_(self.average)
        try:
            yield
        finally:
            self._write_(kept)

    @torch.no_grad()
    def _write_(self, values: Tensor) -> None:
        self.masters.values.copy_(values)
        self.masters.publish_()

    def _fetch(self) -> None:
        """Bring a batch from the host to where a captured step reads it."""
        if isinstance(self.feed, _OneShape):
            self.feed.fetch(self._step_on_host)

    def _step(self, shape: int) -> None:
        batch = self.feed.gather(shape, self.number)
        loss, correct = self._backward(batch)
        with torch.no_grad():
            if self._reduce is not None:
                self._reduce(self.masters.gradient)
                sums = torch.stack((loss, correct))
                self._reduce(sums)
                loss, correct = sums.unbind()
            finite = torch.isfinite(self.masters.gradient.sum()) & torch.isfinite(loss)
            self.alive.logical_and_(finite & (loss <= self.settings.loss_limit))
            self._clip()
            self.count.add_(self.alive)
            factor = self.factors.take(self.number)  # indexing would read the number on the host
            for group in self.masters.groups:
                memory = [vector[group.stretch] for vector in self.memory]
                self._update(
                    self.masters.values[group.stretch],
                    self.masters.gradient[group.stretch],
                    memory,
                    lr=group.lr * factor,
                    weight_decay=group.weight_decay,
                    count=self.count,
                    alive=self.alive,
                )
            self._average()
            self.masters.publish_()
            self.loss_sum.add_(loss)
            self.correct.add_(correct)
            self.number.add_(1)

    def _backward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The gradient into the masters' vector; the mean loss and the share of hits of the batch."""
        parts = self.settings.accumulate
        losses, hits = [], []
        for i, piece in enumerate(_pieces(batch, parts)):
            loss, hit = self._loss(self._forward, piece, self.settings.label_smoothing)
            loss = loss / parts
            with overlapping(self.masters.values.device):
                loss.backward()
            self.masters.collect_(add=i > 0)
            losses.append(loss.detach())
            hits.append(hit / parts)
        self.masters.finish_()
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    def _clip(self) -> None:
        if self.settings.clip == "agc":
            weights, gradients = self.masters.named(self.masters.values), self.masters.gradients
            agc_([weights[n] for n in self._clipped], [gradients[n] for n in self._clipped], self.settings.clip_at)
        elif self.settings.clip == "norm":
            norm_([self.masters.gradient], self.settings.clip_at)

    def _average(self) -> None:
        """ē' = d·ē + (1-d)·w with d = min(ema, (1+t)/(10+t)), so that the first steps do not weigh for ever."""
        if self.average is not None:
            decay = torch.clamp((1 + self.count) / (10 + self.count), max=self.settings.ema).float()
            fresh = torch.lerp(self.masters.values, self.average, decay)
            self.average.copy_(torch.where(self.alive, fresh, self.average))

    def capture(self) -> None:
        """Record the step as a CUDA graph for each shape of batch; the model and the run's state are as before.

        No epoch is started by it.
        """
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        self._fetch()
        shapes = range(len(self.feed.shapes))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shape in shapes:
                for _ in range(_WARM_UP):
                    self.alive.fill_(False)  # a step that is not alive leaves the weights as they are
                    self.number.zero_()
                    self._step(shape)
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()
        torch.cuda.empty_cache()  # what the warm-up held, the graphs' own pool needs
        pool = torch.cuda.graph_pool_handle()  # one for all, since never two of them run at a time
        for shape in shapes:
            self._graphs[shape] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[shape], pool=pool):
                self._step(shape)
        self.restore_(before)
        self.number.zero_()


class _OneShape:
    """A feed of batches of one shape; one that reads on the host puts them where a captured step finds them."""

    shapes: Sequence[Any] = (None,)

    def __init__(self, feed: Feed, *, compile: bool) -> None:
        self._feed, self.steps = feed, feed.steps
        self._batch = torch.compile(feed.batch, dynamic=False) if compile and feed.capturable else feed.batch
        self._held: Any = None

    def start_epoch(self, epoch: int) -> None:
        """Make ready the batches of an epoch."""
        self._feed.start_epoch(epoch)

    def shape_of(self, step: int) -> int:
        """The only one."""
        return 0

    def gather(self, shape: int, step: Tensor) -> Any:
        """The batch of a step, or the one that was fetched."""
        return self._held if self._held is not None else self._batch(step)

    def fetch(self, step: int) -> None:
        """Get the batch of a step from the host, where it is made there: without a look at the number on the device."""
        if self._feed.capturable:
            return
        batch = self._feed.batch(torch.tensor(step))
        if self._held is None:
            self._held = batch
            return
        for into, fresh in zip(self._held, batch, strict=True):
            if into is not None and fresh is not None:
                into.copy_(fresh, non_blocking=True)
