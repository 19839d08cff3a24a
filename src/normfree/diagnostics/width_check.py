"""A coordinate check: how much the activations of a network change in a few training steps, over its width.

With a parametrization whose learning rate carries over from narrow to wide networks, a coordinate of every activation
changes by the same amount at any width. With the standard parametrization the change grows with the width, so that the
best learning rate falls.

Reference: Yang et al. 2022, Tensor Programs V (coordinate checking); the idea is that of the package mup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normfree.diagnostics.measurement.inputs_and_outputs import cross_entropy, first_tensor
from normfree.diagnostics.propagation import Loss, plan_of
from normfree.nn.model_state import call_arguments, hooked, preserve_random_state
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, compact, notebook_html

FLAT = 0.25  # largest exponent of the width that counts as none; sqrt(width) has 0.5
OUTPUT = "the output"


@dataclass(frozen=True, repr=False)
class CoordinateCheck:
    """The change of activations over widths: print it, or save it as .png or .svg.

    Attributes:
        widths: The widths.
        steps: The number of training steps.
        changes: For each layer that all widths have, the root mean square change of a coordinate at each width.
    """

    widths: tuple[int, ...]
    steps: int
    changes: Mapping[str, tuple[float, ...]]

    def exponent(self, layer: str) -> float:
        """The exponent of a power of the width through the changes of a layer, NaN if one is not positive."""
        values = self.changes[layer]
        if not all(0 < value < math.inf for value in values):
            return math.nan
        return float(np.polyfit(np.log(self.widths), np.log(values), 1)[0])

    @property
    def verdict(self) -> str:
        """One sentence: whether the change is the same at every width, grows or shrinks, and where most."""
        exponents = {name: e for name in self.changes if not math.isnan(e := self.exponent(name))}
        if not exponents:
            return "no layer changes by a finite amount at every width: the steps are too large, or nothing learns"
        worst = max(exponents, key=lambda name: abs(exponents[name]))
        if abs(exponents[worst]) <= FLAT:
            return f"the change is the same at every width (at most as width^{exponents[worst]:.2f}, in {worst})"
        way, rate = ("grows", "fall") if exponents[worst] > 0 else ("shrinks", "grow")
        return (
            f"the change {way} with the width, as width^{exponents[worst]:.2f} in {worst}: the best learning rate will "
            f"{rate} with the width"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain data."""
        return {**asdict(self), "exponents": {name: self.exponent(name) for name in self.changes}}

    def table(self) -> Table:
        """Make a table with a row for each layer."""
        columns = (Column("layer"), *(Column(f"width {w}", "right") for w in self.widths), Column("exponent", "right"))
        rows = tuple(
            (name, *(compact(value) for value in values), f"{self.exponent(name):.2f}")
            for name, values in self.changes.items()
        )
        return Table(f"change of a coordinate in {self.steps} steps", columns, rows, self.verdict)

    def save(self, path: str | Path) -> None:
        """Draw the changes over the width.

        Args:
            path: A file name that ends in .png or .svg.

        Raises:
            ValueError: if the file name has another ending.
            ImportError: if matplotlib is not installed.
        """
        names = list(self.changes)
        shown = [names[i] for i in sorted({round(i * (len(names) - 1) / 5) for i in range(6)})] if names else []
        curves = tuple(Curve(name, self.changes[name]) for name in shown)
        panel = Panel(
            f"change of a coordinate in {self.steps} steps",
            curves,
            y_label="root mean square",
            x_label="width",
            x=tuple(map(float, self.widths)),
            log_x=True,
            note=self.verdict,
        )
        write_plot([panel], path, title="Coordinate check")

    def __repr__(self) -> str:
        widths = ", ".join(map(str, self.widths))
        return f"CoordinateCheck(widths {widths}; {self.verdict})"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return notebook_html("Coordinate check", [self.verdict], self.table())


def coordinate_check(
    build: Callable[[int], nn.Module],
    widths: Sequence[int],
    inputs: Any,
    targets: Any = None,
    *,
    steps: int = 4,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    lr: float = 1e-3,
    loss: Loss | None = None,
) -> CoordinateCheck:
    """Train a network at several widths for a few steps, and measure how far its activations move.

    Args:
        build: Builds the network of a given width. It is called once for each width, with the same random state.
        widths: Two or more widths.
        inputs: A batch, as for `diagnose`. Every width gets the same.
        targets: The second argument of the loss. Without targets and loss, classes are drawn at random.
        steps: The number of steps.
        optimizer: Makes the optimizer of a model (default: Adam with learning rate `lr`).
        lr: The learning rate of the default optimizer.
        loss: A function of the output and the targets (default: cross-entropy).

    Returns:
        The root mean square change of every weight layer's output and of the network's output, at each width.

    Raises:
        ValueError: if there are fewer than two different widths, or no step.

    >>> def build(width):
    ...     return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    >>> x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    >>> sorted(coordinate_check(build, [16, 32, 64], x).changes)
    ['0', 'the output']
    """
    if len(set(widths)) < 2 or steps < 1:
        raise ValueError(f"expected two or more widths and a step, got widths {list(widths)} and {steps} steps")
    found = [_changes(build, width, inputs, targets, steps, optimizer, lr, loss) for width in sorted(set(widths))]
    common = [name for name in found[0] if all(name in changes for changes in found)]
    return CoordinateCheck(tuple(sorted(set(widths))), steps, {name: tuple(c[name] for c in found) for name in common})


def _changes(
    build: Callable[[int], nn.Module],
    width: int,
    inputs: Any,
    targets: Any,
    steps: int,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    lr: float,
    loss: Loss | None,
) -> dict[str, float]:
    """The change of each layer's output at one width."""
    args, kwargs = call_arguments(inputs)
    with preserve_random_state([]):
        torch.manual_seed(0)
        model = deepcopy(build(width))
        hidden = [layer.name for layer in plan_of(model, inputs).hidden() if layer.name and not layer.gate]
        update = torch.optim.Adam(model.parameters(), lr=lr) if optimizer is None else optimizer(model)
        before = _activations(model, hidden, args, kwargs)
        if targets is None and loss is None:
            targets = torch.randint(before[OUTPUT].shape[1], before[OUTPUT].shape[:1], device=before[OUTPUT].device)
        for _ in range(steps):
            update.zero_grad()
            (loss or cross_entropy)(model(*args, **kwargs), targets).backward()
            update.step()
        after = _activations(model, hidden, args, kwargs)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before if name in after}


def _activations(model: nn.Module, names: Sequence[str], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The outputs of some modules and of the model; of several calls, the last."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_m: nn.Module, _a: Any, out: Any) -> None:
            tensor = out[0] if isinstance(out, tuple) and out else out
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                found[name] = tensor.detach().clone()

        return keep

    with torch.no_grad(), hooked({model.get_submodule(name): hook(name) for name in names}):
        found[OUTPUT] = first_tensor(model(*args, **kwargs)).detach().clone()
    found[OUTPUT] = found.pop(OUTPUT)  # last
    return found
