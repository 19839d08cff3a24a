"""One training step: batch, loss, gradient, clipping, update, moving average, as one function of device tensors.

Every value that changes from step to step (its number, the learning rate, whether the run is alive) is a tensor on the
device. A GPU therefore captures the whole step, data and augmentation included, once as a CUDA graph, and replays it
without the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data.images.image_set import ImageBatch
from normfree.nn.scalars import with_dimension
from normfree.nn.weight_gradient_stream import side_stream
from normfree.optim.clipping import clip_adaptively_, clip_by_norm_
from normfree.optim.master_weights import MasterWeights, UpdateRule
from normfree.train.config import TrainConfig
from normfree.train.engine.data_interface import BatchLoss, Feed, ShapedFeed
from normfree.train.engine.forward import Forward, forward_of
from normfree.train.engine.kernel_stages import Stage

_UPDATED = 2**22  # parameters that an update takes at a time, if it is not compiled
_WARM_UP = 3  # steps before a capture: they compile, and let the libraries choose their kernels


def cross_entropy(logits: Tensor, batch: ImageBatch, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy in float32; after mixup, that of both labels weighted by their shares."""
    logits = logits.float()
    losses = F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=label_smoothing)
    if batch.other is not None and batch.share is not None:
        others = F.cross_entropy(logits, batch.other, reduction="none", label_smoothing=label_smoothing)
        losses = batch.share * losses + (1 - batch.share) * others
    return losses.mean()


