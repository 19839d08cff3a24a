"""`normfree compare` and `normfree demo` in this process: what they print, write and refuse."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from normfree.cli.compare import compare_methods, make_demo
from normfree.comparison import demo as room
from normfree.train.engine import loop as engine

SHORT = ("--set", "epochs=1", "--set", "batch_size=1000", "--set", "validation=0.5", "--jobs", "1")
PAIR = ("-m", "fixup", "-m", "he_in", "--model", "resmlp-1-8", "--model", "resmlp-60-8")
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the two commands in this process: what they print on stdout."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("compare")(compare_methods)
    app.command("demo")(make_demo)

    def call(*arguments: str | Path) -> str:
        app(list(map(str, arguments)), standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_compare_draws_a_stored_comparison(run: Run, tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "results" / "conversion" / "resnet18" / "comparison.json"
    (tmp_path / "comparison.json").write_bytes(kept.read_bytes())
    assert run("compare", "--draw", tmp_path / "comparison.json") == ""
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.json", "comparison.png"}


def test_compare_prints_a_table_and_writes_the_files(run: Run, tmp_path: Path) -> None:
    out = run("compare", *PAIR, *SHORT, "--lr", "0.1", "--lr", "0.01", "--out", tmp_path)
    rows = [line.split() for line in out.splitlines() if line.startswith(("fixup", "he_in"))]
    assert [row[:3] for row in rows] == [
        ["fixup", "resmlp-1-8", "4"],
        ["fixup", "resmlp-60-8", "122"],
        ["he_in", "resmlp-1-8", "4"],
        ["he_in", "resmlp-60-8", "122"],
    ]
    assert "1 of 1" in out
    assert "A linear classifier on the pixels gets 83.5 %." in out
    assert {path.name for path in tmp_path.glob("comparison.*")} == {
        "comparison.json", "comparison.html", "comparison.png", "comparison.svg",
    }  # fmt: skip
    plain = json.loads(run("compare", *PAIR, *SHORT, "--lr", "0.1", "--lr", "0.01", "--out", tmp_path, "--json"))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert plain == {key: stored[key] for key in plain}
    assert shlex.split(stored["command"])[:3] == ["normfree", "compare", "-m"]
    assert all(run["origin"]["commit"] and run["origin"]["hardware"] for run in stored["runs"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "mlp-4-8"), "does not admit model 'mlp-4-8'"),
        (("--recipe", "fashon"), "did you mean 'fashion'"),
        (("--set", "lr=0.1"), "use --lr"),
        (("--set", "epoch=1"), "did you mean 'epochs'"),
        (("--lr", "-1", *PAIR), "expected 'lr' above 0"),
    ],
)
def test_wrong_comparison_is_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run("compare", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_demo_prints_and_writes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = room.DemoSettings(
        signal_model="wrn-16-1",
        models=("resmlp-1-8",),
        epochs=0,
        lrs=(0.1,),
        batch_model="resmlp-1-8",
        batch_sizes=(500,),
        batch_rates=(0.1,),
        batch_held_out=0.9,
    )
    monkeypatch.setattr(room, "DemoSettings", lambda: tiny)
    out = run("demo", "--out", tmp_path, "--jobs", "1")
    row = next(line for line in out.splitlines() if "no normalization, plain He" in line)
    assert "he_in" in row
    assert "▃▄▅▆" in row  # the variance grows
    assert "keeps it between" in row
    assert f"Open {tmp_path / 'index.html'} in a browser" in out
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "demo.png").exists()
