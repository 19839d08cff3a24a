"""The runs of a sweep on a Ray cluster.

Ray places every run on a node with enough CPUs and GPUs, and starts it again on another node if its node or process is
lost; the run continues from its last checkpoint. All nodes share one folder with the driver, the process that called
`compare`. Locks in this folder keep two workers out of one run. Before a worker trains, it checks that it sees the
folder and the locks of other nodes.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from normfree import __version__
from normfree.comparison.ray_connection import connected, first_line
from normfree.comparison.run_executor import Reports, error_sentence
from normfree.report.terminal import duration
from normfree.storage.writing import explain_os_errors
from normfree.train.engine.process_state import Stop

T = TypeVar("T")
_RETRIES = 10  # lost workers that one run survives
_POLL_SECONDS = 0.5
_REPORT_SECONDS = 1.0  # between two reports of a run
_SAVE_SECONDS = 120.0  # for running tasks to save their state after a signal or an error
_PATIENCE = 600.0  # how long to wait for a node that could take a run; an autoscaler may start one
_OLD_PROOF = 3600.0  # seconds after which the proof of a killed driver is removed


@dataclass(frozen=True)
class RayCluster:
    """Executes runs on a Ray cluster.

    Attributes:
        address: 'ray://HOST:PORT', or '' for the cluster that Ray finds by RAY_ADDRESS or on this machine. If there is
            none, Ray starts one on this machine, which ends with this process.
        shared: The folder of the runs, under the same path on all nodes.
        cpus: CPU cores of each run, and threads of torch.
        gpus: GPUs of each run, or a share of one.
        lock_seconds: See `RunExecutor`.
    """

    address: str
    shared: Path
    cpus: float = 1.0
    gpus: float = 0.0
    lock_seconds: float = 120.0  # NFS keeps the lock of a lost node for 90

    def run_tasks(
        self,
        function: Callable[..., Any],
        tasks: Sequence[T],
        *,
        stop: Stop,
        on_report: Callable[[Reports], None],
    ) -> Iterator[tuple[int, Any]]:
        """Run the tasks on the cluster; see `RunExecutor`."""
        if not tasks:
            return
        with _shared_proof(self.shared) as proof, connected(self.address):
            yield from _Sweep(self, function, tasks, proof).results(stop, on_report)

    @property
    def need(self) -> str:
        """The resources of one run in words."""
        return _resources(self.cpus, self.gpus)


class _Sweep:
    """The tasks of one call on a connected cluster."""

    def __init__(self, cluster: RayCluster, function: Callable[..., Any], tasks: Sequence[Any], proof: Path) -> None:
        import ray

        self._cluster = cluster
        self._board = ray.remote(_Board).options(num_cpus=0, max_restarts=-1).remote()
        options = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "max_retries": _RETRIES}
        remote = ray.remote(_run_task).options(retry_exceptions=False, **options)
        worker = _Worker(str(proof), os.getcwd(), tuple(sys.path), __version__, max(1, int(cluster.cpus)))
        # All at once, so that an autoscaler sees how many nodes are needed.
        self._numbers = {
            remote.remote(function, number, task, self._board, worker): number for number, task in enumerate(tasks)
        }
        self._idle_since: float | None = None
        self._heard = time.monotonic()

    def results(self, stop: Stop, on_report: Callable[[Reports], None]) -> Iterator[tuple[int, Any]]:
        import ray

        pending = list(self._numbers)
        try:
            while pending and not stop.requested:
                ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_SECONDS)
                for ref in ready:
                    self._idle_since = None
                    if (answer := self._answer(ref)) is not None:
                        yield self._numbers[ref], answer
                if pending:
                    self._report(pending, on_report)
            if pending:
                yield from self._stopped(pending)
                pending = []
        except KeyboardInterrupt:  # a second ctrl-C: do not wait for runs to save
            pending = []
            raise
        finally:
            if pending:  # an error; let the others save
                for _ in self._stopped(pending):
                    pass

    def _stopped(self, pending: list[Any]) -> Iterator[tuple[int, Any]]:
        """Interrupt the running tasks and drop the others; yield the results of those that end."""
        import ray

        for ref in pending:
            ray.cancel(ref, force=False)
        deadline = time.monotonic() + _SAVE_SECONDS
        while pending and time.monotonic() < deadline:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_SECONDS)
            for ref in ready:
                with suppress(ValueError):
                    if (answer := self._answer(ref)) is not None:
                        yield self._numbers[ref], answer

    def _answer(self, ref: Any) -> Any:
        """Return the result of a task that ended; None if it was cancelled."""
        import ray
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError

        try:
            result, error = ray.get(ref)
        except TaskCancelledError:
            return None
        except RayTaskError as failed:  # the worker could not load the function or its task
            missing = re.search(r"No module named '[^']*'", str(failed))
            raise ValueError(
                f"expected normfree {__version__} and its packages on every node, but a worker could not begin its run "
                f"({missing[0] if missing else first_line(failed)}); install them there"
            ) from failed
        except RayError as lost:
            raise ValueError(
                f"expected a worker to finish its run, but {_RETRIES + 1} of them were lost "
                f"({type(lost).__name__}: {first_line(lost)}); give each run more memory or CPUs, or look at the nodes"
            ) from lost
        if error is not None:
            raise ValueError(error)
        return result

    def _report(self, pending: list[Any], on_report: Callable[[Reports], None]) -> None:
        """Pass on the reports of the running tasks; if no node is large enough for a run, say what is missing."""
        import ray
        from ray.exceptions import RayError

        if time.monotonic() - self._heard < _REPORT_SECONDS:
            return
        self._heard = time.monotonic()
        waiting = {self._numbers[ref] for ref in pending}
        reports: Reports = {}
        with suppress(RayError):  # the node of the board may be lost, and Ray starts another one
            reports = ray.get(self._board.latest.remote(), timeout=_POLL_SECONDS)
        running = {number: text for number, text in reports.items() if number in waiting}
        if running:
            self._idle_since = None
        elif (lack := self._lack()) is not None:
            running = {min(waiting): f"waits for {lack}"}
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since > _PATIENCE:
                raise ValueError(
                    f"expected {lack}, but none came within {duration(_PATIENCE)}; ask for less with --cpus-per-run "
                    "and --gpus-per-run, or add nodes"
                )
        else:
            self._idle_since = None
        on_report(running)

    def _lack(self) -> str | None:
        """Describe the node that a run needs and the nodes that exist; None if one of them is large enough."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
        if any(cpus >= self._cluster.cpus and gpus >= self._cluster.gpus for cpus, gpus in has):
            return None
        each = "; ".join(sorted({_resources(*node) for node in has}))
        count = f"the cluster's {len(has)} node{'s have' if len(has) != 1 else ' has'}"
        return f"a node with {self._cluster.need} ({count} {each or 'none'})"


