"""The figures, tables and theorems of the four papers as claims that can be run and judged."""

from normfree_papers.claims.claim import Check, Claim, Cost, Judgement, Measurement, Settings, judge
from normfree_papers.claims.registry import all_claims, get
from normfree_papers.claims.reproduction import reproduce

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
