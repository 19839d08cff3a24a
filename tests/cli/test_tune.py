"""`normfree tune` in this process: what it prints, writes and refuses."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import optuna  # noqa: F401  so that this file is left out where optuna is not installed
import pytest
import typer

from normfree.cli.train import train_model
from normfree.cli.tune import tune_settings
from normfree.train import RunFolder

SHORT = ("--model", "resmlp-1-8", "--epochs", "1", "--set", "batch_size=1000", "--set", "validation=0.5", "--jobs", "1")
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `normfree tune` or `normfree train` in this process: what it prints on stdout."""
    monkeypatch.delenv("COLUMNS", raising=False)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("tune")(tune_settings)
    app.command("train")(train_model)

    def call(*arguments: str | Path) -> str:
        if status := app(list(map(str, arguments)), standalone_mode=False):
            raise SystemExit(status)
        return capsys.readouterr().out

    return call


def test_tune_prints_a_command_that_trains_with_the_best_settings(run: Run, tmp_path: Path) -> None:
    out = run("tune", *SHORT, "--search", "lr=0.001..0.3:log", "--search", "method=fixup,he_in", "--trials", "4",
              "--out", tmp_path / "out")  # fmt: skip
    stored = json.loads((tmp_path / "out" / "tuning.json").read_text())
    best = max(stored["trials"], key=lambda trial: trial["score"] or 0.0)
    assert stored["best"] == best
    assert [len(stored["trials"]), stored["total"]] == [4, 4]
    assert stored["command"].startswith("normfree tune --search lr=0.001..0.3:log --search method=fixup,he_in --trials")
    assert {path.name for path in (tmp_path / "out").glob("tuning.*")} == {"tuning.json", "tuning.png", "tuning.svg"}
    assert "4 of 4 trials" in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:2] == ["normfree", "train"]
    run(*command[1:], "--out", tmp_path / "again")
    again, trial = (
        RunFolder(tmp_path / "again").read_result(),
        RunFolder(tmp_path / "out" / best["folder"]).read_result(),
    )
    assert again["validation"] == trial["validation"]  # to the last bit
    assert again["validation"]["accuracy"] == best["score"]


def test_tune_continues_and_prints_json(run: Run, tmp_path: Path) -> None:
    words = ("tune", *SHORT, "--search", "lr=0.01,0.1", "--sampler", "grid", "--metric", "loss", "--out", tmp_path)
    first = json.loads(run(*words, "--json"))
    assert [trial["status"] for trial in first["trials"]] == ["finished"] * 2
    dates = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("trial-*/result.json"))]
    assert json.loads(run(*words, "--json")) == first
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("trial-*/result.json"))] == dates


def test_search_in_which_all_diverge_has_a_status(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("tune", *SHORT, "--search", "lr=1e29..1e30", "--trials", "2", "--out", tmp_path)
    assert ended.value.code == 3
    assert "no trial finished, 2 of 2 diverged; search lower rates" in capsys.readouterr().err
    assert (tmp_path / "tuning.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--search", "lr=1..0.1"), "from low to high"),
        ((), "expected a setting to search for, such as"),
        (("--search", "rate=0.1..1"), "unknown setting 'rate'"),
        (("--search", "epochs=1..3"), "expected 'epochs' fixed or searched, got both"),
        (("--search", "lr=0.1..1", "--on", "cloud"), "expected 'local', 'ray' or 'ray://HOST:PORT'"),
        (("--search", "lr=0.1..1", "--gpus-per-run", "1"), "--gpus-per-run needs a cluster"),
        (("--search", "lr=0.1..1", "--sampler", "best"), "unknown sampler 'best'"),
    ],
)
def test_wrong_search_is_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run("tune", *SHORT, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_jobs_are_of_this_machine(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--jobs is for this machine"):
        run("tune", *SHORT, "--search", "lr=0.1..1", "--on", "ray", "--out", tmp_path / "out")
