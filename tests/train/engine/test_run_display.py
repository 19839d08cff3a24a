"""A run shows itself while it trains: progress.json, its page and the signal; none of it changes or ends the run."""

import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import normfree as nf
from compared_runs import differences
from normfree.report import terminal
from normfree.report.page import render_page
from normfree.train import RunFolder, Snapshot
from normfree.train.engine import loop as engine
from normfree.train.engine import run_display
from normfree.train.run.run_list import RunList
from normfree.train.run.run_page import run_page
from stopped_steps import stop_at
from tiny_images import tiny_images

SETTINGS: dict[str, Any] = {"model": "resmlp-2-8", "epochs": 4, "batch_size": 16, "device": "cpu"}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


def fit(out: Path | None, progress: Any = None, *, resume: bool = False, picture: bool = True, **changes: Any) -> Any:
    config = nf.TrainConfig(**{**SETTINGS, **changes})
    return nf.fit(config, data=tiny_images(), out=out, progress=progress, resume=resume, picture=picture)


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run report after every step, and write everything at once."""
    for name in ("_FILE_SECONDS", "_PAGE_SECONDS"):
        monkeypatch.setattr(run_display, name, 0.0)
    monkeypatch.setattr(run_display, "_SHARE", 1e9)
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    found: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return found


def test_folder_shows_a_run_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often(monkeypatch)
    seen: list[tuple[Snapshot, Any, Any]] = []
    runs = RunList([tmp_path])

    def look(now: Snapshot) -> None:
        seen.append((now, *runs.read(), data_of(tmp_path / "page.html")))

    result = fit(tmp_path, look)
    assert [run.state for _, run, _ in seen][-1] == "running"
    assert [run.epoch for _, run, _ in seen][1:] == [now.epoch for now, _, _ in seen][:-1]  # of the report before
    assert all(page["refresh"] for _, _, page in seen)
    validated = [now.validation for now, _, _ in seen]
    assert validated[0] is None
    assert validated[-1] is not None
    assert seen[-1][1].validation == tuple(validated[-1])
    assert seen[-1][1].left is not None
    page = data_of(tmp_path / "page.html")
    assert page["refresh"] == 0
    assert page["cards"][0]["headline"] in ("finished", "finished at chance")
    assert not (tmp_path / "progress.json").exists()
    assert [run.state for run in runs.read()] == [result.status] == ["finished"]
    loss = next(panel for panel in page["panels"] if panel["title"] == "loss")
    logged = [record["train_loss"] for record in RunFolder(tmp_path).read_metrics()]
    assert loss["curves"][0]["values"] == logged


def test_first_epoch_has_a_curve_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often(monkeypatch)
    pages = []
    fit(tmp_path, lambda now: pages.append((now.epoch, data_of(tmp_path / "page.html"))), epochs=1)
    epoch, page = pages[-1]
    assert epoch == 1.0
    assert len(page["panels"][0]["curves"][0]["x"]) == len(pages) - 1 > 1


@pytest.mark.parametrize("changes", [{}, {"model": "cnn-4-8", "method": "batchnorm"}, {"ema": 0.9}])
def test_page_and_signal_change_no_bit_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    fit(tmp_path / "plain", picture=False, **changes)
    assert not (tmp_path / "plain" / "page.html").exists()
    assert not (tmp_path / "plain" / "signal.jsonl").exists()
    often(monkeypatch)
    fit(tmp_path / "shown", **changes)
    assert (tmp_path / "shown" / "signal.jsonl").exists()
    assert not differences(tmp_path / "plain", tmp_path / "shown")


def test_signal_is_measured_after_powers_of_two_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_display, "_SHARE", 1e9)
    fit(tmp_path, epochs=6)
    lines = [json.loads(line) for line in (tmp_path / "signal.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 4, 6]
    steps = RunFolder(tmp_path).read_metrics()[0]["step"]
    assert [line["step"] for line in lines] == [steps * e for e in (0, 1, 2, 4, 6)]
    assert lines[0]["status"] == "preserved"
    assert len(lines[0]["forward"]) == len(lines[0]["backward"]) == 2
    sections = data_of(tmp_path / "page.html")["sections"]
    assert [panel["title"][:8] for panel in sections[0]["panels"]] == ["forward:", "backward"]


def test_signal_agrees_with_a_diagnosis_of_the_same_network(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    first = json.loads((tmp_path / "signal.jsonl").read_text().splitlines()[0])
    config, images = nf.TrainConfig(**SETTINGS), tiny_images()
    from normfree.train.data_sources import MemoryImages

    data = MemoryImages(images)
    model, _ = data.build_model(config)
    found = nf.diagnose(model, data.example(config, run_display._EXAMPLES)[0]).signal
    assert first["forward"] == pytest.approx(found.series("sum"), rel=1e-5)


def test_signal_can_be_switched_off(tmp_path: Path) -> None:
    fit(tmp_path, measure_signal=False)
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "signal.jsonl").exists()


def test_page_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(run_display, "_FILE_SECONDS", 0.0)
    monkeypatch.setattr(run_display, "_PAGE_SECONDS", 0.0)
    written = []
    monkeypatch.setattr(run_display, "run_page", lambda *a: (written.append(time.perf_counter()), run_page(*a))[1])
    began = time.perf_counter()
    fit(tmp_path, epochs=8)
    seconds = time.perf_counter() - began
    # The first and the last page are always written; others only after 100 times the time of one.
    assert 2 <= len(written) <= 3 + seconds / 0.1


def test_page_follows_a_slow_first_page_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often(monkeypatch)
    monkeypatch.setattr(run_display, "_SHARE", 0.01)
    written = []

    def slow(page: Any) -> str:
        written.append(page)
        if len(written) == 1:
            time.sleep(0.5)  # as the imports do on a busy machine
        return render_page(page)

    monkeypatch.setattr(run_display, "render_page", slow)
    fit(tmp_path, epochs=8)
    assert len(written) > 2  # the first, some while it trains, the last


@pytest.mark.parametrize("what", ["run_page", "write_text", "render_page", "describe_run"])
def test_failure_of_the_page_is_one_note_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    often(monkeypatch)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_display, what, fail)
    with caplog.at_level(logging.INFO, logger="normfree.train"):
        assert fit(tmp_path).status == "finished"
    notes = [record.getMessage() for record in caplog.records if "continues" in record.getMessage()]
    assert [note.partition(":")[0] for note in notes if note.startswith("page")] == ["page"]
    assert len(notes) <= 2  # the other is of progress.json
    assert not (tmp_path / "page.html").exists()


def test_failure_to_measure_the_signal_is_one_note_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no signal")

    monkeypatch.setattr(run_display, "_SHARE", 1e9)
    monkeypatch.setattr("normfree.diagnostics.propagate", fail)
    assert fit(tmp_path).status == "finished"
    assert [r.getMessage() for r in caplog.records if "signal" in r.getMessage()] == [
        "signal: not written, and the run continues: no signal"
    ]
    assert (tmp_path / "page.html").exists()


def test_run_without_jinja2_trains_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    often(monkeypatch)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with caplog.at_level(logging.INFO, logger="normfree.train"):
        assert fit(tmp_path).status == "finished"
    notes = [record for record in caplog.records if "jinja2" in record.getMessage()]
    assert len(notes) == 1
    assert notes[0].levelno == logging.INFO
    assert "pip install" in notes[0].getMessage()
    assert not (tmp_path / "page.html").exists()


def test_diverged_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    assert fit(tmp_path, lr=1e30, method="he_in").status == "diverged"
    page = data_of(tmp_path / "page.html")
    assert (page["cards"][0]["headline"], page["refresh"]) == ("diverged", 0)
    assert not (tmp_path / "progress.json").exists()


def test_interrupted_run_has_a_page_that_says_so_and_goes_on_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 5, signal.SIGTERM)
        assert fit(tmp_path).status == "interrupted"
    page = data_of(tmp_path / "page.html")
    assert (page["cards"][0]["headline"], page["refresh"]) == ("stopped", 0)
    assert [run.state for run in RunList([tmp_path]).read()] == ["stopped"]
    seen: list[str] = []
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    fit(tmp_path, lambda _: seen.append(data_of(tmp_path / "page.html")["cards"][0]["headline"]), resume=True)
    assert seen[0].startswith("running")
    assert data_of(tmp_path / "page.html")["cards"][0]["headline"].startswith("finished")


def test_overwriting_removes_the_page_and_the_signal_of_before(tmp_path: Path) -> None:
    fit(tmp_path)
    config = nf.TrainConfig(**SETTINGS, measure_signal=False)
    nf.fit(config, data=tiny_images(), out=tmp_path, overwrite=True, picture=False)
    assert not (tmp_path / "page.html").exists()
    assert not (tmp_path / "signal.jsonl").exists()


@pytest.mark.parametrize("name", ["page.html", "progress.json", "signal.jsonl"])
def test_file_of_the_user_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"'.*{name}' is not of a run and would be replaced"):
        fit(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


# The line of progress


class Handle:
    """The handle of a displayed line of a notebook, which remembers its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.texts.append(content["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Pretend that this process is the kernel of a notebook."""
    handle = Handle()

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert display_id
        handle.update(content, raw)
        return handle

    module: Any = type(sys)("IPython")
    module.get_ipython = lambda: object()
    module.display = type(sys)("IPython.display")
    module.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    monkeypatch.setitem(sys.modules, "ipykernel", type(sys)("ipykernel"))
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "_NOTEBOOK", 0.0)
    return handle


def test_fit_shows_one_line_in_a_notebook(notebook: Handle, capsys: pytest.CaptureFixture[str]) -> None:
    fit(None)
    assert len(notebook.texts) > 2
    assert all(text.startswith("resmlp-2-8: ") for text in notebook.texts)
    assert "validation" in notebook.texts[-2]
    assert notebook.texts[-1].startswith("resmlp-2-8: ended after")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("progress", [False, lambda _: None])
def test_line_of_a_notebook_can_be_switched_off(notebook: Handle, progress: bool | Callable[..., None]) -> None:
    fit(None, progress)
    assert not notebook.texts


def test_fit_shows_nothing_in_a_script_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "EVERY", 0.0)
    fit(None)
    assert capsys.readouterr() == ("", "")
    fit(None, True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "resmlp-2-8: " in printed.err
    assert "validation" in printed.err


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type(sys)("IPython")
    module.get_ipython = lambda: object()
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not terminal.in_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", type(sys)("ipykernel"))
    assert terminal.in_notebook()
    module.get_ipython = lambda: None  # a script that imports both
    assert not terminal.in_notebook()
