"""The judge, and its intervals against printed tables and against their own coverage in simulations."""

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from normfree_papers.claims.claim import (
    Check,
    Claim,
    Cost,
    Measurement,
)
from normfree_papers.claims.judgement import Interval, Row, admits, judge, mean_interval, share_interval, t_quantile

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
    assert not admits(ten, row.measured or 0)
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


# Intervals

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 19: 2.093, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "printed"), TABLE.items())
def test_t_quantile_is_that_of_the_tables(degrees: int, printed: float) -> None:
    assert round(t_quantile(degrees), 3) == printed


def test_t_quantile_has_the_closed_forms_of_one_and_two_degrees() -> None:
    for level in (0.5, 0.9, 0.95, 0.99):
        assert t_quantile(1, level) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-12)
        assert t_quantile(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-12)
    normal = statistics.NormalDist().inv_cdf(0.975)
    assert t_quantile(100_001) == pytest.approx(normal, rel=2e-5)


@pytest.mark.parametrize(("degrees", "level"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_t_quantile_refuses_what_it_has_not(degrees: int, level: float) -> None:
    with pytest.raises(ValueError, match="expected degrees >= 1"):
        t_quantile(degrees, level)


def normal_interval(values: list[float]) -> Interval:
    """The control: the quantile of the normal distribution, which is too small for few seeds."""
    mean, half = statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def coverage(interval: Callable[[list[float]], Interval | None], count: int, trials: int = 4000) -> float:
    """The share of samples from a normal distribution whose interval holds its mean."""
    draw = random.Random(count)
    hits = 0
    for _ in range(trials):
        found = interval([draw.gauss(3.0, 2.0) for _ in range(count)])
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    return hits / trials


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_mean_interval_covers_the_mean_in_95_of_100_samples(count: int) -> None:
    error = 4 * math.sqrt(0.95 * 0.05 / 4000)  # four standard deviations of the share that is counted
    assert abs(coverage(mean_interval, count) - 0.95) < error
    if count <= 5:
        assert coverage(normal_interval, count) < 0.95 - error  # the wrong quantile shows


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_share_interval_covers_every_share_in_at_least_95_of_100_samples(count: int, share: float) -> None:
    def chance(yes: int) -> float:
        return math.comb(count, yes) * share**yes * (1 - share) ** (count - yes)

    covered = 0.0
    for yes in range(count + 1):
        found = share_interval([1] * yes + [0] * (count - yes))
        covered += chance(yes) * (found.low <= share <= found.high)
    assert covered >= 0.95


def test_share_interval_has_the_closed_forms_of_all_and_none() -> None:
    for count in (1, 3, 20):
        every, none = share_interval([1] * count), share_interval([0] * count)
        assert (every.high, none.low) == (1.0, 0.0)
        assert every.low == pytest.approx(0.025 ** (1 / count), rel=1e-9)
        assert none.high == pytest.approx(1 - 0.025 ** (1 / count), rel=1e-9)
    found = share_interval([0, 1, 0, 0, 0])  # printed limits of one in five: 0.5 % and 71.6 %
    assert (round(found.low, 3), round(found.high, 3)) == (0.005, 0.716)


@pytest.mark.parametrize("outcomes", [[], [0.5, 1.0], [math.nan]])
def test_share_interval_refuses_other_values(outcomes: list[float]) -> None:
    with pytest.raises(ValueError, match="expected outcomes of 0 and 1"):
        share_interval(outcomes)


def test_mean_interval_of_one_value_or_of_none_that_is_finite_is_none() -> None:
    for values in ([1.0], [1.0, math.nan], [1.0, math.inf]):
        assert mean_interval(values) is None
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0)
