"""Every claim's record is complete, and its measurement gives the numbers that its checks name."""

import json
import math
import re
from pathlib import Path

import pytest

from made_up_runs import MadeUpRuns
from normfree.train import RunFolder, TrainConfig
from normfree.train.config import folder_name
from normfree_papers.claims.claim import SCALES, Claim, Settings
from normfree_papers.claims.judgement import admits, checks_at, judge
from normfree_papers.claims.registry import PAPERS, all_claims
from normfree_papers.claims.reproduction import collect, panels_of, read_result, result_path
from normfree_papers.claims.run_cache import kept_runs, missing_runs

CLAIMS = all_claims()
ALONE = [claim for claim in CLAIMS if not claim.needs_data]  # what trains has tests of its own
FAST = 5.0  # seconds of a quick run that every test run can bear
FAILS = {
    "fixup/sec4_3",
    "robust/fig2",
    "robust/fig4",
    "robust/fig5",
}  # what does not come out as the papers have it, at the quick scale, too
RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(path for paper in PAPERS for path in (RESULTS / paper).glob("*.json"))


def ids(value: object) -> str:
    return value.id if isinstance(value, Claim) else value.stem if isinstance(value, Path) else str(value)


def test_ledger_holds_the_claims_of_the_papers():
    assert [claim.id for claim in CLAIMS] == [
        *("fixup/sec2", "fixup/thm1", "fixup/thm2", "fixup/eq5", "fixup/eq5_options", "fixup/thm3", "fixup/thm4"),
        *("fixup/sec4_3", "fixup/sec3"),
        *("fixup/fig3", "fixup/fig4", "fixup/table1", "fixup/table4", "fixup/table2", "fixup/table3"),
        *("fixup/table3_multi30k", "fixup/table3_europarl"),
        *("wninit/thm1", "wninit/thm2", "wninit/thm3", "wninit/thm4", "wninit/fig1", "wninit/sec3_lengths"),
        *("wninit/sec3", "wninit/table2"),
        *("wninit/fig2_left", "wninit/fig2_right", "wninit/fig3_left", "wninit/fig3_right"),
        *("wninit/fig4", "wninit/table1"),
        *("robust/table1", "robust/fig2", "robust/fig4", "robust/fig5"),
        *("robust/fig3", "robust/fig6", "robust/fig7"),
        *("normdead/eq1", "normdead/eq3", "normdead/sec2_3", "normdead/sec2_3_moments"),
        "normdead/sec2_3_costs",
        *("normdead/sec3_2", "normdead/sec3_2_gradients", "normdead/sec4_1", "normdead/fig4", "normdead/fig5"),
        *("normdead/sec4_2", "normdead/sec4_3", "normdead/sec5_2_clipping", "normdead/sec4_3_regnet"),
        *("normdead/sec5_1", "normdead/sec5_2"),
        *("beyond/scalar_rate", "beyond/scalar_rate_law", "beyond/precision"),
        *("beyond/isograd", "beyond/equal_time", "beyond/batch_sizes", "beyond/converted"),
        "beyond/transformer_rates",
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=ids)
def test_record_is_complete(claim):
    assert re.fullmatch(r"[a-z]+/[a-z0-9_-]+", claim.id)
    for text in (claim.where, claim.statement, claim.paper_value, claim.how):
        assert text
        assert "  " not in text
    for sentence in (claim.statement, claim.how):
        assert sentence.endswith(".")
    assert claim.checks
    for scale in SCALES:
        asked = [(check.name, check.statement) for check in checks_at(claim, scale)]
        assert len(set(asked)) == len(asked)
    assert all(check.statement and check.why for check in claim.checks)
    assert any(check.main for check in checks_at(claim, "quick"))
    assert 0 < claim.cost.quick_seconds <= claim.cost.full_seconds


def test_needs_training_or_data_is_said():
    data = {claim.id: claim.needs_data for claim in CLAIMS if claim.needs_data}
    trained = {claim.id for claim in CLAIMS if claim.needs_training}
    assert trained == data.keys() - {"wninit/table2"}
    others = {
        "fixup/table2": "ImageNet",
        "normdead/sec4_3_regnet": "ImageNet",
        "fixup/table3": "IWSLT and WMT",
        "fixup/table3_multi30k": "Multi30k",
        "fixup/table3_europarl": "Europarl-200k",
        "beyond/transformer_rates": "Multi30k",
        "wninit/fig2_left": "MNIST",
        "wninit/fig2_right": "MNIST",
    }
    assert data == {**dict.fromkeys(data, "CIFAR-10"), **others}
    assert {claim.id for claim in CLAIMS if claim.lacks} == {
        "fixup/table2",
        "fixup/table3",
        "normdead/sec4_3_regnet",
    }
    assert trained == {claim.id for claim in CLAIMS if claim.cost.device == "gpu"} - {"wninit/table2"}


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.needs_training], ids=ids)
def test_claim_that_trains_asks_for_runs_and_measures_nothing_without(claim, tmp_path):
    for scale in ("quick", "full"):
        runs = MadeUpRuns(lambda name, config: None)
        settings = Settings(scale=scale, seeds=claim.seeds_at(scale), data=tmp_path, runs=runs)  # type: ignore[arg-type]
        measurement = claim.measure(settings)
        assert runs.asked == runs.missing
        assert runs.asked
        assert (measurement.values, measurement.panels, measurement.tables) == ({}, (), ())
        if scale == "quick":
            made_up = f"pairs:{tmp_path}/backwards/prepared"
            assert {config.data for config in runs.asked.values()} <= {"fashion14", made_up}  # no download


