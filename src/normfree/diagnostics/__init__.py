"""Diagnostics: see where a network's signal dies or explodes."""

from normfree.diagnostics.diagnosis import Diagnosis, diagnose
from normfree.diagnostics.monitor import Monitor
from normfree.diagnostics.propagation import Signal, propagate
from normfree.diagnostics.verdict import Verdict, judge

__all__ = ["Diagnosis", "Monitor", "Signal", "Verdict", "diagnose", "judge", "propagate"]
