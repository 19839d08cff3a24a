"""Experiments: the figures, tables and theorems of the four papers as claims that can be run and judged."""

from normfree.experiments.claims import Check, Claim, Cost, Judgement, Measurement, Settings, all_claims, get, judge
from normfree.experiments.reproduction import reproduce

__all__ = [
    "Check",
    "Claim",
    "Cost",
    "Judgement",
    "Measurement",
    "Settings",
    "all_claims",
    "get",
    "judge",
    "reproduce",
]
