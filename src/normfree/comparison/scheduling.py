"""Training runs as tasks: what is trained, in which folder; never twice, and from where it stopped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normfree.comparison.workers import Said, run_tasks
from normfree.report.progress import metrics_text
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.engine.environment import Stop
from normfree.train.run.result import Snapshot


class Task(NamedTuple):
    """One run: what is trained, and where it is kept."""

    config: TrainConfig
    folder: Path


def folder_name(config: TrainConfig) -> str:
    """A run's name, which tells what it is: its main settings, and the fingerprint of all that change its numbers."""
    words = f"{config.model}-{config.method}-lr{config.lr:g}-seed{config.seed}"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', words)}-{config.fingerprint()}"


def ended(folder: Path) -> dict[str, Any] | None:
    """The result of a run that finished or diverged, if it did."""
    run = RunFolder(folder)
    return run.read_result() if run.status in ("finished", "diverged") else None


def train(task: Task, say: Callable[[str], None]) -> dict[str, Any]:
    """Train one run in its folder, or go on with it, and say how far it is; one that has ended is read."""
    done = ended(task.folder)
    if done is not None:
        return done

    def tell(seen: Snapshot) -> None:
        say(f"{seen.done / seen.total:.0%}, {metrics_text(loss=seen.loss, throughput=seen.throughput, unit=seen.unit)}")

    resume = RunFolder(task.folder).exists
    result = fit(task.config, out=task.folder, resume=resume, picture=False, progress=tell)
    return ended(task.folder) or result.to_json()  # the folder also tells where it ran


def train_all(
    tasks: Sequence[Task],
    keep: Callable[[Task, dict[str, Any]], None],
    *,
    jobs: int,
    heard: Callable[[Said], None],
) -> int | None:
    """Train runs, `jobs` at a time, hand each that ended to `keep`, and return the signal that kept others from it."""
    signal = None
    with Stop() as stop:
        for number, result in run_tasks(train, tasks, jobs=jobs, stop=stop, heard=heard):
            if result["status"] != "interrupted":
                keep(tasks[number], result)
                continue
            signal = result["signal"]
            if jobs == 1:
                break  # with more, another process may have ended its run meanwhile
        return stop.requested or signal
