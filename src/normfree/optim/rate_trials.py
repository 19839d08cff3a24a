"""The steps of a search for a learning rate: test runs that restore the weights, proposals, checks and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normfree.arguments import call_loss, explained_failures
from normfree.diagnostics.curvature import top_eigenvalue
from normfree.diagnostics.measurement.inputs_and_outputs import cross_entropy, own_loss
from normfree.diagnostics.propagation import Loss
from normfree.nn.model_state import call_arguments, is_sharded
from normfree.optim.clipping import agc_parameters, clip_grad_agc_
from normfree.optim.master_weights import OptimizerName
from normfree.report.tables import compact

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
MARGIN = 3.0  # a run's proposal is this much below the rate of its lowest loss
_SMOOTH = 0.8  # the weight of the past in the average of losses
_FAR = 3.0  # a run has diverged when its loss is this many times the highest first loss above that
_HALVINGS = 16

OPTIMIZERS: dict[OptimizerName, Callable[[float], MakeOptimizer]] = {
    "sgd": lambda momentum: lambda groups: torch.optim.SGD(groups, momentum=momentum),
    "adam": lambda momentum: lambda groups: torch.optim.Adam(groups),
    "adamw": lambda momentum: lambda groups: torch.optim.AdamW(groups),
}


class RateTestRun:
    """Trains a model on given batches from its present weights, and restores them.

    Attributes:
        starts: The loss of every batch at the present weights.
        before: Their mean.
        limit: The loss above which a run has diverged.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[tuple[Any, Any]],
        loss: Loss | None,
        make: Callable[[], torch.optim.Optimizer],
        clip: float | None,
        seed: int,
    ) -> None:
        self.model, self.batches, self.loss, self.make, self.clip = model, batches, loss, make, clip
        self._clipped = agc_parameters(model) if clip is not None else []
        self._seed = seed
        with self._restored():
            self.starts = self._losses()
        self.before = _mean(self.starts)
        self.limit = max(self.starts) + _FAR * max(max(map(abs, self.starts)), 1e-12)

    def train(self, rates: Sequence[float], order: Sequence[int]) -> tuple[list[float], float]:
        """Train until the rates end or the loss diverges.

        Returns:
            Two things. First, the loss before each step; to compare easy and hard batches, the batch's initial loss is
            subtracted and the mean initial loss added. Second, the mean loss over all batches at the end; ∞ if
            diverged.
        """
        losses: list[float] = []
        with self._restored():
            optimizer = self.make()
            factors = [group["lr"] for group in optimizer.param_groups]
            for rate, number in zip(rates, order, strict=False):
                for group, factor in zip(optimizer.param_groups, factors, strict=True):
                    group["lr"] = rate * factor
                optimizer.zero_grad()
                value = self._loss(number)
                level = float(value.detach())
                losses.append(level - self.starts[number] + self.before)
                if not level <= self.limit:  # true for NaN too
                    return losses, math.inf
                value.backward()
                if self.clip is not None:
                    clip_grad_agc_(self._clipped, self.clip)
                optimizer.step()
            return losses, _mean(self._losses())

    @torch.no_grad()
    def _losses(self) -> list[float]:
        return [float(self._loss(i)) for i in range(len(self.batches))]

    def _loss(self, number: int) -> Tensor:
        inputs, targets = self.batches[number]
        args, kwargs = call_arguments(inputs)
        with explained_failures(self.model, (args, kwargs)):
            output = self.model(*args, **kwargs)
        return batch_loss(output, targets, self.loss)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Begin with the seed, and restore the values of parameters and buffers afterwards."""
        held = [(t, t.detach().clone()) for t in [*self.model.parameters(), *self.model.buffers()]]
        torch.manual_seed(self._seed)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in held:
                    tensor.copy_(value)
            for parameter in self.model.parameters():
                parameter.grad = None


def batch_loss(output: Any, targets: Any, loss: Loss | None) -> Tensor:
    """Return the loss of an output: by the given function, else the model's own, else cross-entropy.

    Raises:
        ValueError: If there are neither targets nor a loss.
    """
    if loss is not None:
        return call_loss(loss, output, targets)
    own = own_loss(output)
    if targets is None and own is not None:
        return own
    if targets is None:
        raise ValueError(
            "expected batches of (inputs, targets), or a model that returns its own loss, got neither; pass a list of "
            "pairs, [(inputs, targets)], or loss="
        )
    return cross_entropy(output, targets)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and targets; a mapping or a single tensor has no targets."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping | Tensor):
        return batch, None
    raise ValueError(
        f"expected batches of (inputs, targets) or mappings of keyword arguments, got {type(batch).__name__}; wrap "
        "several inputs in a tuple of their own"
    )


def batch_orders(count: int, steps: int, runs: int, seed: int) -> Iterator[list[int]]:
    """Yield the numbers of the batches for each run; every pass over the batches has another random order."""
    for run in range(runs):
        draw = torch.Generator().manual_seed(seed + run)
        passes = (torch.randperm(count, generator=draw).tolist() for _ in range(-(-steps // count)))
        yield [number for one in passes for number in one][:steps]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def propose_rate(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return a third of the rate with the lowest average loss; None if no average is below the first loss."""
    average, weight, best, place = 0.0, 0.0, math.inf, 0
    for i, value in enumerate(losses):
        if not math.isfinite(value):
            break
        average, weight = _SMOOTH * average + value, _SMOOTH * weight + 1
        if average / weight < best:
            best, place = average / weight, i
    return rates[place] / MARGIN if place and best < losses[0] else None


def halve_until_trained(
    trial: RateTestRun, rate: float, orders: Sequence[Sequence[int]], check: int
) -> tuple[float, tuple[float, ...]]:
    """Halve a rate until `check` steps lower the mean loss for every order; return it and the losses."""
    for _ in range(_HALVINGS):
        after = []
        for order in orders:
            after.append(trial.train([rate] * check, order)[1])
            if not after[-1] < trial.before:
                break
        else:
            return rate, tuple(after)
        rate /= 2
    raise ValueError(
        f"expected {check} steps to lower the loss of {compact(trial.before)} at some rate, but none down to "
        f"{compact(rate)} did; pass larger batches, more of them, or targets that can be learned"
    )


def curvature_bounds(
    model: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss | None, momentum: float
) -> tuple[tuple[float, ...], str]:
    """Return 2·(1 + μ)/λ for each batch, or the reason why it is not known."""
    if any(map(is_sharded, model.parameters())):
        return (), "The curvature was not measured, because the parameters are sharded."
    found = []
    for inputs, targets in batches:
        try:
            top = top_eigenvalue(
                model, inputs, targets, loss=lambda o, t: batch_loss(o, t, loss), which="largest",
                max_products=24, tolerance=0.02, vectors=8,
            ).eigenvalue  # fmt: skip
        except (ValueError, RuntimeError, NotImplementedError) as error:
            return (), f"The curvature was not measured: {' '.join(str(error).split())}"
        found.append(math.inf if top <= 0 else 2 * (1 + momentum) / top)
    return tuple(found), "" if all(map(math.isfinite, found)) else "Along some batches the loss curves nowhere upwards."