class _Worker(NamedTuple):
    """What the driver sends to every worker."""

    proof: str
    folder: str
    modules: tuple[str, ...]
    version: str
    threads: int


class _Board:
    """An actor that keeps the latest report of every running task."""

    def __init__(self) -> None:
        self._reports: dict[int, str] = {}

    def report(self, number: int, text: str | None) -> None:
        if text is None:
            self._reports.pop(number, None)
        else:
            self._reports[number] = text

    def latest(self) -> dict[int, str]:
        return self._reports


def _run_task(
    function: Callable[..., Any], number: int, task: Any, board: Any, worker: _Worker
) -> tuple[Any, str | None]:
    """Run one task in a worker of the cluster; return its result, or its error in one sentence."""
    import torch

    told = -_REPORT_SECONDS

    def report(text: str) -> None:
        nonlocal told
        if time.monotonic() - told >= _REPORT_SECONDS:
            told = time.monotonic()
            board.report.remote(number, text)

    try:
        _require_same_release(worker)
        _require_shared(Path(worker.proof))
        if os.path.isdir(worker.folder):
            os.chdir(worker.folder)  # relative paths of data and modules, as in the driver
        sys.path += [place for place in worker.modules if place not in sys.path]  # where a configuration names a model
        torch.set_num_threads(worker.threads)
        return function(task, report), None
    except Exception as error:
        return None, error_sentence(error)
    finally:
        board.report.remote(number, None)


def _require_same_release(worker: _Worker) -> None:
    if worker.version != __version__:
        raise ValueError(
            f"expected normfree {worker.version} on every node, got {__version__} on node {socket.gethostname()}; "
            "install the same release everywhere"
        )


# The shared folder


@contextmanager
def _shared_proof(shared: Path) -> Iterator[Path]:
    """Hold the lock of a new file in the shared folder; a worker that sees both shares the folder and its locks.

    Raises:
        ValueError: if the file system has no locks.
        OSError: in one sentence, if the folder cannot be written.
    """
    from filelock import FileLock

    with explain_os_errors("the runs in", shared):
        shared.mkdir(parents=True, exist_ok=True)
        for left in shared.glob(".driver-*.lock"):  # of a driver that was killed
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _OLD_PROOF and _is_free(left):
                    left.unlink()
        proof = shared / f".driver-{uuid4().hex}.lock"
        lock = FileLock(proof, timeout=0, fallback_to_soft=False)
        try:
            lock.acquire()
        except NotImplementedError as error:
            raise ValueError(f"expected a file system with locks in '{shared}'; choose another folder") from error
    try:
        yield proof
    finally:
        lock.release()
        with suppress(OSError):
            proof.unlink()


def _require_shared(proof: Path) -> None:
    """Raise `ValueError` if this node does not see the folder of the driver, or the lock of the driver in it."""
    node = socket.gethostname()
    if not proof.exists():
        raise ValueError(
            f"expected the folder '{proof.parent}' of the driver on every node, but node {node} does not see it; "
            "choose a folder that all nodes share"
        )
    if _is_free(proof):
        raise ValueError(
            f"expected a file system whose locks hold on all nodes, but node {node} does not see the lock of the "
            f"driver in '{proof.parent}', so two nodes could train one run; mount it with locks, or choose another "
            "folder"
        )


def _is_free(path: Path) -> bool:
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return False
    lock.release()
    return True


def _resources(cpus: float, gpus: float) -> str:
    """Write resources in words.

    >>> _resources(1, 0.25), _resources(8, 0)
    ('1 CPU and 0.25 GPUs', '8 CPUs and no GPU')
    """
    return f"{cpus:g} CPU{'s' if cpus != 1 else ''} and " + (
        "no GPU" if not gpus else f"{gpus:g} GPU{'s' if gpus != 1 else ''}"
    )
