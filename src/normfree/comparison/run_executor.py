"""Where training runs are executed: in processes of this machine, or on a Ray cluster.

`compare`, `reproduce` and `tune` hand their runs to an executor and read the results as they come. Both executors keep
the same promises: a task runs on one worker at a time, its result comes once, a signal lets every task save its state,
and no process is left at the end.

The processes of this machine are not those of `concurrent.futures`, for three reasons. Its process pool gives no access
to its processes, so a signal could not reach their tasks. It reports a broken pool without the exit status of the
process. It leaves its processes running when the parent is killed; here a running task saves its state and
ends. tests/comparison/test_run_executor_processes.py has a test for each.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from normfree.errors import require_package
from normfree.train.engine.process_state import Stop

T = TypeVar("T")
Result = TypeVar("Result")
Reports = Mapping[int, str]
"""The latest progress report of each task that is running, by the task's number."""
LOCAL, RAY = "local", "ray"
_POLL_SECONDS = 0.2  # how often to look for a signal
_SHOWN_TASKS = 3  # running tasks that a summary names


class RunExecutor(Protocol):
    """Executes tasks, and yields the number and result of each as it ends."""

    @property
    def lock_seconds(self) -> float:
        """How long a run waits for a lost process to leave its folder."""
        ...

    def run_tasks(
        self,
        function: Callable[..., Any],
        tasks: Sequence[T],
        *,
        stop: Stop,
        on_report: Callable[[Reports], None],
    ) -> Iterator[tuple[int, Any]]:
        """Call a function with every task and a function that takes a progress report.

        Args:
            function: An importable function. Tasks and results must be picklable.
            tasks: The arguments.
            stop: When a signal requests a stop, no further task begins, and the running ones save their state.
            on_report: Called with the latest report of every running task.

        Raises:
            ValueError: if a task fails, or its worker is lost too often; the other tasks are stopped.
        """
        ...


@dataclass(frozen=True)
class LocalProcesses:
    """Processes of this machine, with one torch thread each; one job runs in this process, with all threads.

    The task of a killed process is not tried again: the usual reason is a lack of memory, which a second try would
    meet too.
    """

    jobs: int = 1
    lock_seconds: float = 15.0  # the processes of a killed parent save and end

    def run_tasks(
        self,
        function: Callable[..., Any],
        tasks: Sequence[T],
        *,
        stop: Stop,
        on_report: Callable[[Reports], None],
    ) -> Iterator[tuple[int, Any]]:
        """Run the tasks in processes; see `RunExecutor`."""
        return run_tasks(function, tasks, jobs=self.jobs, stop=stop, on_report=on_report)


