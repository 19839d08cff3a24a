"""A job of SLURM saves its run before its time is over, is queued again, and continues."""

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from normfree import cli
from normfree.cli.train import requeue, was_requeued
from normfree.train import RunFolder
from normfree.train import data_sources as train_data
from normfree.train.engine import loop as engine
from normfree.train.engine.step import TrainStep
from tiny_images import tiny_images

TRAIN = ("train", "--set", "model=resmlp-2-8", "--set", "batch_size=16", "--epochs", "2", "--out", "run")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of SLURM, with a `scontrol` that notes what it is asked."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_data, "load", lambda *_: tiny_images())
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    return tmp_path


def run(*arguments: str) -> int:
    try:
        cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def signalled(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send a signal in the third step."""
    step, calls = TrainStep.__call__, 0

    def call(self: TrainStep) -> None:
        nonlocal calls
        calls += 1
        step(self)
        if calls == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(TrainStep, "__call__", call)


def test_job_is_saved_queued_again_and_continued(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGUSR1)
        assert run(*TRAIN) == 128 + signal.SIGUSR1
    assert "SLURM queued the job again" in capsys.readouterr().err
    assert (job / "asked").read_text() == "requeue 4711\n"
    assert (RunFolder("run").status, RunFolder("run").saved_step) == ("interrupted", 3)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert run(*TRAIN) == 2  # another job must not continue it
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run(*TRAIN, "--overwrite") == 0  # the command of the first time
    assert RunFolder("run").read_result()["steps"] == 10
    assert [record["epoch"] for record in RunFolder("run").read_metrics()] == [1, 2]
    assert (job / "asked").read_text() == "requeue 4711\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_job_that_is_cancelled_is_not_queued_again(job: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    signalled(monkeypatch, number)
    assert run(*TRAIN) == 128 + number
    assert not (job / "asked").exists()


def test_refusal_of_slurm_is_logged(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    (job / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Job is not requeueable' >&2\nexit 1\n")
    assert not requeue(signal.SIGUSR1)
    assert "SLURM did not queue job 4711 again: Job is not requeueable; start it again yourself" in caplog.text


def test_missing_program_is_logged(
    job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(job))
    assert not requeue(signal.SIGUSR1)
    assert "SLURM did not queue job 4711 again" in caplog.text


@pytest.mark.parametrize(("count", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("12", True)])
def test_job_knows_that_it_was_queued_again(
    job: Path, monkeypatch: pytest.MonkeyPatch, count: Any, expected: bool
) -> None:
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    assert was_requeued() == expected
