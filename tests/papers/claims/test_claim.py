"""The record and the judge, with made-up results that pass, fail and are missing."""

import json
import math
from dataclasses import replace

import pytest

from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Settings, judge

MAIN = Check(name="main", statement="between 1 and 2", paper=1.5, low=1.0, high=2.0, why="the text")
ASIDE = Check(name="aside", statement="at least 3", low=3.0, why="the plot", main=False)
WRONG = Check(name="wrong", statement="7, printed 3", paper=3.0, low=6.9, high=7.1, why="counted", erratum="a slip")
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


@pytest.mark.parametrize(
    ("checks", "values", "status"),
    [
        ((MAIN,), {"main": {"mean": 1.5, "std": 0.1, "values": [1.4, 1.6]}}, "holds"),
        ((MAIN,), {"main": 1.0}, "holds"),  # the ends belong to the range
        ((MAIN,), {"main": 2.01}, "fails"),
        ((MAIN,), {"main": {"mean": 0.99}}, "fails"),
        ((MAIN,), {"main": math.nan}, "fails"),
        ((MAIN,), {"main": "nan"}, "fails"),  # as a file has it
        ((ASIDE,), {"aside": "inf"}, "holds"),
        ((MAIN,), {}, "not run"),
        ((MAIN,), {"main": None}, "not run"),
        ((MAIN,), {"main": {"mean": None}}, "not run"),
        ((MAIN,), {"other": 1.5}, "not run"),  # a number that no check names
        ((MAIN, ASIDE), {"main": 1.5}, "partly"),
        ((MAIN, ASIDE), {"main": 1.5, "aside": 3.5}, "holds"),
        ((MAIN, ASIDE), {"main": 1.5, "aside": 2.5}, "partly"),
        ((MAIN, ASIDE), {"main": 2.5, "aside": 3.5}, "fails"),
        ((MAIN, ASIDE), {"aside": 2.5}, "partly"),
        ((WRONG,), {"wrong": 7.0}, "partly"),
        ((WRONG,), {"wrong": 3.0}, "fails"),  # what is printed is what is wrong
    ],
)
def test_judge_is_a_function_of_the_values(checks, values, status):
    made = result(**values)
    assert judge(claim(*checks), made).status == status
    assert judge(claim(*checks), json.loads(json.dumps(made))) == judge(claim(*checks), made) or math.isnan(
        judge(claim(*checks), made).rows[0].measured
    )


def test_judge_of_no_result_is_not_run():
    judgement = judge(claim(MAIN, ASIDE), None)
    assert judgement.status == "not run"
    assert [row.verdict for row in judgement.rows] == ["missing", "missing"]
    assert judge(claim(MAIN, ASIDE), result()) == judgement


def test_judge_names_a_verdict_for_every_check():
    rows = judge(claim(MAIN, ASIDE, WRONG, LATE), result(main=1.5, aside=0.0, wrong=7.0)).rows
    assert [row.verdict for row in rows] == ["holds", "fails", "paper errs", "missing"]
    assert [row.measured for row in rows] == [1.5, 0.0, 7.0, None]


def test_judge_summary_counts():
    judgement = judge(claim(MAIN, ASIDE, WRONG, LATE), result(main=1.5, aside=0.0, wrong=7.0))
    assert judgement.summary == "1 of 4 checks hold, 1 fails, 1 not measured, 1 error in the paper"


def test_judge_lets_a_stand_in_hold_no_more_than_it_tests():
    assert judge(claim(MAIN), result("quick", main=1.5)).status == "holds"
    assert judge(claim(MAIN, LATE), result("quick", main=1.5)).status == "partly"
    assert judge(claim(MAIN, LATE), result("quick", main=1.5, late=1.0)).summary == "1 of 2 checks hold, 1 not measured"
    assert judge(claim(MAIN, LATE), result("full", main=1.5)).status == "partly"
    assert judge(claim(MAIN, LATE), result("full", main=1.5, late=1.0)).status == "fails"
    assert judge(claim(MAIN, LATE), result("quick", late=1.0)).status == "not run"


def test_judge_leaves_out_checks_of_stand_ins_and_misses_data():
    assert judge(claim(MAIN, replace(LATE, scale="quick")), result("full", main=1.5)).status == "holds"
    absent = replace(MAIN, name="absent", lacks="SVHN")
    assert judge(claim(MAIN, absent), result("full", main=1.5, absent=1.5)).status == "partly"


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
