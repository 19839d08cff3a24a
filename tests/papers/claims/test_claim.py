"""The record and the judge, with made-up results that hold, fail, leave it open and are missing."""

import json
from dataclasses import replace

import pytest

from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Row, Settings, judge, near

MAIN = Check(name="main", statement="between 1 and 2", paper=1.5, low=1.0, high=2.0, why="the text")
ASIDE = Check(name="aside", statement="at least 3", low=3.0, why="the plot", main=False)
WRONG = Check(name="wrong", statement="7, printed 3", paper=3.0, low=6.9, high=7.1, why="counted", erratum="a slip")
EXACT = Check(name="exact", statement="between 1 and 2", low=1.0, high=2.0, why="the text", exact=True)
TRAINS = Check(name="trains", statement="most runs train", low=0.5, why="the text", binary=True)
LATE = Check(name="late", statement="at most 0", high=0.0, why="the text", scale="full")


def claim(*checks: Check) -> Claim:
    return Claim(
        id="fixup/made-up",
        where="Nowhere",
        statement="A statement.",
        paper_value="",
        how="By hand.",
        cost=Cost(quick_seconds=0, full_seconds=0),
        checks=checks,
        measure=lambda settings: Measurement(values={}),
    )


def result(scale: str = "full", **values: object) -> dict[str, object]:
    return {"scale": scale, "values": values}


def seeds(*values: float | str) -> dict[str, object]:
    return {"values": list(values)}


@pytest.mark.parametrize(
    ("check", "values", "verdict"),
    [
        (MAIN, (1.45, 1.5, 1.55), "holds"),  # 1.5 ± 0.12
        (MAIN, (1.0, 1.5, 2.0), "undecided"),  # 1.5 ± 1.24
        (MAIN, (2.45, 2.5, 2.55), "fails"),
        (MAIN, (2.0, 2.5, 3.0), "undecided"),  # the mean lies outside, and the interval does not
        (MAIN, (1.5,), "undecided"),  # one value has no interval
        (MAIN, (7.0,), "undecided"),
        (MAIN, (2.0, 2.0), "holds"),  # no spread, and the ends belong to the range
        (MAIN, (2.01, 2.01), "fails"),
        (EXACT, (1.5,), "holds"),
        (EXACT, (2.01,), "fails"),
        (EXACT, (1.0, 1.9, 2.1), "fails"),  # each value counts
        (EXACT, ("nan",), "fails"),
        (MAIN, ("nan",), "fails"),  # as a file has it
        (MAIN, (1.5, 1.5, "nan"), "fails"),
        (MAIN, (1.5, 1.5, "inf"), "fails"),  # one run of three diverged
        (MAIN, ("inf", "-inf"), "fails"),
        (ASIDE, ("inf", 4.0, 5.0), "holds"),  # above is open
        (ASIDE, ("inf", 4.0, 2.0), "undecided"),
        (ASIDE, ("inf",), "undecided"),
        (ASIDE, ("-inf", 4.0, 5.0), "fails"),
        (TRAINS, (1, 1, 1), "undecided"),  # at least 0.29
        (TRAINS, (1,) * 6, "holds"),  # at least 0.54
        (TRAINS, (0,) * 6, "fails"),
        (TRAINS, (1, 0, 1, 0, 1, 0), "undecided"),
        (MAIN, (), "missing"),
        (WRONG, (7.0, 7.0), "paper errs"),
        (WRONG, (3.0, 3.0), "fails"),  # what is printed is what is wrong
        (WRONG, (6.0, 8.0), "undecided"),
    ],
)
def test_number_is_judged_by_its_interval(check, values, verdict):
    row = judge(claim(check), result(**{check.name: seeds(*values)})).rows[0]
    assert row.verdict == verdict


def test_the_mean_alone_would_judge_otherwise():
    """The control: -10.2 ± 6.0 over three seeds against -10 is no failure."""
    ten = Check(name="gap", statement="at least -10", low=-10.0, why="made up")
    row = Row(ten, (-3.4, -12.4, -14.8))
    assert round(row.measured or 0, 1) == -10.2
    assert not ten.admits(row.measured or 0)
    assert row.verdict == "undecided"


def test_differences_by_seed_decide_where_the_seeds_differ_more():
    ours, theirs = (60.0, 70.0, 80.0), (59.0, 69.1, 78.9)
    above = Check(name="gap", statement="ours is better", low=0.0, why="made up")
    assert Row(above, tuple(a - b for a, b in zip(ours, theirs, strict=True))).verdict == "holds"
    assert Row(replace(above, low=69.0), ours).verdict == "undecided"  # not paired


def test_binary_number_of_other_values_is_refused():
    with pytest.raises(ValueError, match="expected outcomes of 0 and 1"):
        judge(claim(TRAINS), result(trains=seeds(0.5, 1.0)))


def test_old_results_have_a_mean_which_is_not_needed():
    stored = {"mean": 99.0, "std": 99.0, "values": [1.45, 1.5, 1.55]}
    row = judge(claim(MAIN), result(main=stored)).rows[0]
    assert (row.verdict, row.measured) == ("holds", pytest.approx(1.5))


GOOD, BAD, OPEN = (1.4, 1.5, 1.6), (7.0, 7.1, 7.2), (1.0, 2.0)


