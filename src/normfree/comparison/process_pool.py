"""Tasks spread over processes with one torch thread each; a signal lets every task save its state.

This is not `concurrent.futures`, for three reasons. Its process pool gives no access to its processes, so a signal
could not reach their tasks. It reports a broken pool without the exit status of the process. It leaves its processes
running for ever when the parent is killed; here a running task saves its state and ends.
tests/comparison/test_process_pool.py has a test for each.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from normfree.train.engine.environment import Stop

T = TypeVar("T")
Result = TypeVar("Result")
Reports = Mapping[int, str]
"""The latest progress report of each task that is running, by the task's number."""
_POLL_SECONDS = 0.2  # how often to look for a signal
_SHOWN_TASKS = 3  # running tasks that a summary names


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

    A process that is gone is noticed when its answer is read.
    """
    found = next(waiting, None)
    if found is None:
        return None
    with suppress(BrokenPipeError):
        pipe.send(found[1])
    return found[0]


def _receive(pipe: Connection) -> tuple[Any, str | None] | str | None:
    """Return the result and error of a task, or its progress report; None if the process is gone."""
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
                other.close()  # so that this end notices when the process is gone
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
        with suppress(OSError):  # a task saves its state even if the parent is gone
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
    """Send SIGTERM to this process when its parent is gone, so that a running task saves its state and ends."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def error_sentence(error: Exception) -> str:
    """Return the error of a task in one line, with its type if it is not one that the library explains."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
