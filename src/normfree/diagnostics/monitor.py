"""Watch a run: the same measurement every N steps, so that the moment it goes wrong can be seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from normfree.diagnostics.diagnosis import finite, verdict_on
from normfree.diagnostics.propagation import Loss, propagate
from normfree.diagnostics.verdict import Verdict
from normfree.plan import ResidualPlan
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot


@dataclass(frozen=True)
class Moment:
    """One measurement: the step, the loss, the verdict, and the variances at every sum."""

    step: int
    loss: float
    verdict: Verdict
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass
class Monitor:
    """Measure a model every `every` steps of any training loop.

    Call `monitor.step(inputs, targets)` once a training step; most calls only count. A measurement costs about one
    training step (a forward and a backward pass of its own) and leaves the model, its gradients and the random state as
    they were, so that the run is the same with and without it. With `path` every moment is appended to a file of JSON
    lines at once, and survives a crash.

        monitor = Monitor(model, every=100, path="signal.jsonl")
        for inputs, targets in batches:
            ...  # your step
            monitor.step(inputs, targets)
    """

    model: nn.Module
    every: int = 100
    path: str | Path | None = None
    loss: Loss | None = None
    plan: ResidualPlan | None = None
    moments: list[Moment] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"expected every to be at least 1 step, got {self.every}")

    def step(self, inputs: Any, targets: Any = None) -> Moment | None:
        """Count a step; measure and return the moment when it is time, the first step included."""
        due = self.count % self.every == 0
        self.count += 1
        return self.measure(inputs, targets) if due else None

    def measure(self, inputs: Any, targets: Any = None) -> Moment:
        """Measure now."""
        signal = propagate(self.model, inputs, targets, plan=self.plan, loss=self.loss)
        self.plan = signal.plan  # found once
        moment = Moment(
            max(self.count - 1, 0),
            signal.loss,
            verdict_on(self.model, signal),
            tuple(signal.series("sum")),
            tuple(signal.series("sum_gradient")),
        )
        self.moments.append(moment)
        if self.path is not None:
            self._append(moment)
        return moment

    def first(self, status: str) -> Moment | None:
        """The first moment with this verdict, such as 'exploding'; None when it never came."""
        return next((m for m in self.moments if m.verdict.status == status), None)

    def save(self, path: str | Path) -> None:
        """Draw the variances over depth at up to seven of the moments that were measured, first and last among them.

        Raises `ValueError` when nothing was measured.
        """
        if not self.moments:
            raise ValueError("expected at least one measurement to draw, got none; call step() or measure() first")
        latest = list({m.step: m for m in self.moments}.values())
        chosen = dict.fromkeys(round(i * (len(latest) - 1) / 6) for i in range(7))
        shown = [latest[i] for i in chosen]
        panels = [
            Panel(title, tuple(Curve(f"step {m.step}", getattr(m, part)) for m in shown), y_label="variance")
            for title, part in (("forward: variance of the sum", "forward"), ("backward: of its gradient", "backward"))
        ]
        write_plot(panels, path, title="The signal during training")

    def _append(self, moment: Moment) -> None:
        record = {
            "step": moment.step,
            "loss": moment.loss,
            "status": moment.verdict.status,
            "sentence": moment.verdict.sentence,
            "forward": moment.forward,
            "backward": moment.backward,
        }
        with Path(self.path or "").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")
