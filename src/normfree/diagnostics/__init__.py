"""Diagnostics: see where a network's signal dies or explodes.

`diagnose` measures and judges a model, `Monitor` does so during training, and `propagate` and `judge` are their two
steps. `coordinate_check` compares widths. `top_eigenvalue`, `measure_updates` and `gradient_bounds` measure quantities
of the papers.

Read a diagnosis in this order; each part calls later ones only:

1. `diagnosis`: `diagnose`, and the text, the table and the page of its result.
2. `propagation`: one forward and one backward pass. The files of `measurement/` observe it, and reduce every tensor to
   the numbers of `signals`: a `SumSignal` per residual sum, a `LayerSignal` per weight layer, and a `Fact` for anything
   else about one place.
3. `passes/`: short passes of a few samples, which show what no single pass can, and passes of the whole batch only
   where something is wrong, to find the module behind it.
4. `verdict`: pure functions of the numbers. The files of `rules/` judge the growth over depth, single blocks, the
   signal, the modules and the loss, and fill the rows of the table `rules/findings.toml`.
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
