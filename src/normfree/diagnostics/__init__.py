"""Diagnostics: see where a network's signal dies or explodes.

`diagnose` measures and judges a model, `Monitor` does so during training, and `propagate` and `judge` are their two
steps. `coordinate_check` compares widths. `top_eigenvalue`, `measure_updates` and `gradient_bounds` measure quantities
of the papers.

Read the files of a diagnosis in this order; each calls later ones only, but for `name_pattern` of `blocks`:

1. `diagnosis`: `diagnose`, the text, the table and the page of its result.
2. `propagation`: the pass. It sets up what observes the pass: `layer_signals` (weights and their gradients),
   `sum_hooks` (residual sums), `blocks` (missing sums), `autograd_graph` (functions) and `input_output` (both ends).
   These reduce tensors by `moments` to the plain numbers of `signals`.
3. `extra_passes`, only where the pass leaves a question open, and `invariants`, checks of a few samples.
4. `verdict`: the rules in `module_rules`, `rules` and `loss_rules`, pure functions of the numbers, both directions by
   `growth`, and `outliers`. `findings` has their words.
"""

from normfree.diagnostics.bounds import gradient_bounds
from normfree.diagnostics.coordinates import CoordinateCheck, coordinate_check
from normfree.diagnostics.curvature import top_eigenvalue
from normfree.diagnostics.diagnosis import Diagnosis, diagnose
from normfree.diagnostics.monitor import Monitor
from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal
from normfree.diagnostics.updates import measure_updates
from normfree.diagnostics.verdict import Verdict, judge

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
