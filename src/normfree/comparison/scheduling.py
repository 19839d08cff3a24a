"""Training runs as tasks: what is trained, in which folder; never twice, and from where it stopped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from normfree.comparison.workers import Said, run_tasks
from normfree.models import build
from normfree.models.foreign import is_foreign
from normfree.report.progress import metrics_text
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.engine.environment import Stop
from normfree.train.run.result import Snapshot
from normfree.train.text.text_data import is_text

# What one H200 was measured to do: operations a second of a wide network, seconds an image and layer of a narrow one,
# and seconds to set up.
_FLOPS, _NARROW, _SET_UP = 4e14, 0.5e-6, 40.0
_IMAGES = {"fashion14": 6_000, "mnist": 60_000}  # training images; others are taken to have as many as CIFAR-10
_CIFAR_IMAGES = 50_000
_TOKENS = {"multi30k": 4.3e5, "europarl": 6.0e6}  # target tokens for training, by the first word of the folder's name
_TOKEN_SPEED = 3e5  # a second, of a Transformer of 6 + 6 layers; assumed
_DEEP, _STEP = 160, 18  # a deeper network is not built for its size: 10,000 layers take half a minute


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


def gpu_seconds(config: TrainConfig) -> float:
    """About how long a run takes on one H200, for planning; a model of others is not looked at and counts as small."""
    if is_text(config.data):
        return 2 * _SET_UP + config.epochs * _TOKENS.get(Path(config.data).name.partition("-")[0], 0.0) / _TOKEN_SPEED
    layers, operations = (0.0, 0.0) if is_foreign(config.model) else _size(config.model)
    images = _IMAGES.get(config.data, _CIFAR_IMAGES) * (1 - config.validation)
    return _SET_UP + config.epochs * images * max(layers * _NARROW, 3 * operations / _FLOPS)


@cache
def _size(model: str) -> tuple[float, float]:
    """Weight layers of a model, and operations of a forward pass of one image in the shape of CIFAR-10.

    Both are linear in the depth, so that those of a deep network follow from two others of its family.
    """
    named = re.fullmatch(r"(resnet|wrn-|mlp-|resmlp-|cnn-)(\d+)(.*)", model)
    if named is not None and int(named[2]) > _DEEP:
        depth = int(named[2])
        steps = (depth - 60) // _STEP
        (a, b), (c, d) = (_size(f"{named[1]}{depth - n * _STEP}{named[3]}") for n in (steps, steps - 1))
        return a + steps * (c - a), b + steps * (d - b)
    x = torch.empty(2, 3, 32, 32, device="meta")
    network = build(model, "he_in", example=x, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(x)
    return sum(1 for p in network.parameters() if p.dim() > 1), counter.get_total_flops() / 2
