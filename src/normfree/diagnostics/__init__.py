"""Diagnostics: see where a network's signal dies or explodes.

`diagnose` measures and judges a model, `Monitor` does so during training, and `propagate` and `judge` are their two
steps. `coordinate_check` compares widths. `top_eigenvalue`, `measure_updates` and `gradient_bounds` measure quantities
of the papers.

Read the files of a diagnosis in this order; each calls later ones only:

1. `diagnosis`: `diagnose`, the text, the table and the page of its result.
2. `propagation`: the pass. It sets up what observes the pass: `input_and_loss` (both ends), `loss_checks` (the loss at
   other outputs), `layer_signals` (weights, their gradients and the modules), `sum_hooks` (residual sums) and
   `autograd_graph` (functions, with `graph_nodes`). These reduce tensors by `moments` to the numbers of `signals`:
   a `SumSignal` per sum, a `LayerSignal` per weight layer, and a `Fact` for anything else about one place.
3. `fault_localization`, only where the pass leaves a question open, and `invariants`, checks of a few samples; both
   compare passes by `tracing`.
4. `verdict`: pure functions of the numbers. `module_rules` judges modules and functions, most of them by one table of
   facts; `rules` judges the signal, `growth` both directions over depth, and `outliers` single blocks. `findings`
   makes them from the table of `finding_words`.
"""

from normfree.diagnostics.curvature import top_eigenvalue
from normfree.diagnostics.diagnosis import Diagnosis, diagnose
from normfree.diagnostics.homogeneity_bounds import gradient_bounds
from normfree.diagnostics.monitor import Monitor
from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal
from normfree.diagnostics.updates import measure_updates
from normfree.diagnostics.verdict import Verdict, judge
from normfree.diagnostics.width_check import CoordinateCheck, coordinate_check

__all__ = [
    "CoordinateCheck",
    "Diagnosis",
    "Monitor",
    "Signal",
    "Verdict",
    "coordinate_check",
    "diagnose",
    "gradient_bounds",
    "judge",
    "measure_updates",
    "propagate",
    "top_eigenvalue",
]
