"""`normfree train --dry-run`: what a run would take, in a few lines or as JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from normfree.cli import main
from watched_folders import records, write_run

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "resmlp-2-8", "--data", "spirals", "--epochs", "2", "--device", "cpu", "--dry-run")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `train` in an empty folder: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["train", *arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def test_lines_say_what_a_run_takes(run: Run) -> None:
    status, out, _ = run(*SMALL, "--out", "new")
    assert status == 0
    first, *lines = out.splitlines()
    assert first == "resmlp-2-8 (fixup) on spirals; nothing was written"
    assert [line.split()[0] for line in lines] == ["parameters", "steps", "device", "memory", "disk", "time"]
    assert "cpu" in out
    assert "float32" in out
    assert "measured steps" in out
    assert list(Path().iterdir()) == []


def test_json_has_the_numbers(run: Run) -> None:
    status, out, _ = run(*SMALL, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["steps"] == found["epochs"] * found["steps_per_epoch"]
    assert found["seconds"] > 0
    assert list(Path().iterdir()) == []


def test_warnings_of_the_run_are_printed(run: Run) -> None:
    _, out, _ = run(*SMALL, "--set", "batch_size=6000", "--set", "validation=0")
    assert "a batch of 6,000 holds all training images" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dry-run", "--resume", "old"), "--dry-run cannot be combined with --resume"),
        (("spirals", "--dry-run", "--show"), "--dry-run cannot be combined with --show"),
        (("spirals", "--dry-run", "--list"), "--list cannot be combined with"),
        (("spirals", "--dry-run", "--out", "old"), "expected a folder without a run, but 'old' holds one"),
        (("fixup_cifar", "--dry-run"), "expected CIFAR-10 in the folder '.data'"),
        (("spirals", "--dry-run", "--set", "batch_size=99999999"), "expected the activations of 99,999,999 samples"),
    ],
)
def test_wrong_input_is_one_sentence(run: Run, arguments: tuple[str, ...], message: str) -> None:
    write_run(Path("old"), records(1), result={"status": "finished"})
    before = sorted(Path().rglob("*"))
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_overwriting_is_measured(run: Run) -> None:
    write_run(Path("old"), records(1), result={"status": "finished"})
    status, _, _ = run(*SMALL, "--out", "old", "--overwrite")
    assert status == 0
    assert Path("old/result.json").exists()


def test_text_that_is_not_prepared_is_said_and_not_prepared(run: Run) -> None:
    for name in ("train.de", "train.en"):
        Path(name).write_text("ein Hund\n")
    status, _, err = run("translation", "--source", "train.de", "--target", "train.en", "--dry-run")
    assert status == 2
    assert err.count("\n") == 1
    assert not Path(".data").exists()