def assert_measures(claim: Claim, settings: Settings) -> None:
    steps: list[tuple[int, int]] = []
    settings = Settings(
        scale=settings.scale,
        seeds=settings.seeds,
        data=settings.data,
        progress=lambda done, total, what: steps.append((done, total)),
    )
    measurement = claim.measure(settings)
    result = collect(claim, settings, measurement, 1.0)
    judgement = judge(claim, result)
    assert {check.name for check in checks_at(claim, settings.scale)} <= result["values"].keys()
    outside = [  # a quick run has too few seeds to decide; its means are held against the ranges
        row.check.name
        for row in judgement.rows
        if row.check.main and row.measured is not None and not admits(row.check, row.measured)
    ]
    assert bool(outside) == (claim.id in FAILS), outside
    assert panels_of(result) == measurement.panels
    assert measurement.panels or measurement.tables
    assert [done for done, _ in steps] == list(range(len(steps)))  # one step after the other
    assert all(done < total for done, total in steps)


@pytest.mark.parametrize("claim", [c for c in ALONE if c.cost.quick_seconds <= FAST], ids=ids)
def test_quick_run_measures_what_the_checks_name(claim):
    assert_measures(claim, Settings(scale="quick", seeds=claim.seeds_at("quick")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("claim", [c for c in ALONE if c.cost.quick_seconds > FAST], ids=ids)
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
    assert path.with_suffix(".png").exists() == bool(result["panels"])
    if (
        not missing_runs(result) and result["version"] == claim.version
    ):  # a result of an earlier measurement is only kept
        assert {check.name for check in checks_at(claim, result["scale"])} <= result["values"].keys()
    assert bool(result.get("runs")) == claim.needs_training
    assert all(math.isfinite(number) for value in result["values"].values() for number in value["values"])
    for key in ("command", "commit", "date", "versions", "hardware", "seconds"):
        assert result[key], key
    assert_names_no_folder(path)


def test_kept_runs_are_small_and_those_of_their_configurations():
    kept = sorted((RESULTS / "runs").iterdir())
    for path in kept:
        run = RunFolder(path)
        assert sorted(file.name for file in path.iterdir()) == ["config.toml", "metrics.jsonl", "result.json"]
        # The fingerprint is that of the settings as asked for; what is kept says how "auto" came out.
        made = folder_name(TrainConfig.from_toml(run.config_path))
        named = re.sub(r"-\d+\.\d+$", "", path.name)  # the release, if the run of an earlier one has the same name
        assert made.rpartition("-")[0] == named.rpartition("-")[0]
        assert run.status in ("finished", "diverged")
        for file in path.iterdir():
            assert file.stat().st_size < 100_000
            assert_names_no_folder(file)
    behind = {run.path.name for file in FILES for run in kept_runs(RESULTS, read_result(file)).values()}
    assert behind == {path.name for path in kept}  # none is missing, and none is of no use


def assert_names_no_folder(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|Users)\b", text)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("comparison.json")), ids=lambda path: path.parent.name)
def test_stored_comparisons_are_those_of_their_runs(path: Path) -> None:
    """Every number can be followed to its run, which tells where and from which version it was made."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["command"].startswith("normfree compare ")
    assert f"--out results/{path.parent.relative_to(RESULTS)}" in stored["command"]
    assert stored["runs"]
    for run in stored["runs"]:
        result = RunFolder(path.parent / run["folder"]).read_result()
        assert (run["status"], run["test"]) == (result["status"], result["test"]["accuracy"])
        assert all(run["origin"][key] == result[key] for key in ("commit", "versions", "hardware"))
        assert "dirty" not in result["commit"]
    assert {path.parent / run["folder"] for run in stored["runs"]} == {p for p in path.parent.iterdir() if p.is_dir()}
    assert_names_no_folder(path)


def test_transformers_get_better_with_depth_by_fixup_and_worse_with_layer_norm() -> None:
    """What docs/findings.md says of ten methods at three depths."""
    stored = json.loads((RESULTS / "transformers" / "depth" / "comparison.json").read_text(encoding="utf-8"))
    found = {(point["method"], point["depth"]): 100 * point["test"] for point in stored["points"]}
    text = " ".join((RESULTS.parent / "docs" / "findings.md").read_text(encoding="utf-8").split())
    for name, method in {
        "Fixup": "fixup",
        "T-Fixup": "tfixup",
        "layer norm": "layernorm",
        "DeepNorm": "deepnorm",
    }.items():
        six, more, most = (f"{found[method, depth]:.1f}" for depth in (6, 24, 100))
        assert f"{name} {six}, {more} and {most} %" in text
    bleu = {(point["method"], point["depth"]): point["bleu"] for point in stored["points"]}
    assert f"BLEU at 100 layers: Fixup {bleu['fixup', 100]:.1f}, layer norm {bleu['layernorm', 100]:.1f}" in text
    assert found["fixup", 6] < found["fixup", 24] < found["fixup", 100]
    assert found["layernorm", 6] > found["layernorm", 24] > found["layernorm", 100]
