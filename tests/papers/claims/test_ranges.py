"""Every range has a source that is no earlier result of ours, and every table and figure of the papers has a claim."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from normfree_papers.claims.claim import Check, Claim
from normfree_papers.claims.judgement import checks_at
from normfree_papers.claims.ledger import DRAWINGS
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.reproduction import read_result, result_path

CLAIMS = all_claims()
RESULTS = Path(__file__).parents[3] / "results"

# A reason that rests on a result of ours; "measured" alone may be how the paper's figure came about.
OWN_RESULTS = re.compile(
    r"earlier (measurement|run|result|value)s?|previous (measurement|run|result)s?"
    r"|measured (here|before|earlier|once)|(runs?|results?|measurements?) (from |of )?before|as (measured|found) here"
    r"|our (own )?(earlier |first |stored )?(measurements?|results?|runs)\b|here it (is|was)|came out (here|before)",
    re.IGNORECASE,
)


def problems(check: Check) -> Iterator[str]:
    """What is wrong with the reason for the range of a check."""
    if check.source is None:
        yield "no source"
    if found := OWN_RESULTS.search(check.why):
        yield f"rests on a result of ours: {found[0]!r}"
    if (check.source == "reading") != check.why.startswith("our reading of the word '"):
        yield "the reason of a reading, and no other, begins: our reading of the word '…'"
    if check.source == "paper" and check.paper is None:
        yield "a range by the paper without the paper's number or words"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.id)
def test_every_range_has_a_source_which_is_no_result_of_ours(claim: Claim) -> None:
    assert {check.name: found for check in claim.checks if (found := list(problems(check)))} == {}


@pytest.mark.parametrize(
    ("why", "source", "found"),
    [
        ("the printed figure ± its rounding", "paper", 0),
        ("three standard deviations of a mean of 1,000 draws", "derived", 0),
        ("our reading of the word 'most': more than half; an interval below a half refutes it", "reading", 0),
        ("most is more than half", "reading", 1),
        ("our reading of the word 'most': more than half", "derived", 1),
        ("the printed figure", None, 1),
        ("an earlier measurement gave 1.2", "derived", 1),
        ("measured here before: 1.2", "derived", 1),
        ("twice the spread of earlier runs", "derived", 1),
        ("the results of before lie at 1.2", "paper", 1),
    ],
)
def test_reason_is_refused_by_its_words(why: str, source: str | None, found: int) -> None:
    check = Check(name="x", statement="x", low=0.0, why=why, source=source, paper="x")  # type: ignore[arg-type]
    assert len(list(problems(check))) == found


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_stored_outcomes_of_yes_and_no_are_judged_as_such(claim: Claim) -> None:
    """A number that is 0 or 1 for every seed, and both, is binary; the t-interval would be too sure of it."""
    for scale in ("quick", "full"):
        path = result_path(RESULTS, claim, scale)  # type: ignore[arg-type]
        values = read_result(path)["values"] if path.exists() else {}
        for check in checks_at(claim, scale):  # type: ignore[arg-type]
            found = values.get(check.name, {"values": []})["values"]
            difference = " - " in check.name  # of two outcomes, which may also be -1
            assert set(found) != {0.0, 1.0} or check.binary or check.exact or difference, check.name


# Tables and figures

PLACES = {  # the captions of the papers
    "fixup": {"Figure": 6, "Table": 4},
    "wninit": {"Figure": 4, "Table": 2},
    "robust": {"Figure": 7, "Table": 1},
    "normdead": {"Figure": 5, "Table": 0},
}


def places(where: str) -> set[str]:
    """The tables and figures that a text names."""
    found = set()
    for kind, numbers in re.findall(r"\b(Figure|Table)s? ((?:\d+(?:, | and )?)+)", where):
        found |= {f"{kind} {number}" for number in re.findall(r"\d+", numbers)}
    return found


def test_places_are_read_from_a_text() -> None:
    assert places("Table 2, Figures 5 and 6") == {"Table 2", "Figure 5", "Figure 6"}
    assert places("Figure 2, left") == {"Figure 2"}
    assert places("Section 3.2 (equation 5)") == set()


@pytest.mark.parametrize("paper", PLACES)
def test_every_table_and_figure_has_a_claim_or_is_a_drawing(paper: str) -> None:
    printed = {f"{kind} {n}" for kind, count in PLACES[paper].items() for n in range(1, count + 1)}
    drawn = set(DRAWINGS.get(paper, {}))
    claimed = set().union(*(places(claim.where) for claim in CLAIMS if claim.paper == paper))
    assert claimed | drawn == printed
    assert not claimed & drawn


def test_data_that_cannot_be_had_is_named() -> None:
    lacking = {claim.id: claim.lacks for claim in CLAIMS if claim.lacks}
    assert lacking == {
        "fixup/table2": "ImageNet",
        "fixup/table3": "IWSLT and WMT",
        "normdead/sec4_3_regnet": "ImageNet",
    }
    checks = {(claim.id, check.lacks) for claim in CLAIMS for check in claim.checks if check.lacks}
    assert checks == {
        ("fixup/table4", "SVHN"),
        ("wninit/table1", "CIFAR-100"),
        ("wninit/table2", "CIFAR-100"),
        ("normdead/sec4_3_regnet", "ImageNet"),
    }
