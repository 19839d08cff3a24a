"""`normfree compare` in this process: what they print, write and refuse."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from normfree.cli.compare import compare_methods
from normfree.train.engine import loop as engine

SHORT = ("--set", "epochs=1", "--set", "batch_size=1000", "--set", "validation=0.5", "--jobs", "1")
PAIR = ("-m", "fixup", "-m", "he_in", "--model", "resmlp-1-8", "--model", "resmlp-60-8")
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process: what they print on stdout."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(compare_methods)

    def call(*arguments: str | Path) -> str:
        app(list(map(str, arguments)), standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_compare_draws_a_stored_comparison(run: Run, tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "results" / "conversion" / "resnet18" / "comparison.json"
    (tmp_path / "comparison.json").write_bytes(kept.read_bytes())
    assert run("--draw", tmp_path / "comparison.json") == ""
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.json", "comparison.png"}


def test_compare_prints_a_table_and_writes_the_files(run: Run, tmp_path: Path) -> None:
    out = run(*PAIR, *SHORT, "--lr", "0.1", "--lr", "0.01", "--out", tmp_path)
    rows = [line.split() for line in out.splitlines() if line.startswith(("fixup", "he_in"))]
    assert [row[:3] for row in rows] == [
        ["fixup", "resmlp-1-8", "4"],
        ["fixup", "resmlp-60-8", "122"],
        ["he_in", "resmlp-1-8", "4"],
        ["he_in", "resmlp-60-8", "122"],
    ]
    assert "1 of 1" in out
    assert "A linear classifier gets 83.5 %." in out
    assert {path.name for path in tmp_path.glob("comparison.*")} == {
        "comparison.json", "comparison.html", "comparison.png", "comparison.svg",
    }  # fmt: skip
    plain = json.loads(run(*PAIR, *SHORT, "--lr", "0.1", "--lr", "0.01", "--out", tmp_path, "--json"))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert plain == {key: stored[key] for key in plain}
    assert shlex.split(stored["command"])[:3] == ["normfree", "compare", "--method"]
    assert all(run["origin"]["commit"] and run["origin"]["hardware"] for run in stored["runs"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "mlp-4-8"), "does not admit model 'mlp-4-8'"),
        (("--recipe", "fashon"), "did you mean 'fashion'"),
        (("--set", "lr=0.1"), "use --lr"),
        (("--set", "epoch=1"), "did you mean 'epochs'"),
        (("--lr", "-1", *PAIR), "expected 'lr' above 0"),
        (("--on", "slurm"), "expected 'local', 'ray' or 'ray://HOST:PORT' as the place of the runs, got 'slurm'"),
        (("--cpus-per-run", "2"), "--cpus-per-run needs a cluster; leave it out, or add --on ray"),
    ],
)
def test_wrong_comparison_is_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(*arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_compare_says_how_many_runs_there_are(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ("-m", "fixup", "--model", "resmlp-1-8", *SHORT, "--out", str(tmp_path), "--lr", "0.1")
    run(*one)
    monkeypatch.setattr("normfree.report.terminal.EVERY", 0.0)
    monkeypatch.setattr("normfree.report.terminal._SHARE", 0.0)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(compare_methods)
    app([*one, "--lr", "0.01", "--lr", "0.03"], standalone_mode=False)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "3 runs, 1 of them done before"
    assert any("2 of 3 done" in line and re.search(r"about \d+ s left, fixup, resmlp-1-8, lr", line) for line in said)
