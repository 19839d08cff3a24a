"""Monitor a training run: measure the signal every few steps, to see when it goes wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from normfree.arguments import check_arguments, check_call, check_python_modules, model_inside
from normfree.diagnostics.diagnosis import judge_model
from normfree.diagnostics.propagation import Loss, propagate
from normfree.diagnostics.rules.findings import SEVERITY
from normfree.diagnostics.verdict import Verdict
from normfree.errors import unknown_name
from normfree.nn.model_state import call_arguments, eagerly
from normfree.plan import ResidualPlan
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.storage.writing import to_json_values


@dataclass(frozen=True)
class MonitorRecord:
    """One measurement of a monitor.

    Attributes:
        step: The training step, counted from 0.
        loss: The loss, NaN if there was none.
        verdict: The verdict on the signal.
        forward: The variance of the signal at every residual sum.
        backward: The variance of the gradient at every residual sum.
    """

    step: int
    loss: float
    verdict: Verdict
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def scalars(self) -> dict[str, float]:
        """Return the measurement as a few numbers for a logger: the loss, and growth per block and in all."""
        found = {"signal/loss": self.loss}
        for name, direction in (("forward", self.verdict.forward), ("backward", self.verdict.backward)):
            found |= {f"signal/{name}_per_block": direction.factor, f"signal/{name}_in_all": direction.total}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain data, as in the lines of a monitor's file."""
        return {
            "step": self.step,
            "loss": self.loss,
            "status": self.verdict.status,
            "sentence": self.verdict.sentence,
            "forward": self.forward,
            "backward": self.backward,
        }


@dataclass
class Monitor:
    """Measure a model every few steps of any training loop.

        monitor = Monitor(model, every=100, path="signal.jsonl")
        for inputs, targets in batches:
            ...  # your step
            monitor.step(inputs, targets)

    Most calls of `step` only count. A measurement takes about as long as a training step, because it makes a forward
    and a backward pass of its own. It restores the model, its gradients and the random state, so that the run is the
    same with and without the monitor.

    Args:
        model: Any model with weight layers. A compiled one is measured as plain Python.
        every: The number of steps between two measurements.
        path: A file to which each measurement is appended at once as a line of JSON, so that it survives a crash.
        loss: A function of the output and the targets (default: the model's own loss, or cross-entropy).
        plan: The residual plan (default: the model's own, or the plan discovered at the first measurement).
        log: Where to log `MonitorRecord.scalars`: a function of a dictionary and the step, or a TensorBoard
            `SummaryWriter`.

    Attributes:
        moments: The measurements so far.
        count: The number of steps so far.

    Raises:
        ValueError: if an argument is not of its kind, `every` is below 1, or the folder of `path` does not exist.
    """

    model: nn.Module
    every: int = 100
    path: str | Path | None = None
    loss: Loss | None = None
    plan: ResidualPlan | None = None
    log: Any = None
    moments: list[MonitorRecord] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        check_arguments(model=self.model, every=self.every, loss=self.loss, plan=self.plan)
        check_python_modules(self.model)
        if self.path is not None and (not Path(self.path).parent.is_dir() or Path(self.path).is_dir()):
            raise ValueError(
                f"expected a file in a folder that exists as path, got '{self.path}'; make the folder first"
            )
        if self.every < 1:
            raise ValueError(f"expected every to be at least 1 step, got {self.every}")

    def step(self, inputs: Any, targets: Any = None) -> MonitorRecord | None:
        """Count a training step, and measure at the first and every `every`-th step after it.

        Args:
            inputs: A batch: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
            targets: The second argument of the loss. Without targets, loss and a loss of the model's own, the
                backward pass starts from a random gradient.

        Returns:
            The measurement, or None at a step without one.

        Raises:
            ValueError: if the signal cannot be measured, as for `normfree.diagnose`.
        """
        due = self.count % self.every == 0
        self.count += 1
        return self.measure(inputs, targets) if due else None

    def measure(self, inputs: Any, targets: Any = None) -> MonitorRecord:
        """Measure now, without counting a step.

        Args:
            inputs: A batch, as for `step`.
            targets: The targets of the loss, as for `step`.

        Returns:
            The measurement.

        Raises:
            ValueError: if the signal cannot be measured, as for `normfree.diagnose`.
        """
        check_arguments(inputs=inputs)
        model = model_inside(self.model)
        check_call(model, *call_arguments(inputs))
        with eagerly():
            signal = propagate(model, inputs, targets, plan=self.plan, loss=self.loss)
            verdict = judge_model(model, signal)
        self.plan = signal.plan  # discovered once
        record = MonitorRecord(
            max(self.count - 1, 0),
            signal.loss,
            verdict,
            tuple(signal.series("sum")),
            tuple(signal.series("sum_gradient")),
        )
        self.moments.append(record)
        if self.path is not None:
            self._append(record)
        if self.log is not None:
            self._log(record)
        return record

    def first(self, status: str) -> MonitorRecord | None:
        """Find the first measurement with this status.

        Args:
            status: The status of a verdict, such as 'exploding'.

        Returns:
            The measurement, or None if there is none.

        Raises:
            ValueError: if no verdict has this status.
        """
        if status not in SEVERITY:
            raise unknown_name("status", status, SEVERITY)
        return next((m for m in self.moments if m.verdict.status == status), None)

    def save(self, path: str | Path) -> None:
        """Plot the variances over depth for up to seven measurements, the first and the last among them.

        Args:
            path: A file name that ends in .png or .svg.

        Raises:
            ValueError: if nothing was measured, or the file name has another ending.
            ImportError: if matplotlib is not installed.
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

    def _log(self, record: MonitorRecord) -> None:
        add_scalar = getattr(self.log, "add_scalar", None)  # of TensorBoard
        if add_scalar is None:
            self.log(record.scalars(), record.step)
            return
        for name, number in record.scalars().items():
            add_scalar(name, number, record.step)

    def _append(self, record: MonitorRecord) -> None:
        with Path(self.path or "").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json_values(record.to_json()), allow_nan=False) + "\n")
