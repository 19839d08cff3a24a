"""Canaries of earlier commits: computed by a driver that agrees with today's canary, and stored for every commit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import canaries
import normfree
from canaries import CPU, RUNS, STORED, UNKNOWN, kept_probes, stored_probes
from normfree_papers.claims.canary import committed_record, differing, tolerance
from normfree_papers.claims.canary_training import canary, settings_of

needs_results = pytest.mark.skipif(not RUNS.is_dir(), reason="the stored runs are not here")


def test_driver_computes_what_the_canary_does(tmp_path: Path) -> None:
    probes = ["fixup resnet8", "layernorm transformer-1-1-16-32-2", "ema"]
    wanted = {probe: settings_of(probe) for probe in probes}
    wanted["no such method"] = {**wanted["ema"], "method": "elsewhere"}
    (tmp_path / "job.json").write_text(json.dumps({"probes": wanted, "data": canaries._data()}))
    driver = Path(canaries.__file__).with_name("canary_driver.py")
    environment = {"PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(driver), str(tmp_path / "job.json")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found.pop("no such method") is None
    assert not differing(found, canary(probes=probes), 1e-5)


def test_unknown_commit_has_no_record() -> None:
    assert canaries._of_commit("0" * 40, {}) is None


def test_the_canary_of_two_processes_has_the_probes_on_which_they_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, figure in (("one", 1.0), ("two", 2.0)):
        record = {"cuda float32": {"tolerance": 0.1, "figures": {"a": [1.0], "b": [figure]}}}
        (tmp_path / name).write_text(json.dumps(record))
    monkeypatch.setattr(canaries, "COMMITTED", tmp_path / "canary.json")
    canaries.main(["agreed", str(tmp_path / "one"), str(tmp_path / "two")])
    assert json.loads((tmp_path / "canary.json").read_text())["cuda float32"]["figures"] == {"a": [1.0]}


@pytest.mark.gpu
def test_figures_on_the_gpu_are_the_committed_ones() -> None:
    probes = ["fixup resnet8", "fixup wrn-10-1", "batchnorm resnet8", "crop", "schedule=cosine"]
    for place in ("cuda float32", "cuda bf16", "cuda mixed"):
        committed, precision = committed_record()[place]["figures"], place.split()[1]
        found = canary("cuda", precision=precision, probes=probes)
        assert not differing(found, {probe: committed[probe] for probe in probes}, tolerance(place))


def test_two_commits_have_the_figures_on_which_they_agree() -> None:
    one = {CPU: {"tolerance": 0.1, "figures": {"a": [1.0], "b": [1.0], "c": None}}}
    two = {CPU: {"tolerance": 0.1, "figures": {"a": [1.05], "b": [2.0], "c": [1.0]}}}
    assert canaries._common([one, two])[CPU]["figures"] == {"a": [1.0], "b": None, "c": None}


@needs_results
def test_every_commit_of_a_stored_run_has_a_canary() -> None:
    stored = json.loads(STORED.read_text())["commits"]
    for commit, probes in stored_probes().items():
        record = stored[commit]
        if record != UNKNOWN:
            assert set(record[CPU]["figures"]) >= set(probes), commit
            assert record[CPU]["tolerance"] == tolerance(CPU)


@needs_results
def test_probes_of_kept_runs_are_committed() -> None:
    assert set(kept_probes()) <= set(committed_record()[CPU]["figures"]), "judging a claim would train them"


@needs_results
def test_probes_of_earlier_runs_are_spelled_as_today() -> None:
    found = {probe: settings for probes in stored_probes().values() for probe, settings in probes.items()}
    assert found["fixup:slow_biases=false resnet8"]["method"] == "fixup"
    assert found["wn_default:directions=he wrn-10-1"]["method"] == "wn_default"
    assert "fixup resnet8" not in found
