"""`normfree watch`: one line per run, in a pipe, on a terminal, as JSON and on a page."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import normfree
from normfree.cli import main
from watched_folders import held, records, write_run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line in an empty folder: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["watch", *arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of the printed runs by name."""
    lines = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


def write_runs(folder: Path) -> None:
    write_run(folder / "one", records(2), result={"status": "finished"}, epochs=2)
    write_run(folder / "two", records(1), epochs=3)
    write_run(folder / "bad", records(1), result={"status": "finished"})
    (folder / "bad" / "result.json").write_text("{")


def test_pipe_prints_every_run_once(run: Run) -> None:
    write_runs(Path("runs"))
    with held(Path("runs/two")):
        status, out, err = run()  # the folder runs is the default
    assert (status, err) == (0, "")
    found = rows(out.partition("\nruns/bad: ")[0])
    assert next(iter(found)) == "two"
    assert found["two"][:2] == ["running", "1/3"]
    assert found["one"][:2] == ["✓ finished", "2/2"]
    assert found["bad"][0] == "✗ damaged"
    assert out.count("result.json' is damaged") == 1


def test_json_has_every_number(run: Run) -> None:
    write_runs(Path("runs"))
    status, out, _ = run("runs", "--json")
    assert status == 0
    found = {Path(entry["folder"]).name: entry for entry in json.loads(out)}
    assert found["one"]["test"] == [0.6, 0.75]
    assert found["two"]["state"] == "stopped"
    assert "damaged" in found["bad"]["note"]


@pytest.mark.parametrize("columns", [30, 40, 80])
def test_every_run_is_one_line_at_any_width(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for i in range(3):
        write_run(
            Path("runs") / f"a-very-long-name-of-a-run-{i}" / ("x" * 40), records(1), result={"status": "finished"}
        )
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run()
    lines = out.splitlines()
    assert status == 0
    assert len(lines) == 2 + 3
    assert all(len(line) <= columns for line in lines)
    assert all("finished" in line for line in lines[2:])


def test_names_cannot_command_the_terminal(run: Run) -> None:
    write_run(Path("runs") / "evil\x1b[2J[red]", records(1))
    write_run(Path("runs") / "b", records(1))
    _, out, _ = run()
    assert "\x1b" not in out
    assert "[red]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "expected a folder with runs at 'nowhere', found nothing"),
        (("file",), "expected a folder with runs at 'file', found a file"),
        ((".", "--page", "x.png"), "expected --page to end in .html, got 'x.png'"),
        ((".", "--page", "no/x.html"), "expected --page in a folder that exists"),
        ((".", "--page", "sub.html"), "expected --page to be a file that can be written"),
        ((".", "--page", ""), "expected a value for --page, got an empty one"),
        ((".", "--once", "--every", "3"), "--every cannot be combined with --once"),
        ((".", "--every", "0"), "Invalid value for '--every'"),
        ((".", "--every", "nan", "--json"), "--every cannot be combined with --json"),
        ((), "expected a folder with runs at 'runs', found nothing"),
    ],
)
def test_wrong_input_is_one_sentence(run: Run, arguments: tuple[str, ...], message: str) -> None:
    Path("file").write_text("")
    Path("sub.html").mkdir()
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_folder_without_runs_is_said(run: Run) -> None:
    Path("runs").mkdir()
    assert run() == (0, "no run in runs yet; start one with: normfree train spirals --out runs/spirals\n", "")
    assert run("runs", "--json") == (0, "[]\n", "")


def test_page_links_to_the_pages_of_the_runs(run: Run) -> None:
    write_runs(Path("runs"))
    Path("runs/one/page.html").write_text("x")
    status, out, _ = run("runs", "--page", "all.html")
    assert status == 0
    assert "one" in out
    page = Path("all.html").read_text()
    assert 'href="runs/one/page.html"' in page
    assert "validation accuracy" in page


def test_page_without_jinja2_is_refused_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_runs(Path("runs"))
    monkeypatch.setattr("normfree.errors.find_spec", lambda _: None)
    status, _, err = run("runs", "--page", "all.html")
    assert status == 2
    assert "jinja2" in err


def on_terminal(folder: Path, *arguments: str, seconds: float, **environment: str) -> tuple[int, str]:
    """Run the command on a terminal, press ctrl-C after some seconds; return its status and what it printed."""
    source = str(Path(normfree.__file__).parents[1])
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "normfree", "watch", *arguments],
            {**os.environ, "PYTHONPATH": source, "COLUMNS": "100", "LINES": "10", **environment},
        )
    printed, began, pressed = b"", time.monotonic(), False
    while time.monotonic() - began < seconds + 20:
        if not pressed and time.monotonic() - began > seconds:
            os.write(terminal, b"\x03")
            pressed = True
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                printed += os.read(terminal, 1 << 16)
            except OSError:  # it ended
                break
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), printed.decode(errors="replace")


def test_terminal_refreshes_in_place_until_ctrl_c(tmp_path: Path) -> None:
    for i in range(20):
        write_run(tmp_path / f"run{i:02d}", records(1))
    status, printed = on_terminal(tmp_path, ".", "--every", "0.2", "--page", "all.html", seconds=3)
    assert status == 0
    assert "Traceback" not in printed
    assert printed.count("ctrl-C leaves") > 3
    assert "\x1b[1A" in printed  # the cursor goes up
    assert "and 14 more runs" in printed  # 10 lines: the heading, six runs, and two sentences
    assert (tmp_path / "all.html").exists()


def test_terminal_waits_for_the_first_run(tmp_path: Path) -> None:
    status, printed = on_terminal(tmp_path, ".", "--every", "0.2", seconds=1.5)
    assert status == 0
    assert "no run in . yet" in printed


def test_terminal_without_utf8_gets_other_characters(tmp_path: Path) -> None:
    write_run(tmp_path / "one", records(1), result={"status": "finished"})
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, printed = on_terminal(tmp_path, ".", seconds=1.5, **plain)
    assert status == 0
    assert "finished" in printed
    assert "Traceback" not in printed


def test_run_that_is_killed_is_stopped(tmp_path: Path) -> None:
    """The lock of a process ends with it, and a watcher beside it does not keep a new one from starting."""
    source = str(Path(normfree.__file__).parents[1])
    code = (
        "import sys, time; from pathlib import Path; from normfree.storage.folder_lock import FolderLock\n"
        "with FolderLock(Path(sys.argv[1])).hold():\n    print('held', flush=True); time.sleep(60)"
    )
    folder = write_run(tmp_path / "one", records(1))

    def start() -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    def state() -> str:
        command = [sys.executable, "-m", "normfree", "watch", str(tmp_path), "--json"]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONPATH": source}, check=True)
        return str(json.loads(done.stdout)[0]["state"])

    process = start()
    assert state() == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state() == "stopped"
    process = start()
    assert state() == "running"
    process.kill()
    process.wait()
