"""Diagnostics: see where a network's signal dies or explodes.

`diagnose` measures and judges a model, `Monitor` does so during training, and `propagate` and `judge` are their two
steps. `coordinate_check` compares widths. `top_eigenvalue`, `measure_updates` and `gradient_bounds` measure quantities
of the papers.
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
