"""`normfree demo` prints its tables and writes its page."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from normfree import errors
from normfree.cli.compare import make_demo
from normfree.comparison import demo as room
from normfree.train.engine import loop as engine

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process: what they print on stdout."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(make_demo)

    def call(*arguments: str | Path) -> str:
        app(list(map(str, arguments)), standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_demo_prints_and_writes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = room.DemoSettings(
        signal_model="wrn-16-1",
        models=("resmlp-1-8",),
        epochs=0,
        batch_model="resmlp-1-8",
        batch_sizes=(500,),
        batch_rates=(0.1,),
        batch_held_out=0.9,
    )
    monkeypatch.setattr(room, "DemoSettings", lambda: tiny)
    out = run("--out", tmp_path, "--jobs", "1")
    row = next(line for line in out.splitlines() if "no normalization, plain He" in line)
    assert "he_in" in row
    assert "▃▄▅▆" in row  # the variance grows
    assert "keeps it between" in row
    assert f"Open {tmp_path / 'index.html'} in a browser" in out
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "demo.png").exists()


def test_demo_refuses_a_file_in_place_of_its_folder_before_it_measures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(room, "run_demo", lambda *_, **__: pytest.fail("it measured"))
    with pytest.raises(ValueError, match=r"expected --out to be a folder, but '.*file' is a file"):
        run("--out", tmp_path / "file")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_demo_asks_for_a_missing_package_before_it_measures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else name)
    monkeypatch.setattr(room, "run_demo", lambda *_, **__: pytest.fail("it measured"))
    with pytest.raises(ValueError, match=rf"of the demo needs {package}, which is not installed; .*'\.\[plots\]'"):
        run("--out", tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
