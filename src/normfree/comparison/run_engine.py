"""Where training runs are executed: in processes of this machine, or on a Ray cluster.

`compare`, `reproduce` and `tune` hand their runs to an engine and read the results as they come. Both engines keep the
same promises: a task runs on one worker at a time, its result comes once, a signal lets every task save its state, and
no process is left at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from normfree.comparison.process_pool import Reports, run_tasks
from normfree.errors import require_package
from normfree.train.engine.environment import Stop

T = TypeVar("T")
LOCAL, RAY = "local", "ray"


class RunEngine(Protocol):
    """Executes tasks, and yields the number and result of each as it ends."""

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

    A killed process is an error, because the usual reason is a lack of memory, which it would meet again.
    """

    jobs: int = 1

    def run_tasks(
        self,
        function: Callable[..., Any],
        tasks: Sequence[T],
        *,
        stop: Stop,
        on_report: Callable[[Reports], None],
    ) -> Iterator[tuple[int, Any]]:
        """Run the tasks in processes; see `RunEngine`."""
        return run_tasks(function, tasks, jobs=self.jobs, stop=stop, on_report=on_report)


def choose_engine(
    on: str,
    *,
    shared: Path,
    jobs: int | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    device: str = "auto",
) -> RunEngine:
    """Return the engine that `--on` names; nothing is started or imported yet.

    Args:
        on: 'local', 'ray' for the cluster that Ray finds (or one of this machine, which it then starts), or
            'ray://HOST:PORT' for the client port of a cluster.
        shared: The folder of the runs, which all nodes of a cluster must see under this path.
        jobs: Runs at a time on this machine; a cluster runs as many as its resources allow.
        cpus_per_run: CPU cores of a run on a cluster; by default 1.
        gpus_per_run: GPUs of a run on a cluster, or a share of one; by default 1 if `device` is a GPU, else 0.
        device: The device that the runs ask for.

    Raises:
        ValueError: if the name is unknown, a number is out of range, an option does not belong to the engine, or Ray is
            not installed.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"expected at least 1 job, got {jobs}")
    given = {"cpus per run": cpus_per_run, "GPUs per run": gpus_per_run}
    if on == LOCAL:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} are resources of a cluster; leave them out, or run on ray")
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
