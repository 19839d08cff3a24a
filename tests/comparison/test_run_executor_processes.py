"""Tasks in processes: reports, errors, signals, and the death of a process or of its parent."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

import normfree
from normfree.comparison.run_executor import Reports, _receive, _send_next, _work, run_tasks
from normfree.train.engine.process_state import Stop
from ray_nodes import wait_until


def test_error_of_a_process_is_one_sentence() -> None:
    with Stop() as stop, pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'x'$"):
        list(run_tasks(int, ["1", "x"], jobs=2, stop=stop))


def test_reports_of_a_task_are_passed_on() -> None:
    def counted(task: int, say: Callable[[str], None]) -> int:
        say(f"at {task}")
        say(f"beyond {task}")
        return task + 1

    heard: list[Reports] = []
    with Stop() as stop:
        assert dict(run_tasks(counted, [5, 6], stop=stop, on_report=heard.append)) == {0: 6, 1: 7}
    assert heard == [{0: "at 5"}, {0: "beyond 5"}, {1: "at 6"}, {1: "beyond 6"}]


def test_task_continues_when_its_parent_is_gone() -> None:
    """A task that reports progress after its parent is gone still saves its state."""
    ours, theirs = multiprocessing.Pipe()
    saved = []

    def work(task: str, say: Callable[[str], None]) -> None:
        ours.close()
        say("half")
        saved.append(task)

    ours.send("run")
    _work(work, theirs, True)
    assert saved == ["run"]


@pytest.mark.faults
def test_killed_process_is_noticed() -> None:
    with Stop() as stop, pytest.raises(ValueError, match="killed with status 7; free some memory"):
        list(run_tasks(os._exit, [7, 7], jobs=2, stop=stop))


def test_process_that_is_gone_before_its_task_is_noticed_by_its_receive() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    assert _send_next(ours, iter([(3, "run")])) == 3
    assert _receive(ours) is None


PARENT = """
import os, signal, sys, time
from normfree.comparison.run_executor import run_tasks
from normfree.train.engine.process_state import Stop

if __name__ == "__main__":
    with Stop() as stop:
        for _, process in run_tasks(eval, ["__import__('os').getpid()"] * 2, jobs=2, stop=stop):
            print(process, flush=True)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # it imports torch in three processes
@pytest.mark.faults
def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The processes of `concurrent.futures.ProcessPoolExecutor` would wait for tasks for ever."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    process = int(done.stdout.split()[0])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} is still there")


BUSY = """
import os, signal, sys, time
from normfree.comparison.run_executor import run_tasks
from normfree.train.engine.process_state import Stop
from stopped_tasks import save_at_a_signal

if __name__ == "__main__":
    with Stop() as stop:
        list(run_tasks(save_at_a_signal, sys.argv[1:], jobs=2, stop=stop))
"""
TASK = """
import os, pathlib, time
from normfree.train.engine.process_state import Stop

def save_at_a_signal(path):
    pathlib.Path(path).write_text(str(os.getpid()))
    with Stop() as stop:
        while not stop.requested:
            time.sleep(0.05)
    pathlib.Path(path + ".saved").touch()
"""


@pytest.mark.slow  # it imports torch in three processes
@pytest.mark.faults
def test_busy_processes_save_and_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(BUSY, encoding="utf-8")
    (tmp_path / "stopped_tasks.py").write_text(TASK, encoding="utf-8")
    tasks = [tmp_path / "one", tmp_path / "two"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(Path(normfree.__file__).parents[1]), str(tmp_path))),
    }
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py", *tasks], env=environment)
    wait_until(lambda: all(task.exists() and task.read_text() for task in tasks), 60, "the begin of the tasks")
    parent.kill()
    parent.wait()
    processes = [int(task.read_text()) for task in tasks]
    wait_until(lambda: not any(Path("/proc", str(process)).exists() for process in processes), 30, "their end")
    assert all(task.with_name(f"{task.name}.saved").exists() for task in tasks)


def test_ctrl_c_while_processes_start_stops_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = SpawnProcess.start, []

    def start(process: SpawnProcess) -> None:
        if not started:
            os.kill(os.getpid(), signal.SIGINT)
        started.append(process)
        begin(process)

    monkeypatch.setattr(SpawnProcess, "start", start)
    with Stop() as stop:
        assert not dict(run_tasks(time.sleep, [60.0] * 3, jobs=2, stop=stop))
        assert stop.requested == signal.SIGINT
    assert len(started) == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_processes_do_not_get_ctrl_c() -> None:
    blocked = "__import__('signal').pthread_sigmask(0, ())"
    with Stop() as stop:
        assert dict(run_tasks(eval, [blocked] * 2, jobs=2, stop=stop)) == {n: {signal.SIGINT} for n in range(2)}