def image_loss(forward: Callable[..., Tensor], batch: ImageBatch, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and the accuracy on a batch of images."""
    logits = forward(batch.inputs)
    loss = cross_entropy(logits, batch, label_smoothing)
    return loss, (logits.detach().argmax(1) == batch.labels).float().mean()


def _micro_batches(batch: Any, parts: int) -> list[Any]:
    """Split a batch of images; the share of mixup is one number, and the same in every part."""
    if parts == 1:
        return [batch]
    # Every parts-th sample, so that the micro-batches of several processes together are those of one process.
    slices = [slice(first, None, parts) for first in range(parts)]
    return [
        ImageBatch(
            batch.inputs[part], batch.labels[part], None if batch.other is None else batch.other[part], batch.share
        )
        for part in slices
    ]


class OneShapeFeed:
    """Wraps a `Feed` as a `ShapedFeed` of one shape.

    If the host makes the batches, each is copied into the same tensors, which a captured step reads.
    """

    shapes: Sequence[Any] = (None,)

    def __init__(self, feed: Feed, *, compile: bool) -> None:
        self._feed, self.steps = feed, feed.steps
        self._batch = torch.compile(feed.batch, dynamic=False) if compile and feed.capturable else feed.batch
        self._fetched: Any = None

    def start_epoch(self, epoch: int) -> None:
        """Prepare the batches of an epoch."""
        self._feed.start_epoch(epoch)

    def shape_of(self, step: int) -> int:
        """Return the index of the only shape."""
        return 0

    def gather(self, shape: int, step: Tensor) -> Any:
        """Return the fetched batch, or compute the batch of the step on the device."""
        return self._fetched if self._fetched is not None else self._batch(step)

    def fetch(self, step: int) -> None:
        """If the host makes the batches, copy the batch of this step into the tensors that a captured step reads.

        The step is an int, so that the device need not be read.
        """
        if self._feed.capturable:
            return
        batch = self._feed.batch(torch.tensor(step))
        if self._fetched is None:
            self._fetched = batch
            return
        for target, source in zip(self._fetched, batch, strict=True):
            if target is not None and source is not None:
                target.copy_(source, non_blocking=True)


class TrainStep:
    """Trains `model` on one batch of `feed` per call.

    A loss or gradient that is not finite, or a loss above the limit, marks the run as diverged (`alive` = False):
    from then on weights, optimizer, moving average and `good_steps` do not change. `good_steps` then tells the host how
    many steps were good.

    Args:
        model: The model.
        groups: The parameter groups of `param_groups`.
        feed: The training batches.
        config: The settings; those of the data, the schedule and the run are not read.
        originals: Unrounded values of parameters that were converted to half precision, by name.
        unclipped: The classifier's parameters, which adaptive clipping leaves alone.
        loss: The loss that is minimized.
        reduce: Averages a tensor over all processes in place; None for one process.
        stages: The stages that run by kernels.

    Attributes:
        masters: The parameters and the gradient as vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        feed: Feed | ShapedFeed,
        config: TrainConfig,
        *,
        originals: Mapping[str, Tensor] | None = None,
        unclipped: Collection[str] = (),
        loss: BatchLoss = image_loss,
        reduce: Callable[[Tensor], None] | None = None,
        stages: Sequence[Stage] = (),
    ) -> None:
        self.model, self.config = model, config
        self._loss, self._reduce, self._stages = loss, reduce, stages
        self._compiled = bool(config.compile)
        self._forward: Forward = model
        if self._compiled or config.recompute or stages:
            self._forward = forward_of(
                model, compile=self._compiled, region=config.region, recompute=config.recompute, stages=stages
            )
        self.masters = masters = MasterWeights(
            model,
            groups,
            channels_last=bool(config.channels_last),
            originals=originals,
            stacks=[stack for stage in stages for stack in stage.stacks()],
        )
        stacks = iter(masters.stacks)
        for stage in stages:
            stage.attach_([next(stacks) for _ in stage.stacks()], compile=self._compiled)
        self.feed: ShapedFeed = feed if isinstance(feed, ShapedFeed) else OneShapeFeed(feed, compile=self._compiled)
        rule = UpdateRule(
            name=config.optimizer,
            momentum=config.momentum,
            nesterov=config.nesterov,
            betas=config.betas,
            eps=config.eps,
        )
        self._update = torch.compile(rule.update_, dynamic=False) if self._compiled else rule.update_
        self._clipped = [name for name in masters.parameters if name not in unclipped]
        device = masters.values.device
        self.step_in_epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.good_steps = torch.zeros((), dtype=torch.float64, device=device)
        self.alive = torch.ones((), dtype=torch.bool, device=device)
        self.factors = torch.ones(feed.steps, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.accuracy_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.optimizer_state = [torch.zeros_like(masters.values) for _ in range(rule.num_states)]
        self.average = masters.values.clone() if config.ema else None
        stored_state = {f"memory{i}": vector for i, vector in enumerate(self.optimizer_state)}
        self._vectors = {"model": masters.values, **stored_state}
        if self.average is not None:
            self._vectors["average"] = self.average
        self._views = self._named(self._vectors)
        self._has_frozen = bool(masters.frozen())
        self._host_step = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def start_epoch(self, epoch: int, factors: Sequence[float], step: int = 0) -> None:
        """Prepare for step `step` of an epoch, whose steps multiply the learning rates by `factors`."""
        if len(factors) != self.feed.steps:
            raise ValueError(f"expected a factor for each of {self.feed.steps} steps, got {len(factors)}")
        self.feed.start_epoch(epoch)
        self.factors.copy_(torch.tensor(factors))
        self.step_in_epoch.fill_(step)
        self._host_step = step

    def clear_metrics(self) -> None:
        """Set the sums of loss and accuracy to zero."""
        self.loss_sum.zero_()
        self.accuracy_sum.zero_()

    def __call__(self) -> None:
        """Train on the next batch; the device may still be computing when this returns."""
        shape = self.feed.shape_of(self._host_step)
        self._fetch()
        self._host_step += 1
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self._step(shape)

    def _step(self, shape: int) -> None:
        """Train on the next batch, which has this shape: the whole step, as it runs on the device."""
        masters, config = self.masters, self.config
        batch = self.feed.gather(shape, self.step_in_epoch)

        # Forward and backward; the gradient is collected in one vector.
        losses, accuracies = [], []
        for i, part in enumerate(_micro_batches(batch, config.accumulate)):
            loss, accuracy = self._loss(self._forward, part, config.label_smoothing)
            loss = loss / config.accumulate
            with side_stream(masters.values.device) if self._compiled else nullcontext():
                loss.backward()
            masters.gather_gradients_(add=i > 0)
            losses.append(loss.detach())
            accuracies.append(accuracy / config.accumulate)
        masters.unfold_gradients_()
        loss, accuracy = torch.stack(losses).sum(), torch.stack(accuracies).sum()

        with torch.no_grad():
            # The mean over all processes.
            if self._reduce is not None:
                self._reduce(masters.gradient)
                sums = torch.stack((loss, accuracy))
                self._reduce(sums)
                loss, accuracy = sums.unbind()

            # Whether the run is still alive; a dead one changes nothing below.
            finite = torch.isfinite(masters.gradient.sum()) & torch.isfinite(loss)
            self.alive.logical_and_(finite & (loss <= config.loss_limit))
            self.good_steps.add_(self.alive)

            if config.clip == "agc":
                weights, names = masters.named(masters.values), self._clipped
                clip_adaptively_([weights[n] for n in names], [masters.gradients[n] for n in names], config.clip_at)
            elif config.clip == "norm":
                clip_by_norm_([masters.gradient], config.clip_at)

            factor = self.factors.take(self.step_in_epoch)  # indexing would read the number on the host
            for group in masters.groups:
                for span in self._spans(group.span):
                    self._update(
                        masters.values[span],
                        masters.gradient[span],
                        [vector[span] for vector in self.optimizer_state],
                        lr=group.lr * factor,
                        weight_decay=group.weight_decay,
                        step=self.good_steps,
                        alive=self.alive,
                    )

            # ē' = d·ē + (1-d)·w with d = min(ema, (1+t)/(10+t)), so that the first steps lose their weight.
            if self.average is not None:
                decay = torch.clamp((1 + self.good_steps) / (10 + self.good_steps), max=config.ema).float()
                updated = torch.lerp(masters.values, self.average, decay)
                self.average.copy_(torch.where(self.alive, updated, self.average))

            masters.copy_to_model_()
            self.loss_sum.add_(loss)
            self.accuracy_sum.add_(accuracy)
            self.step_in_epoch.add_(1)

    def _spans(self, whole: slice) -> list[slice]:
        """Split a part of the vectors, so that an update that is not compiled needs little memory."""
        size = whole.stop - whole.start if self._compiled else _UPDATED
        starts = range(whole.start, whole.stop, max(size, 1))
        return [slice(start, min(start + size, whole.stop)) for start in starts]

    def _fetch(self) -> None:
        """If the host makes the batches, copy the next one into the tensors that a captured step reads."""
        if isinstance(self.feed, OneShapeFeed):
            self.feed.fetch(self._host_step)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of the run: `save` stores them, and `restore_` writes them in place.

        The model's tensors are named "model." and their qualified names, in float32; those of the moving average
        "average."; those of the optimizer "memory0.", "memory1.".
        """
        buffers = {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
        frozen = self.masters.frozen() if self._has_frozen else {}
        return {
            **self._views,
            **buffers,
            **{f"model.{name}": value for name, value in frozen.items()},
            "count": self.good_steps,
            "loss_sum": self.loss_sum,
            "correct": self.accuracy_sum,
        }

    def _named(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}.{n}": t for kind, vector in vectors.items() for n, t in self.masters.named(vector).items()}

    def copy_of_state(self) -> dict[str, Tensor]:
        """Copy the tensors of `state` to the host; the vectors are copied whole, which is fast at any depth."""
        copies = self._named({kind: vector.to("cpu", copy=True) for kind, vector in self._vectors.items()})
        rest = {name: tensor for name, tensor in self.state().items() if name not in copies}
        return copies | {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest.items()}

    @torch.no_grad()
    def restore_(self, state: dict[str, Tensor]) -> None:
        """Write a saved state into the model, optimizer and counters, and set the run alive.

        Raises `ValueError` if the state has other names or shapes; nothing is changed then.
        """
        own = self.state()
        state = with_dimension(state, own)
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
        self._revive_()

    def _revive_(self) -> None:
        """Set the run alive, and let the model and the stages read the state again."""
        self.alive.fill_(True)
        self.masters.gradient.zero_()  # after a divergence it may hold NaN, even in the gaps between parameters
        self.masters.copy_to_model_()
        self.masters.publish_frozen_()
        for stage in self._stages:
            stage.refresh_()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average, if there is one, in place of the weights for the length of the `with` block."""
        if self.average is None:
            yield
            return
        weights = self.masters.values.clone()
        self._write_(self.average)
        try:
            yield
        finally:
            self._write_(weights)

    @torch.no_grad()
    def _write_(self, values: Tensor) -> None:
        self.masters.values.copy_(values)
        self.masters.copy_to_model_()

    def capture(self) -> None:
        """Record the step as one CUDA graph per batch shape.

        Call `start_epoch` first. The weights and the saved state stay the same. The step number becomes 0, so start the
        epoch again before training.
        """
        # A step that is not alive leaves the weights and the optimizer's state as they are, but not the buffers.
        changing = [tensor for name, tensor in self.state().items() if name not in self._views]
        before = [tensor.clone() for tensor in changing]
        self._fetch()
        shapes = range(len(self.feed.shapes))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shape in shapes:
                for _ in range(_WARM_UP):
                    self.alive.fill_(False)
                    self.step_in_epoch.zero_()
                    self._step(shape)
        torch.cuda.current_stream().wait_stream(stream)
        gc.collect()
        torch.cuda.empty_cache()  # the graphs' own pool needs the memory of the warm-up
        pool = torch.cuda.graph_pool_handle()  # one for all, because two graphs never run at the same time
        for shape in shapes:
            self._graphs[shape] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[shape], pool=pool):
                self._step(shape)
        with torch.no_grad():
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
            self._revive_()
        self.step_in_epoch.zero_()
