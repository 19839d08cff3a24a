"""Every claim's record is complete, and its measurement gives the numbers that its checks name."""

import math
import re
from pathlib import Path

import pytest

from normfree.experiments.claims import PAPERS, Claim, Settings, all_claims, judge
from normfree.experiments.results import collect, panels_of, read_result, result_path

CLAIMS = all_claims()
FAST = 5.0  # seconds of a quick run that every test run can bear
RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(path for paper in PAPERS for path in (RESULTS / paper).glob("*.json"))


def ids(value: object) -> str:
    return value.id if isinstance(value, Claim) else value.stem if isinstance(value, Path) else str(value)


def test_ledger_holds_the_claims_that_need_no_training():
    assert {claim.id for claim in CLAIMS} >= {
        *("fixup/sec2", "fixup/thm1", "fixup/thm2", "fixup/thm3", "fixup/thm4", "fixup/eq5"),
        *("wninit/thm1", "wninit/thm2", "wninit/thm3", "wninit/thm4", "wninit/fig1", "wninit/table2"),
        *("robust/table1", "robust/fig2", "robust/fig4", "robust/fig5"),
        *("normdead/fig4", "normdead/fig5"),
    }


@pytest.mark.parametrize("claim", CLAIMS, ids=ids)
def test_record_is_complete(claim):
    assert re.fullmatch(r"[a-z]+/[a-z0-9_-]+", claim.id)
    for text in (claim.where, claim.statement, claim.paper_value, claim.how):
        assert text
        assert "  " not in text
    for sentence in (claim.statement, claim.how):
        assert sentence.endswith(".")
    assert claim.checks
    names = [check.name for check in claim.checks]
    assert len(set(names)) == len(names)
    assert all(check.statement and check.why for check in claim.checks)
    assert any(check.main for check in claim.checks_at("quick"))
    assert 0 < claim.cost.quick_seconds <= claim.cost.full_seconds


def test_needs_training_or_data_is_said():
    assert [claim.id for claim in CLAIMS if claim.needs_data] == ["wninit/table2"]
    assert not any(claim.needs_training for claim in CLAIMS)


def assert_measures(claim: Claim, settings: Settings) -> None:
    steps: list[tuple[int, int]] = []
    settings = Settings(
        scale=settings.scale,
        seeds=settings.seeds,
        data=settings.data,
        progress=lambda done, total, what: steps.append((done, total)),
    )
    assert claim.measure is not None
    measurement = claim.measure(settings)
    result = collect(claim, settings, measurement, 1.0)
    judgement = judge(claim, result)
    assert not [row.check.name for row in judgement.rows if row.verdict == "missing"]
    assert judgement.status in ("holds", "partly"), [row for row in judgement.rows if row.verdict == "fails"]
    assert panels_of(result) == measurement.panels
    assert measurement.panels
    assert [done for done, _ in steps] == list(range(len(steps)))  # one step after the other
    assert all(done < total for done, total in steps)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.cost.quick_seconds <= FAST and not c.needs_data], ids=ids)
def test_quick_run_measures_what_the_checks_name(claim):
    assert_measures(claim, Settings(scale="quick", seeds=claim.seeds_at("quick")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.cost.quick_seconds > FAST and not c.needs_data], ids=ids)
def test_slow_quick_run_measures_what_the_checks_name(claim):
    assert_measures(claim, Settings(scale="quick", seeds=claim.seeds_at("quick")))


def test_measurement_depends_on_the_seed_alone():
    claim = next(c for c in CLAIMS if c.id == "fixup/thm1")
    first, same, other = (claim.measure(Settings(scale="quick", seeds=(seed,))).values for seed in (0, 0, 1))
    assert first == same
    assert first != other


# What is committed


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_committed_result_belongs_to_a_claim_and_has_all_its_numbers(path):
    result = read_result(path)
    claim = next(c for c in CLAIMS if c.id == result["claim"])
    assert result_path(RESULTS, claim, result["scale"]) == path
    assert path.with_suffix(".png").exists()
    assert not [row.check.name for row in judge(claim, result).rows if row.verdict == "missing"]
    assert all(math.isfinite(number) for value in result["values"].values() for number in value["values"])
    for key in ("command", "commit", "date", "versions", "hardware", "seconds"):
        assert result[key], key
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|Users)\b", text)
