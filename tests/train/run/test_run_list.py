"""Runs are found and read as their files say; a damaged one says so and stops no other."""

import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import normfree
from normfree.train.run import run_list
from normfree.train.run.run_list import RunList
from normfree.train.run.run_page import WatchedRun, with_state
from watched_folders import VALIDATED, held, records, write_run

PROGRESS = {
    "step": 25, "steps": 40, "epoch": 2.5, "train_loss": 0.7, "train_accuracy": 0.71, "images_per_second": 800.0,
    "classes": 10, "parameters": 55, "seconds": 5.0, "seconds_left": 60.0, **VALIDATED,
}  # fmt: skip


def only(folder: Path) -> WatchedRun:
    (run,) = RunList([folder]).read()
    return run


def test_finished_run_has_the_numbers_of_its_result(tmp_path: Path) -> None:
    write_run(tmp_path / "a", records(2), result={"status": "finished"}, epochs=2, model="resnet8")
    run = only(tmp_path)
    assert (run.state, run.model, run.epoch, run.epochs) == ("finished", "resnet8", 2.0, 2)
    assert (run.loss, run.accuracy, run.test, run.validation) == (0.5, 0.8, (0.6, 0.75), None)
    assert (run.throughput, run.unit, run.classes, run.parameters, run.left) == (500.0, "images", 10, 100, None)
    assert run.folder == tmp_path / "a"


@pytest.mark.parametrize(("status", "state"), [("diverged", "diverged"), ("interrupted", "stopped")])
def test_result_gives_the_state(tmp_path: Path, status: str, state: str) -> None:
    write_run(tmp_path, records(1), result={"status": status, "signal": 15 if state == "stopped" else None})
    assert only(tmp_path).state == state


def test_lock_and_not_age_says_that_a_run_is_running(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", records(2), progress=PROGRESS, epochs=4)
    for name in ("metrics.jsonl", "progress.json", "config.toml"):
        os.utime(folder / name, (0, 0))  # long ago
    with held(folder):
        run = only(tmp_path)
        assert run.state == "running"
        assert (run.epoch, run.loss, run.accuracy, run.throughput) == (2.5, 0.7, 0.71, 800.0)
        assert run.validation == (1.2, 0.4)
    for name in ("metrics.jsonl", "progress.json"):
        os.utime(folder / name)  # just now
    run = only(tmp_path)
    assert (run.state, run.left) == ("stopped", None)


def test_time_left_counts_down(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records(1), progress=PROGRESS)
    before = time.time() - 20
    for name in ("metrics.jsonl", "progress.json", "config.toml"):
        os.utime(folder / name, (before, before))
    with held(folder):
        assert only(tmp_path).left == pytest.approx(40, abs=3)


def test_resumed_run_is_running_although_a_result_says_interrupted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records(1), result={"status": "interrupted", "signal": 2}, progress=PROGRESS)
    with held(folder):
        run = only(tmp_path)
    assert (run.state, run.epoch, run.note) == ("running", 2.5, "")


def test_run_without_a_step_is_starting_while_it_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with held(folder):
        assert only(tmp_path).state == "starting"
    assert only(tmp_path).state == "stopped"
    (tmp_path / "b").mkdir()
    with held(tmp_path / "b"):  # before it writes its configuration
        assert [run.state for run in RunList([tmp_path / "b"]).read()] == ["starting"]
    assert RunList([tmp_path / "b"]).read() == []


def test_text_run_has_tokens_and_bleu(tmp_path: Path) -> None:
    result = {"status": "finished", "bleu": {"score": 31.5, "signature": "x"}, "tokens_per_second": 7.0}
    write_run(tmp_path, records(1), result=result, data="pairs:.data/x")
    run = only(tmp_path)
    assert (run.unit, run.bleu, run.throughput) == ("tokens", 31.5, 7.0)


def test_numbers_that_are_not_finite_are_floats(tmp_path: Path) -> None:
    write_run(tmp_path, result={"status": "diverged", "train_loss": math.inf, "test": None})
    run = only(tmp_path)
    assert run.loss == math.inf
    assert run.test is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"{"),
        ("result.json", b'{"status": "finished", "config": [], "sha256": "0"}'),
        ("result.json", b'{"status": "odd"}'),
        ("config.toml", b""),
        ("config.toml", b"\xff\xfe"),
        ("config.toml", b"lr = [[[["),
        ("metrics.jsonl", b"\x00\x01\n\x02\n"),
    ],
)
def test_damaged_run_says_so_and_stops_no_other(tmp_path: Path, name: str, content: bytes) -> None:
    write_run(tmp_path / "bad", records(1), result={"status": "finished"} if name == "result.json" else None)
    (tmp_path / "bad" / name).write_bytes(content)
    write_run(tmp_path / "good", records(1), result={"status": "finished"})
    states = {run.folder.name: run for run in RunList([tmp_path]).read()}
    assert states["good"].state == "finished"
    assert states["bad"].state == "damaged"
    assert name in states["bad"].note
    assert "\n" not in states["bad"].note


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 100, b"[]", b'{"step": "many"}', b'{"step": 1, "epoch": {}, "train_loss": true}']
)
def test_progress_that_a_power_failure_destroyed_is_ignored(tmp_path: Path, content: bytes) -> None:
    folder = write_run(tmp_path, records(3))
    (folder / "progress.json").write_bytes(content)
    with held(folder):
        run = only(tmp_path)
    assert run.state in ("running", "starting")
    assert run.accuracy == pytest.approx(1 - 0.8 / 3)


