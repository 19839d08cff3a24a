"""Reasons for ranges that several claims share: what we read into a word, and how far a counted error varies."""

from __future__ import annotations

import math

from normfree_papers.claims.seed_metrics import DEAD


def reading(word: str, meaning: str, refuted: str) -> str:
    """The reason for a range that rests on a word of the paper.

    >>> reading("most", "at least half", "below a half")
    "our reading of the word 'most': at least half; an interval below a half refutes it"
    """
    return f"our reading of the word '{word}': {meaning}; an interval {refuted} refutes it"


def trains(word: str = "train") -> str:
    """The reason for the least accuracy of a network that trains."""
    return reading(word, "more than twice the accuracy of chance", f"below {DEAD:g} %")


def does_not_train(word: str) -> str:
    """The reason for the largest accuracy of a network that does not train."""
    return reading(word, "at most twice the accuracy of chance", f"above {DEAD:g} %")


def counted_error(percent: float, images: int) -> float:
    """Two standard deviations of an error, in per cent, that is counted on this number of images.

    >>> round(counted_error(50.0, 10_000), 6)
    1.0
    """
    share = percent / 100
    return 200 * math.sqrt(share * (1 - share) / images)
