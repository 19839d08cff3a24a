"""The claims on translation: what follows from runs, and that the quick scale runs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import checks_that, measure
from normfree.data.text.prepared_folder import open_prepared
from normfree.train import TrainConfig
from normfree_papers.claims.made_up_language import made_up_language
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun

LAYER_NORM = "layernorm:xavier=true"
MULTI30K, EUROPARL = "fixup/table3_multi30k", "fixup/table3_europarl"


def ended(score: float | None, **fields: Any) -> EndedRun:
    status = "diverged" if score is None else "finished"
    result = {"status": status, "test": None, **({} if score is None else {"bleu": {"score": score}}), **fields}
    return EndedRun(result, () if score is None else ({"train_accuracy": 0.5}, {"train_accuracy": 0.75}))


def by_method(scores: dict[str, float | None]) -> Any:
    """Runs that end with a BLEU by method, half a point more with each seed; others are not there."""

    def make(_name: str, config: TrainConfig) -> EndedRun | None:
        if config.method not in scores:
            return None
        score = scores[config.method]
        return ended(None if score is None else score + 0.5 * config.seed)

    return make


@pytest.mark.parametrize(("fixup", "verdict"), [(37.8, "holds"), (37.6, "fails"), (39.0, "holds")])
def test_what_the_paper_counts_as_a_gain_below_layer_norm_is_the_limit(fixup: float, verdict: str) -> None:
    measurement, judgement, runs = measure(
        get(MULTI30K), by_method({LAYER_NORM: 38.0, "fixup": fixup}), seeds=(0, 1, 2)
    )
    assert "Fixup - layer norm" in checks_that(judgement, verdict)
    assert measurement.values["BLEU, layer norm"] == [38.0, 38.5, 39.0]
    assert measurement.values["Fixup - layer norm"] == pytest.approx([fixup - 38.0] * 3)
    assert "BLEU, ReZero" not in measurement.values
    panel = measurement.panels[0]
    assert panel.names == ("layer norm", "Fixup")
    assert panel.curves[0].values == pytest.approx((38.5, fixup + 0.5))
    assert panel.curves[0].singles[0] == pytest.approx((38.0, fixup))
    assert len(runs.missing) == 5 * 3


def test_diverged_run_counts_as_zero() -> None:
    measurement, judgement, _ = measure(get(EUROPARL), by_method({LAYER_NORM: 30.0, "fixup": None}), seeds=(0,))
    assert measurement.values["Fixup - layer norm"] == [-30.0]
    assert judgement.status == "fails"


def test_two_that_both_fail_are_no_success() -> None:
    _, judgement, _ = measure(get(EUROPARL), by_method({LAYER_NORM: 0.5, "fixup": 0.5}), seeds=(0,))
    assert checks_that(judgement, "fails") == {"BLEU, layer norm"}


def test_without_runs_nothing_is_measured() -> None:
    measurement, judgement, runs = measure(get(MULTI30K), by_method({}), seeds=(0,))
    assert (measurement.values, measurement.panels, judgement.status) == ({}, (), "not run")
    assert all(80 < gpu_seconds(config) < 600 for config in runs.missing.values())


def test_files_of_a_text_are_named_with_what_identifies_them() -> None:
    file = {"name": "a.de", "bytes": 12_000, "sha256": "ab"}
    runs = by_method({LAYER_NORM: 38.0, "fixup": 38.0})

    def told(name: str, config: TrainConfig) -> EndedRun | None:
        run = runs(name, config)
        return run and EndedRun({**run.result, "inputs": {"train": [file]}}, run.metrics)

    (table,) = measure(get(EUROPARL), told, seeds=(0,))[0].tables
    assert table.rows == (("train", "a.de", "12,000", "ab"),)
    assert measure(get(EUROPARL), runs, seeds=(0,))[0].tables == ()  # a run from before they were told


def test_both_data_sets_of_the_table_are_compared_on_their_own() -> None:
    def make(name: str, config: TrainConfig) -> EndedRun:
        return ended({"IWSLT": 34.2, "WMT": 29.3}[name.split()[0]] + (0.3 if config.method == "fixup" else 0.0))

    measurement, judgement, runs = measure(get("fixup/table3"), make, seeds=(0,))
    assert {row.verdict for row in judgement.rows if row.check.scale == "full"} == {"holds"}
    assert measurement.values["WMT en-de: Fixup - layer norm"] == pytest.approx([0.3])
    assert {c.dropout for n, c in runs.asked.items() if n.startswith("WMT")} == {0.4}
    assert {c.dropout for n, c in runs.asked.items() if n.startswith("IWSLT")} == {0.5}
    worse = measure(get("fixup/table3"), lambda n, c: ended(30.0 if c.method == LAYER_NORM else 29.6), seeds=(0,))[1]
    assert len(checks_that(worse, "fails")) == 2


def test_made_up_sentences_are_prepared_once_and_backwards(tmp_path: Path) -> None:
    name = made_up_language(tmp_path)
    data = open_prepared(name.removeprefix("pairs:"))
    before = data.digest
    words, backwards = ((tmp_path / f"test.{side}").read_text().split("\n") for side in ("words", "backwards"))
    assert [line.split()[::-1] for line in words] == [line.split() for line in backwards]
    assert data.splits == ("train", "valid", "test")
    assert open_prepared(made_up_language(tmp_path).removeprefix("pairs:")).digest == before


def test_processes_may_prepare_the_made_up_language_in_one_folder_at_once(tmp_path: Path) -> None:
    """The processes start together, and each writes the files that another one is about to read."""
    script = (
        "import sys; from pathlib import Path; from normfree_papers.claims.made_up_language import made_up_language; "
        "print('ready', flush=True); input(); print(made_up_language(Path(sys.argv[1])))"
    )
    command, pipe = [sys.executable, "-c", script, str(tmp_path)], subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, [errors[-300:] for _, errors in ended]
    assert {out.strip() for out, _ in ended} == {f"pairs:{tmp_path / 'prepared'}"}
    assert open_prepared(tmp_path / "prepared").splits == ("train", "valid", "test")
