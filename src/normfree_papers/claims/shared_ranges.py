"""Checks and reasons for ranges that several claims share: our reading of a word, and how far a count varies."""

from __future__ import annotations

import math
from typing import Any

from normfree_papers.claims.claim import Check, expect
from normfree_papers.claims.seed_metrics import DEAD

GAP = 7.24 / 6.61
"""The ratio of two errors in Table 1 of `fixup`, which section 4.2 calls a gap: what matches lies below."""


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


def it_trains(name: str, what: str, *, low: float = DEAD, why: str = "", **options: Any) -> Check:
    """A network trains: `what`, its accuracy, is at least `low`."""
    return expect(name, low=low, **options).reading(f"{what}, in %: it trains", why=why or trains())


def counted_error(percent: float, images: int) -> float:
    """Two standard deviations of an error, in per cent, that is counted on this number of images.

    >>> round(counted_error(50.0, 10_000), 6)
    1.0
    """
    share = percent / 100
    return 200 * math.sqrt(share * (1 - share) / images)


def printed_error(row: str, paper: float, *, main: bool = True, lacks: str = "", images: int = 10_000) -> Check:
    """The test error of a row is the printed one, within the sampling error of a count."""
    slack = counted_error(paper, images)
    return expect(
        f"test error, {row}",
        paper=paper,
        low=round(paper - slack, 2),
        high=round(paper + slack, 2),
        main=main,
        scale="full",
    ).printed(
        f"test error of {row}, in %",
        why=f"no spread is printed; two standard deviations of an error counted on {images:,} images are {slack:.2f}",
        lacks=lacks,
    )
