"""Find a learning rate that trains: a range test on a few batches, and the bound 2/λ from the loss's curvature.

The range test trains with a rate that grows exponentially, η_t = η_0 · (η_T/η_0)^(t/T), until the loss diverges. For a
quadratic loss, gradient descent with momentum μ diverges above 2·(1 + μ)/λ, with λ the top eigenvalue of the Hessian.

Reference: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3 (the range test); Polyak
1964 (the bound with momentum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normfree.arguments import check_arguments, check_call, check_python_modules
from normfree.diagnostics.propagation import Loss
from normfree.methods import Method
from normfree.models.example_inputs import to_device
from normfree.nn.model_state import call_arguments, preserve_model_state
from normfree.optim.learning_rates import param_groups
from normfree.optim.rate_trials import (
    OPTIMIZERS,
    Groups,
    MakeOptimizer,
    RateTestRun,
    as_pair,
    batch_orders,
    curvature_bounds,
    halve_until_trained,
    propose_rate,
)
from normfree.plan import ResidualPlan, remembered_method
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, compact, notebook_html


@dataclass(frozen=True, repr=False)
class RateSearch:
    """The rate that `find_lr` suggests, and its evidence.

    Attributes:
        suggestion: The learning rate of the weights. `check` steps at this rate lowered the loss for every order of
            the batches.
        interval: From the lowest to the highest rate among the suggestion and the proposals of all runs, widened by one
            step of `rates` on either side. It shows how much the order of the batches changes the result. It is no
            confidence interval, and a longer training may need another rate.
        diverged: The rate at which each run diverged, ∞ if it did not.
        bounds: 2·(1 + μ)/λ for a few batches, the rate above which the quadratic approximation of the loss at the
            start diverges; empty if it was not measured.
        rates: The rates of the range test.
        losses: The losses of each run at these rates, up to the rate at which the run ended. From each loss, the
            batch's initial loss is subtracted and the mean initial loss added.
        before: The mean loss over the batches at the start.
        after: That loss after `check` steps at the suggested rate, for each order of the batches.
        check: The number of these steps.
        notes: What you should know about the numbers.
        optimizer: The optimizer that the rate is for.
    """

    suggestion: float
    interval: tuple[float, float]
    diverged: tuple[float, ...]
    bounds: tuple[float, ...]
    rates: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    before: float
    after: tuple[float, ...]
    check: int
    notes: tuple[str, ...] = ()
    optimizer: str = "sgd"

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data; numbers may be infinite."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def save(self, path: str | Path) -> Path:
        """Draw the losses over the rate, with the suggested rate and the bound.

        Args:
            path: A file name that ends in .png or .svg.

        Returns:
            The path of the file.

        Raises:
            ValueError: If the file name has another ending.
            ImportError: If matplotlib is not installed.
        """
        start = max(run[0] for run in self.losses)
        fall = start - min(value for run in self.losses for value in run if math.isfinite(value))
        top = start + (fall / 2 or abs(start) or 1.0)  # a loss that has diverged is drawn at the top
        shown = [[value if value < top else top for value in run] for run in self.losses]
        low, high = min(map(min, shown)), max(map(max, shown))
        curves = [Curve(f"order {i}", (*run,), self.rates[: len(run)]) for i, run in enumerate(shown, start=1)]
        for name, rate in (("suggested rate", self.suggestion), ("2·(1 + μ)/λ", min(self.bounds, default=math.inf))):
            if math.isfinite(rate):  # a vertical line
                curves.append(Curve(f"{name} {compact(rate)}", (low, high), (rate, rate * (1 + 1e-6))))
        panel = Panel(
            "loss while the rate grows",
            tuple(curves),
            "loss",
            "learning rate",
            log_y=False,
            log_x=True,
            from_zero=False,
            note=str(self),
        )
        write_plot([panel], path, title=f"suggested learning rate: {compact(self.suggestion)}")
        return Path(path)

    def __repr__(self) -> str:
        low, high = map(compact, self.interval)
        return f"RateSearch({compact(self.suggestion)} for {self.optimizer}, runs from {low} to {high})"

    def __str__(self) -> str:
        """Return the number, its spread and what it means, as sentences."""
        return " ".join((f"learning rate {compact(self.suggestion)} for {self.optimizer}:", *self._sentences()))

    def _sentences(self) -> list[str]:
        low, high = self.interval
        ends = (
            f"{compact(min(self.after))}"
            if len(self.after) == 1
            else f"{compact(min(self.after))}…{compact(max(self.after))}"
        )
        count = len(self.losses)
        found = [
            f"{self.check} steps at this rate lowered the loss from {compact(self.before)} to {ends}.",
            f"Plausible rates are {_span(low, high)}, from {count} order{'s' * (count > 1)} of the batches.",
        ]
        met = [rate for rate in self.diverged if math.isfinite(rate)]
        if met:
            every = f"{len(met)} of {count} runs" if len(met) < count else "every run" if count > 1 else "the run"
            found.append(
                f"The test raises the rate until the loss diverges: {every} did, at {_span(min(met), max(met))}."
            )
        if self.bounds:
            lowest = min(self.bounds)
            found.append(f"The curvature at the start allows rates up to {_span(lowest, max(self.bounds))}.")
            if self.suggestion > lowest:
                found.append("The suggestion is above that: the bound is for the weights at the start only.")
        return [*found, *self.notes]

    def _repr_html_(self) -> str:
        columns = (Column("order"), Column("diverged at", "right"), Column("loss after the check", "right"))
        rows = tuple(
            (str(i), compact(rate) if math.isfinite(rate) else "never", compact(loss))
            for i, (rate, loss) in enumerate(zip(self.diverged, self.after, strict=True), start=1)
        )
        return notebook_html(
            f"learning rate {compact(self.suggestion)} for {self.optimizer}",
            self._sentences(),
            Table("range test", columns, rows),
        )


def _span(low: float, high: float) -> str:
    """Return two rates in words, one number if they are the same."""
    return compact(low) if compact(low) == compact(high) else f"{compact(low)} to {compact(high)}"


def find_lr(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    optimizer: str | MakeOptimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip: float | None = None,
    method: str | Method | None = None,
    plan: ResidualPlan | None = None,
    low: float = 1e-6,
    high: float = 10.0,
    steps: int = 100,
    runs: int = 3,
    check: int = 20,
    max_batches: int = 16,
    curvature: bool = True,
    seed: int = 0,
) -> RateSearch:
    """Find a learning rate that trains a model, from a few batches.

    Each run of the range test trains on the batches in an order of its own while the rate grows from `low` to `high`,
    and proposes a third of the rate at which its average loss was lowest. The suggestion is the geometric mean of the
    proposals, halved until `check` steps at this rate lower the mean loss over the batches for every order. With the
    defaults, this takes the time of about 400 training steps, and the curvature that of up to 200 more.

    The model trains in training mode, with the parameter groups of its method. Afterwards weights, buffers, gradients,
    modes and random states are as they were.

    Args:
        model: Any model.
        batches: Batches of (inputs, targets), or mappings of keyword arguments for a model that returns its own loss,
            as those of transformers do with 'labels'. A `DataLoader` will do.
        loss: A function of the output and the targets (default: the model's own loss, or cross-entropy).
        optimizer: 'sgd', 'adam' or 'adamw', or a function from parameter groups to an optimizer.
        momentum: The momentum of 'sgd', at least 0 and below 1.
        weight_decay: The weight decay of the groups.
        clip: The ratio of adaptive clipping (`clip_grad_agc_`) at every step (default: no clipping).
        method: The method of the groups (default: the one that the model remembers; else one rate for all parameters).
        plan: The plan of the groups, as for `param_groups`.
        low: The first rate.
        high: The last rate.
        steps: The number of steps of a run.
        runs: The number of orders of the batches.
        check: The number of steps at the suggested rate that must lower the loss.
        max_batches: The number of batches to take; the runs repeat them.
        curvature: Whether to compute the bound 2·(1 + μ)/λ, for 'sgd' without clipping.
        seed: The seed of the orders and of random numbers such as dropout.

    Returns:
        The suggestion, its spread and the curves; print it, or save it as a picture.

    Raises:
        ValueError: If a setting is invalid, if there is no batch, if a batch does not fit the model, or if no rate
            lowers the loss.

    >>> import torch
    >>> square = lambda output, target: (output**2).mean()
    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = find_lr(model, [(torch.ones(1, 1), None)], square, momentum=0.0)
    >>> found.bounds[0], found.suggestion < 1  # the loss is w², whose second derivative is 2
    (1.0, True)
    """
    check_arguments(model=model, batches=batches, loss=loss, plan=plan, weight_decay=weight_decay)
    if isinstance(model, torch.jit.ScriptModule):
        check_python_modules(model)
    _require_range(low=low, high=high, steps=steps, runs=runs, check=check, max_batches=max_batches)
    make = _optimizer_maker(optimizer, momentum)
    learning = [p for p in model.parameters() if p.requires_grad]
    if not learning:
        raise ValueError(f"expected a model with parameters that learn, got {type(model).__name__} with none")
    found = [as_pair(to_device(batch, learning[0].device)) for batch in islice(batches, max_batches)]
    if not found:
        raise ValueError("expected at least one batch, got none; pass a list of (inputs, targets), or a DataLoader")
    for inputs, _ in found:
        check_arguments(inputs=inputs)
        check_call(model, *call_arguments(inputs))

    def groups() -> Groups:
        if method is None and remembered_method(model) is None:
            return [{"name": "all", "params": learning, "lr": 1.0, "weight_decay": weight_decay}]
        made = param_groups(model, lr=1.0, weight_decay=weight_decay, method=method, plan=plan)
        return [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in made]

    rates = [low * (high / low) ** (t / (steps - 1)) for t in range(steps)]
    orders = list(batch_orders(len(found), max(steps, check), runs, seed))
    with torch.inference_mode(False), torch.enable_grad(), preserve_model_state(model):
        model.train()
        trial = RateTestRun(model, found, loss, lambda: make(groups()), clip, seed)
        if not math.isfinite(trial.before):
            raise ValueError(f"expected a finite loss at the start, got {trial.before}; diagnose the model first")
        tests = [trial.train(rates, order) for order in orders]
        tested = [losses for losses, _ in tests]
        proposals = [p for run in tested if (p := propose_rate(rates, run)) is not None]
        if not proposals:
            raise ValueError(
                f"expected a loss that falls at some rate from {low:g} to {high:g}, got {compact(trial.before)} at the "
                "first step and no lower average later; pass a lower low=, more steps=, or targets that can be learned"
            )
        middle = math.exp(sum(map(math.log, proposals)) / len(proposals))
        suggestion, after = halve_until_trained(trial, middle, orders, check)
        notes: list[str] = []
        bounds: tuple[float, ...] = ()
        if curvature and optimizer == "sgd" and clip is None:
            bounds, note = curvature_bounds(model, found[:runs], loss, momentum)
            notes.append(note)
    notes += _spread_notes(proposals, runs)
    ends = tuple(rates[len(run) - 1] if math.isinf(end) else math.inf for run, end in tests)
    grid = rates[1] / rates[0]
    interval = min(suggestion, *proposals) / grid, max(proposals) * grid
    return RateSearch(
        suggestion,
        interval,
        ends,
        bounds,
        tuple(rates),
        tuple(map(tuple, tested)),
        trial.before,
        after,
        check,
        tuple(filter(None, notes)),
        _name_of(optimizer, momentum),
    )


def _require_range(*, low: float, high: float, steps: int, runs: int, check: int, max_batches: int) -> None:
    if not 0 < low < high < math.inf or steps < 10 or min(runs, check, max_batches) < 1:
        raise ValueError(
            "expected 0 < low < high, at least 10 steps, and at least 1 run, check step and batch, got "
            f"low={low:g}, high={high:g}, steps={steps}, runs={runs}, check={check}, max_batches={max_batches}"
        )


def _optimizer_maker(optimizer: str | MakeOptimizer, momentum: float) -> MakeOptimizer:
    if not 0 <= momentum < 1:
        raise ValueError(f"expected a momentum of at least 0 and below 1, got {momentum:g}; 0.9 is usual")
    if callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"expected optimizer to be {', '.join(OPTIMIZERS)} or a function, got {optimizer!r}; 'sgd' is the default"
        )
    return OPTIMIZERS[optimizer](momentum)


def _name_of(optimizer: str | MakeOptimizer, momentum: float) -> str:
    """Return an optimizer in words."""
    if optimizer == "sgd":
        return f"sgd with momentum {momentum:g}" if momentum else "sgd without momentum"
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "the given optimizer")


def _spread_notes(proposals: list[float], runs: int) -> list[str]:
    """Return a sentence for runs without a proposal, and one for proposals that are far apart."""
    missing = f"{runs - len(proposals)} of {runs} orders proposed no rate."
    apart = "The orders differ more than tenfold: pass larger batches, or more of them."
    return [missing] * (len(proposals) < runs) + [apart] * (max(proposals) > 10 * min(proposals))