def test_forged_numbers_are_not_believed(tmp_path: Path) -> None:
    forged = {"status": "finished", "classes": 10**400, "parameters": "many", "seconds": "nan", "epochs": [1]}
    write_run(tmp_path, result={**forged, "train_loss": 10**400, "test": {"loss": "nan", "accuracy": "x"}})
    run = only(tmp_path)
    assert (run.classes, run.parameters, run.epoch, run.test) == (0, None, None, None)
    assert run.loss == math.inf


def test_runs_are_found_at_and_below_the_folders_once(tmp_path: Path) -> None:
    for name in ("a", "group/b", "group/deep/er/c", ".hidden/d"):
        write_run(tmp_path / name, records(1), result={"status": "finished"})
    (tmp_path / "notes" / "x").mkdir(parents=True)
    (tmp_path / "notes" / "config.toml").write_text("[tool]")  # of another program
    (tmp_path / "loop").symlink_to(tmp_path)
    found = RunList([tmp_path, tmp_path / "group", tmp_path / "a"]).read()
    assert sorted(run.folder.name for run in found) == ["a", "b", "c"]


def test_new_and_removed_runs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "_SEARCH_SHARE", 1e9)  # search every time
    runs = RunList([tmp_path])
    assert runs.read() == []
    folder = write_run(tmp_path / "a", records(1))
    assert [run.folder for run in runs.read()] == [folder]
    folder.rename(tmp_path / "b")
    assert [run.folder.name for run in runs.read()] == ["b"]


def test_running_runs_come_first_then_the_latest(tmp_path: Path) -> None:
    for age, name in ((10, "old"), (5, "new"), (99, "running")):
        folder = write_run(tmp_path / name, records(1))
        then = time.time() - age
        for path in folder.iterdir():
            os.utime(path, (then, then))
    with held(tmp_path / "running"):
        assert [run.folder.name for run in RunList([tmp_path]).read()] == ["running", "new", "old"]


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        write_run(tmp_path / str(i), records(1), result={"status": "finished"})
    runs = RunList([tmp_path])
    first = runs.read()
    read: list[Path] = []
    original = run_list._read_files

    def read_files(folder: Path, files: Any) -> WatchedRun:
        read.append(folder)
        return original(folder, files)

    monkeypatch.setattr(run_list, "_read_files", read_files)
    assert runs.read() == first
    assert not read
    write_run(tmp_path / "3", records(1), result={"status": "diverged"})
    assert {run.folder.name: run.state for run in runs.read()}["3"] == "diverged"
    assert read == [tmp_path / "3"]


def test_thousand_runs_take_little_memory_and_time(tmp_path: Path) -> None:
    source = write_run(tmp_path / "source", records(200), result={"status": "finished"})
    content = {path.name: path.read_bytes() for path in source.iterdir()}
    for i in range(1000):
        folder = tmp_path / "runs" / f"{i:04d}"
        folder.mkdir(parents=True)
        for name, raw in content.items():
            (folder / name).write_bytes(raw)
    runs = RunList([tmp_path / "runs"])
    tracemalloc.start()
    assert len(runs.read()) == 1000
    began = time.process_time()
    assert len(runs.read()) == 1000
    again = time.process_time() - began
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 5_000_000  # 5 kB for each
    assert again < 1.0  # 0.02 s without tracing


def test_last_record_is_found_in_a_large_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records(20_000))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9999999, "ep')  # cut off by a kill
    assert only(tmp_path).epoch == 20_000


def test_too_many_folders_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        (tmp_path / str(i)).mkdir()
    runs = RunList([tmp_path])
    runs.read()
    assert runs.complete
    monkeypatch.setattr(run_list, "_MOST", 3)
    fewer = RunList([tmp_path])
    fewer.read()
    assert not fewer.complete


def test_caller_says_whether_it_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path, records(1), result={"status": "interrupted", "signal": 15})
    run = only(folder)
    assert with_state(run, held=False).state == "stopped"
    assert with_state(run, held=True).state == "running"


def test_reading_runs_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, records(1), result={"status": "finished"})
    code = (
        "import sys; from pathlib import Path; from normfree.train.run.run_list import RunList; "
        "from normfree.train.run import run_page; "
        f"assert len(RunList([Path({json.dumps(str(tmp_path))})]).read()) == 1; sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