def choose_executor(
    on: str,
    *,
    shared: Path,
    jobs: int | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    device: str = "auto",
) -> RunExecutor:
    """Return the executor that `--on` names; nothing is started or imported yet.

    Args:
        on: 'local', 'ray' for the cluster that Ray finds (or one of this machine, which it then starts), or
            'ray://HOST:PORT' for the client port of a cluster.
        shared: The folder of the runs, which all nodes of a cluster must see under this path.
        jobs: Runs at a time on this machine; a cluster runs as many as its resources allow.
        cpus_per_run: CPU cores of a run on a cluster; by default 1.
        gpus_per_run: GPUs of a run on a cluster, or a share of one; by default 1 if `device` is 'cuda', else 0:
            'auto' does not ask for GPUs, which the cluster may lack.
        device: The device that the runs ask for.

    Raises:
        ValueError: if the name is unknown, a number is out of range, an option does not belong to the executor, or
            Ray is not installed.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"expected at least 1 job, got {jobs}")
    given = {"cpus per run": cpus_per_run, "GPUs per run": gpus_per_run}
    if on == LOCAL:
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"expected no {name} on this machine, got {value:g}; leave the number out, or run on a cluster"
                )
        return LocalProcesses(jobs or 1)
    if on != RAY and not on.startswith("ray://"):
        raise ValueError(f"expected 'local', 'ray' or 'ray://HOST:PORT' as the place of the runs, got '{on}'")
    if jobs is not None and jobs != 1:
        raise ValueError(f"a cluster runs as many runs as its resources allow, got {jobs} jobs; leave the number out")
    cpus = 1.0 if cpus_per_run is None else cpus_per_run
    gpus = float(device.startswith("cuda")) if gpus_per_run is None else gpus_per_run
    if not (math.isfinite(cpus) and cpus > 0):
        raise ValueError(f"expected CPUs per run above 0, got {cpus:g}")
    if not (math.isfinite(gpus) and gpus >= 0) or (gpus > 1 and gpus != int(gpus)):
        raise ValueError(f"expected GPUs per run as a share from 0 to 1 or as a whole number, got {gpus:g}")
    require_package("ray", "a run on a cluster")
    from normfree.comparison.ray_cluster import RayCluster

    return RayCluster(address="" if on == RAY else on, shared=shared.absolute(), cpus=cpus, gpus=gpus)


# Processes of this machine


def run_tasks(
    function: Callable[..., Result],
    tasks: Sequence[T],
    *,
    jobs: int = 1,
    stop: Stop,
    on_report: Callable[[Reports], None] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Call a function with every task, and yield the number and result of each task as it ends.

    Args:
        function: Called with a task, and with a function that takes a progress report if `on_report` is given. With
            several jobs it must be importable, and tasks and results must be picklable.
        tasks: The arguments.
        jobs: Number of processes, with one torch thread each. With one job, all tasks run in this process, in order.
        stop: When a signal requests a stop, no further task begins, and the processes get SIGTERM.
        on_report: Called with the latest report of every running task.

    Raises:
        ValueError: if a task fails or a process is killed; the other processes are stopped.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for number, task in enumerate(tasks):
            if stop.requested:
                return
            yield number, function(task) if on_report is None else function(task, _reporter(number, on_report))
        return
    with _processes(function, jobs, reports=on_report is not None) as processes:
        waiting: Iterator[tuple[int, T]] = iter(enumerate(tasks))
        busy = {pipe: first for pipe in processes if (first := _send_next(pipe, waiting)) is not None}
        reports: dict[int, str] = {}
        stopping = False
        while busy:
            if stop.requested and not stopping:
                stopping, waiting = True, iter(())
                for process in processes.values():
                    process.terminate()
            for ready in connection.wait(list(busy), timeout=_POLL_SECONDS):
                assert isinstance(ready, Connection)
                number, message = busy[ready], _receive(ready)
                if isinstance(message, str):
                    reports[number] = message
                    if on_report is not None:
                        on_report(reports)
                    continue
                del busy[ready]
                reports.pop(number, None)
                if message is None and not stopping:
                    raise ValueError(
                        f"expected a worker to finish its task, but its process was killed with status "
                        f"{_exit_status(processes[ready])}; free some memory, or run with fewer jobs"
                    )
                if message is None:
                    continue
                result, error = message
                if error is not None:
                    raise ValueError(error)
                yield number, result
                if (following := _send_next(ready, waiting)) is not None:
                    busy[ready] = following


def summarize_reports(reports: Reports, names: Sequence[str]) -> str:
    """Write the reports of running tasks in one line, each with the task's name; of many, the first few.

    >>> summarize_reports({2: "40 %", 0: "70 %"}, ["fixup", "he", "lsuv"])
    'fixup: 70 %; lsuv: 40 %'
    """
    parts = [f"{names[number]}: {reports[number]}" for number in sorted(reports)]
    more = [f"{len(parts) - _SHOWN_TASKS} more"] if len(parts) > _SHOWN_TASKS else []
    return "; ".join([*parts[:_SHOWN_TASKS], *more])


def _reporter(number: int, on_report: Callable[[Reports], None]) -> Callable[[str], None]:
    return lambda text: on_report({number: text})


def _send_next(pipe: Connection, waiting: Iterator[tuple[int, Any]]) -> int | None:
    """Send the next task to a process, and return the task's number.

    If the process has ended, `_receive` will notice it.
    """
    found = next(waiting, None)
    if found is None:
        return None
    with suppress(BrokenPipeError):
        pipe.send(found[1])
    return found[0]


def _receive(pipe: Connection) -> tuple[Any, str | None] | str | None:
    """Return the result and error of a task, or its progress report; None if the process has ended."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionResetError):
        return None


def _exit_status(process: SpawnProcess) -> int | None:
    process.join(timeout=5)
    return process.exitcode


@contextmanager
def _processes(function: Callable[..., Any], jobs: int, *, reports: bool) -> Iterator[dict[Connection, SpawnProcess]]:
    """Start processes and yield them by their pipes; stop them at the end, after tasks have saved their state."""
    context = get_context("spawn")  # a fork would copy torch's threads in an unknown state
    processes: dict[Connection, SpawnProcess] = {}
    try:
        with _deferring_sigint():
            for _ in range(jobs):
                pipe, other = context.Pipe()
                process = context.Process(target=_work, args=(function, other, reports), daemon=True)
                process.start()
                other.close()  # so that this end notices when the process has ended
                processes[pipe] = process
        yield processes
    finally:
        for pipe, process in processes.items():
            pipe.close()  # ends an idle process; the signal ends a busy one
            process.terminate()
        for process in processes.values():
            process.join()


@contextmanager
def _deferring_sigint() -> Iterator[None]:
    """Processes started inside never get ctrl-C, which a terminal sends to all processes; this one gets it at the end.

    A process inherits which signals are blocked. The parent stops the others.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function: Callable[..., Any], pipe: Connection, reports: bool) -> None:
    """Run tasks from a pipe until the parent closes it."""
    import torch

    def report(text: str) -> None:
        with suppress(OSError):  # a task saves its state even if the parent has ended
            pipe.send(text)

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = pipe.recv()
            answer: tuple[Any, str | None]
            try:
                answer = function(task, report) if reports else function(task), None
            except Exception as error:
                answer = None, error_sentence(error)
            pipe.send(answer)


def _end_with_parent() -> None:
    """Send SIGTERM to this process when its parent has ended, so that a running task saves its state and ends."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def error_sentence(error: Exception) -> str:
    """Return the error of a task in one line, with its type if it is not one that the library explains."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