@pytest.mark.parametrize(
    ("checks", "values", "status"),
    [
        ((MAIN,), {"main": GOOD}, "holds"),
        ((MAIN,), {"main": BAD}, "fails"),
        ((MAIN,), {"main": OPEN}, "undecided"),
        ((MAIN,), {"other": GOOD}, "not run"),  # a number that no check names
        ((MAIN,), {}, "not run"),
        ((MAIN, EXACT), {"main": OPEN, "exact": (7.0,)}, "fails"),
        ((MAIN, EXACT), {"main": GOOD}, "undecided"),  # a main number is missing
        ((MAIN, EXACT), {"exact": (7.0,)}, "fails"),
        ((MAIN, ASIDE), {"main": GOOD}, "holds"),  # asides do not decide
        ((MAIN, ASIDE), {"main": GOOD, "aside": (0.0, 0.0)}, "holds"),
        ((MAIN, ASIDE), {"aside": BAD}, "undecided"),
        ((MAIN, WRONG), {"main": GOOD, "wrong": (7.0, 7.0)}, "holds"),
        ((MAIN, WRONG), {"main": GOOD, "wrong": (3.0, 3.0)}, "fails"),
    ],
)
def test_claim_is_judged_by_its_main_checks(checks, values, status):
    made = result(**{name: seeds(*numbers) for name, numbers in values.items()})
    assert judge(claim(*checks), made).status == status
    assert judge(claim(*checks), json.loads(json.dumps(made))) == judge(claim(*checks), made)


def test_judge_of_no_result_is_not_run():
    judgement = judge(claim(MAIN, ASIDE), None)
    assert judgement.status == "not run"
    assert [row.verdict for row in judgement.rows] == ["missing", "missing"]
    assert judge(claim(MAIN, ASIDE), result()) == judgement


def test_summary_counts_main_checks_and_asides_apart():
    checks = (MAIN, EXACT, WRONG, LATE, ASIDE)
    found = {"main": OPEN, "exact": (1.5,), "wrong": (7.0, 7.0), "aside": (0.0, 0.0)}
    judgement = judge(claim(*checks), result(**{name: seeds(*numbers) for name, numbers in found.items()}))
    assert judgement.summary == (
        "2 of 4 checks hold, 1 undecided, 1 not measured, 1 error in the paper; 0 of 1 aside holds, 1 fails"
    )
    assert judgement.missing == (LATE,)
    assert judgement.errata == ("a slip",)


def test_deciding_number_is_the_worst_and_then_the_nearest_to_its_bound():
    near, far = replace(MAIN, name="near", high=1.7), replace(MAIN, name="far")
    both = result(near=seeds(*GOOD), far=seeds(*GOOD), open=seeds(*OPEN), aside=seeds(*BAD))
    for order in ((near, far), (far, near)):
        row = judge(claim(*order, ASIDE), both).deciding
        assert row is not None
        assert row.check.name == "near"
    row = judge(claim(near, far, replace(MAIN, name="open")), both).deciding
    assert row is not None
    assert row.check.name == "open"
    assert judge(claim(ASIDE), both).deciding is None


def test_judge_lets_a_quick_run_hold_no_more_than_it_tests():
    good, late = seeds(*GOOD), seeds(1.0, 1.0)
    assert judge(claim(MAIN), result("quick", main=good)).status == "holds"
    assert judge(claim(MAIN, LATE), result("quick", main=good)).status == "undecided"
    assert judge(claim(MAIN, LATE), result("quick", main=good, late=late)).missing == (LATE,)
    assert judge(claim(MAIN, LATE), result("full", main=good)).status == "undecided"
    assert judge(claim(MAIN, LATE), result("full", main=good, late=late)).status == "fails"
    assert judge(claim(MAIN, LATE), result("quick", late=late)).status == "not run"


def test_judge_leaves_out_checks_of_quick_runs_and_misses_data():
    assert judge(claim(MAIN, replace(LATE, scale="quick")), result("full", main=seeds(*GOOD))).status == "holds"
    absent = replace(MAIN, name="absent", lacks="SVHN")
    made = result("full", main=seeds(*GOOD), absent=seeds(*GOOD))
    assert judge(claim(MAIN, absent), made).status == "undecided"


def test_check_wants_a_range_and_a_reason():
    for wrong in ({"low": 1.0, "high": 0.0, "why": "x"}, {"why": "x"}, {"low": 1.0, "why": ""}):
        with pytest.raises(ValueError, match="expected a range"):
            Check(name="x", statement="x", **wrong)


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValueError, match="unknown scale 'ful'; did you mean 'full'"):
        Settings(scale="ful")  # type: ignore[arg-type]
    for seeds in ((), (1, 1)):
        with pytest.raises(ValueError, match="expected one or more different seeds"):
            Settings(seeds=seeds)


def test_near_expects_an_error_or_a_share_around_a_value():
    absolute, relative = near("x", 2.0, 0.5, paper="two"), near("x", 2.0, share=0.5)
    assert (absolute.low, absolute.high, absolute.paper, absolute.main) == (1.5, 2.5, "two", True)
    assert (relative.low, relative.high) == (1.0, 3.0)
    check = absolute.derived("x is about two", why="the text")
    assert check.admits(2.5)
    assert not check.admits(2.6)
