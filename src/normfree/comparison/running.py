"""`compare`: methods against depths, every run in its own folder, none run twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from normfree.comparison.comparison import Comparison, Run
from normfree.comparison.scheduling import Task, ended, folder_name, train_all
from normfree.comparison.workers import in_words
from normfree.graph.discovery import discover
from normfree.methods import get
from normfree.models import build
from normfree.models.foreign import is_foreign
from normfree.models.transformer_layers import DecoderLayer, EncoderLayer
from normfree.plan import ResidualPlan
from normfree.train import TrainConfig
from normfree.train.config import FREE
from normfree.train.data import Data, open_data
from normfree.train.text.text_data import TextData

Progress = Callable[[int, int, str], None]
VARIED = ("method", "model", "lr", "seed")  # what a comparison sets itself


def compare(
    base: TrainConfig,
    *,
    methods: Sequence[str],
    models: Sequence[str],
    seeds: Sequence[int] = (0,),
    lrs: Sequence[float] | None = None,
    out: str | Path,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Train every method in every model with every seed and learning rate, and put the results side by side.

    A model of others is converted by each method, or left alone by 'as built'.
    The rest of a run is as in `base`; without `lrs`, so is the learning rate. Each run has a folder below `out`, named
    after its settings and their fingerprint: a finished or diverged one is read, an interrupted one goes on. `jobs`
    processes train at once, each with one thread; one job trains in this process, with all of torch's threads. SIGINT
    and SIGTERM let the runs under way save, and what is done comes back, with the `signal`.

    Raises:
        ValueError: before any run, for a model that a method does not admit, unknown names, or data that is not there;
            later for a run that cannot be trained.
        OSError: where a folder cannot be written.
    """
    out = Path(out)
    rates = tuple(dict.fromkeys(lrs if lrs is not None else (base.lr,)))
    for what, given in (("method", methods), ("model", models), ("seed", seeds), ("learning rate", rates)):
        if not given:
            raise ValueError(f"expected at least one {what}, got none; name one")
    if jobs < 1:
        raise ValueError(f"expected at least 1 job, got {jobs}")
    data = open_data(base)
    if len(rates) > 1:
        _require_validation(base, data)
    specs = tuple(dict.fromkeys(methods))
    depths = _depths(base, data, specs, tuple(dict.fromkeys(models)))
    # The deepest first: the processes then end at about the same time, and the time left is not estimated too low.
    configs = [
        base.with_changes(method=method, model=model, lr=lr, seed=seed)
        for model in sorted(depths, key=lambda name: -depths[name])
        for method in specs
        for lr in rates
        for seed in dict.fromkeys(seeds)
    ]
    tasks = [Task(config, out / folder_name(config)) for config in configs]
    runs, signal = _run(tasks, depths, jobs, progress)
    order = {task.folder.name: number for number, task in enumerate(tasks)}
    settings = {key: value for key, value in asdict(base).items() if key not in {*VARIED, *FREE}}
    return Comparison(
        runs=tuple(sorted(runs, key=lambda run: (run.depth, order[run.folder]))),
        settings=settings,
        methods=specs,
        lrs=rates,
        seeds=tuple(dict.fromkeys(seeds)),
        chance=1 / data.num_classes,
        linear_accuracy=data.linear_accuracy,
        signal=signal,
    )


def layers(plan: ResidualPlan) -> int:
    """The weight layers between input and output; those of shortcuts, which stand beside others, do not count.

    It is the number in the name of a CIFAR ResNet or MLP; a wide ResNet's also counts two shortcuts.
    """
    return len(plan.stem) + sum(b.depth for b in plan.branches) + len(plan.body) + len(plan.classifier)


def _require_validation(base: TrainConfig, data: Data) -> None:
    """Refuse data that leaves nothing to choose a learning rate by; of text, `validation` holds out nothing."""
    if isinstance(data, TextData):
        there = "valid" in data.prepared.splits
        folder = data.prepared.folder
        got = f"got '{folder}' without one; put a file such as book.valid.txt beside book.train.txt and prepare it"
    else:
        there, got = base.validation > 0, "got validation=0; set validation=0.1"
    if not there:
        raise ValueError(f"expected a validation part to choose the learning rate by, {got}, or give one learning rate")


def _depths(base: TrainConfig, data: Data, methods: Sequence[str], models: Sequence[str]) -> dict[str, int]:
    """The depth of every model; refuses one that a method does not admit."""
    if isinstance(data, TextData):
        tried = {m: [build(m, get(method), form=base.form, device="meta") for method in methods] for m in models}
        kinds = (EncoderLayer, DecoderLayer)  # as people count them, not the weight layers inside
        return {m: sum(isinstance(part, kinds) for part in alike[0].modules()) for m, alike in tried.items()}
    example = torch.zeros_like(data.example(base, 2)[0])
    depths = {}
    for model in models:
        for method in methods:
            if is_foreign(model):
                with torch.random.fork_rng(devices=[]):
                    built, plan = data.build_model(base.with_changes(model=model, method=method))
                depths[model] = layers(plan or discover(built, example))
            else:
                depths[model] = layers(build(model, get(method), form=base.form, example=example, device="meta").plan)
    return depths


def _run(
    tasks: Sequence[Task], depths: dict[str, int], jobs: int, progress: Progress | None
) -> tuple[list[Run], int | None]:
    """The runs that ended, and the signal that kept others from it."""
    found = {task: ended(task.folder) for task in tasks}
    runs = [_record(task, depths, result) for task, result in found.items() if result]
    left = [task for task, result in found.items() if not result]

    def tell(now: str = "") -> None:
        if progress is not None:
            progress(len(runs), len(tasks), now)

    def keep(task: Task, result: dict[str, Any]) -> None:
        runs.append(_record(task, depths, result))
        tell(str(runs[-1]))

    names = [f"{config.method}, {config.model}, lr {config.lr:g}" for config, _ in left]
    tell()
    signal = train_all(left, keep, jobs=jobs, heard=lambda said: tell(in_words(said, names)))
    return runs, signal


def _record(task: Task, depths: dict[str, int], result: dict[str, Any]) -> Run:
    config = task.config
    return Run(
        method=config.method,
        model=config.model,
        depth=depths[config.model],
        lr=config.lr,
        seed=config.seed,
        status=result["status"],
        validation=result["validation"] and result["validation"]["accuracy"],
        test=result["test"] and result["test"]["accuracy"],
        seconds=result["seconds"],
        folder=task.folder.name,
        bleu=result.get("bleu") and result["bleu"]["score"],
        origin={key: result.get(key) for key in ("commit", "versions", "hardware", "date")},
    )
