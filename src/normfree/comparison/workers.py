"""Work spread over processes, one torch thread each; a signal lets every task save what it has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from normfree.train.engine.environment import Stop

Task = TypeVar("Task")
Result = TypeVar("Result")
Said = Mapping[int, str]
"""What the tasks that are under way said last, by their numbers."""
_POLL = 0.2  # seconds between two looks at whether a signal has come
_SHOWN = 3  # tasks under way that are told of


def run_tasks(
    function: Callable[..., Result],
    tasks: Sequence[Task],
    *,
    jobs: int = 1,
    stop: Stop,
    heard: Callable[[Said], None] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Call `function` with every task, and yield each task's number and result as they come.

    With one job everything happens in this process, in order. With more, `function` is called in so many processes
    with one thread each, and must be importable there, as its task and result must be picklable. When `stop` is
    requested, no task is begun any more, and the processes get SIGTERM. With `heard`, `function` also gets a function
    by which it can say in words how far it is, and `heard` is told.

    Raises:
        ValueError: in one sentence, when a task fails, or a process ends without an answer; the others are told to
            stop.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for number, task in enumerate(tasks):
            if stop.requested:
                return
            yield number, function(task) if heard is None else function(task, _says(number, heard))
        return
    with _workers(function, jobs, says=heard is not None) as workers:
        waiting: Iterator[tuple[int, Task]] = iter(enumerate(tasks))
        busy = {pipe: first for pipe in workers if (first := _send_next(pipe, waiting)) is not None}
        said: dict[int, str] = {}
        told = False
        while busy:
            if stop.requested and not told:
                told, waiting = True, iter(())
                for process in workers.values():
                    process.terminate()
            for ready in connection.wait(list(busy), timeout=_POLL):
                assert isinstance(ready, Connection)
                number, answer = busy[ready], _answer(ready)
                if isinstance(answer, str):
                    said[number] = answer
                    if heard is not None:
                        heard(said)
                    continue
                del busy[ready]
                said.pop(number, None)
                if answer is None and not told:
                    raise ValueError(
                        f"expected a worker to end its task, but its process was killed with status "
                        f"{_status(workers[ready])}; free some memory, or run with fewer jobs"
                    )
                if answer is None:
                    continue
                result, error = answer
                if error is not None:
                    raise ValueError(error)
                yield number, result
                if (following := _send_next(ready, waiting)) is not None:
                    busy[ready] = following


def in_words(said: Said, names: Sequence[str]) -> str:
    """What some tasks said, each with its name; of many only the first.

    >>> in_words({2: "40 %", 0: "70 %"}, ["fixup", "he", "lsuv"])
    'fixup: 70 %; lsuv: 40 %'
    """
    parts = [f"{names[number]}: {said[number]}" for number in sorted(said)]
    return "; ".join([*parts[:_SHOWN], *([f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else [])])


def _says(number: int, heard: Callable[[Said], None]) -> Callable[[str], None]:
    return lambda text: heard({number: text})


def _send_next(pipe: Connection, waiting: Iterator[tuple[int, Any]]) -> int | None:
    """Give a process its next task, and return the task's number; one that is gone is noticed by its answer."""
    found = next(waiting, None)
    if found is None:
        return None
    with suppress(BrokenPipeError):
        pipe.send(found[1])
    return found[0]


def _answer(pipe: Connection) -> tuple[Any, str | None] | str | None:
    """Result and error of a task, or what it says on its way; None where the process is gone."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionResetError):
        return None


def _status(process: SpawnProcess) -> int | None:
    process.join(timeout=5)
    return process.exitcode


@contextmanager
def _workers(function: Callable[..., Any], jobs: int, *, says: bool) -> Iterator[dict[Connection, SpawnProcess]]:
    """Processes by their pipes; at the end all are gone, after saving if they were at work."""
    context = get_context("spawn")  # a fork would copy torch's threads in an unknown state
    workers: dict[Connection, SpawnProcess] = {}
    try:
        with _deaf_to_ctrl_c():
            for _ in range(jobs):
                pipe, other = context.Pipe()
                process = context.Process(target=_work, args=(function, other, says), daemon=True)
                process.start()
                other.close()  # so that this end hears when the process is gone
                workers[pipe] = process
        yield workers
    finally:
        for pipe, process in workers.items():
            pipe.close()  # an idle process ends at this, one at work at the signal
            process.terminate()
        for process in workers.values():
            process.join()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes begun inside ignore SIGINT, which a terminal sends to all: the parent tells them when to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(function: Callable[..., Any], pipe: Connection, says: bool) -> None:
    """Answer tasks until the parent hangs up."""
    import torch

    def say(text: str) -> None:
        with suppress(OSError):  # that the parent is gone must not keep a run from saving what it has
            pipe.send(text)

    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = pipe.recv()
            answer: tuple[Any, str | None]
            try:
                answer = function(task, say) if says else function(task), None
            except (ValueError, OSError) as error:
                answer = None, " ".join(str(error).split())
            except Exception as error:
                answer = None, f"{type(error).__name__}: {' '.join(str(error).split())}"
            pipe.send(answer)
