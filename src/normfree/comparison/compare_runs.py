"""`compare` trains a grid of methods, models, learning rates and seeds; each run has a folder and is trained once.

`train_runs` trains any runs by an executor; `tune` and the claims of the papers use it too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch

from normfree.arguments import check_arguments
from normfree.comparison.comparison_result import ComparedRun, Comparison
from normfree.comparison.run_executor import LOCAL, Reports, RunExecutor, choose_executor, summarize_reports
from normfree.graph.discovery import discover
from normfree.methods import get
from normfree.models import build
from normfree.models.builder import is_foreign
from normfree.models.transformer import DecoderLayer, EncoderLayer
from normfree.plan import ResidualPlan
from normfree.report.terminal import ProgressCallback, duration, metrics_text
from normfree.storage.folder_lock import is_held
from normfree.storage.provenance import without_folders
from normfree.storage.writing import made_folder, to_json_values
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.config import NOT_IN_FINGERPRINT, folder_name
from normfree.train.data_sources import open_data
from normfree.train.engine.data_interface import Data
from normfree.train.engine.loop import OnEpoch
from normfree.train.engine.process_state import Stop
from normfree.train.run.run_records import Snapshot

_NOT_COMPARED = NOT_IN_FINGERPRINT | {"precision", "channels_last", "compile", "graph"}  # chosen by the machine if open
_LOOK_SECONDS = 0.5
_ENOUGH = 0.05  # the share of a run that tells its speed
T = TypeVar("T")
VARIED = ("method", "model", "lr", "seed")  # the settings that a comparison varies


def compare(
    base: TrainConfig,
    *,
    methods: Sequence[str],
    models: Sequence[str],
    seeds: Sequence[int] = (0,),
    lrs: Sequence[float] | None = None,
    out: str | Path,
    jobs: int = 1,
    on: str = LOCAL,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    progress: ProgressCallback | None = None,
) -> Comparison:
    """Train every method in every model with every learning rate and seed, and compare the results.

    Each run has a folder in `out`, named after its settings and their fingerprint. A run that finished or diverged is
    read and not trained again; an interrupted one continues. SIGINT and SIGTERM let the running ones save their state.

    Args:
        base: The settings that all runs share.
        methods: Names of methods. A model of another package is converted by the method; 'as built' leaves it as it is.
        models: Names of models, usually one per depth.
        seeds: The seeds.
        lrs: Learning rates. Each method is shown at its best rate by validation accuracy. Default: the rate of `base`.
        out: Folder of the runs. All nodes of a cluster must share it.
        jobs: Number of processes, with one thread each. One job trains in this process, with all threads of torch.
        on: Where to train: 'local'; 'ray', the Ray cluster that RAY_ADDRESS names or that runs on this machine, or a
            new one of this machine; or 'ray://HOST:PORT'. A run whose node is lost continues on another one.
        cpus_per_run: CPU cores of each run on a cluster, and threads of torch; by default 1.
        gpus_per_run: GPUs of each run on a cluster, or a share of one such as 0.25; by default 1 if the device of
            `base` is 'cuda', else 0: 'auto' does not ask for GPUs, which the cluster may lack.
        progress: Called with the number of runs that ended, the number of all runs, and a string on the time left and
            the runs in progress.

    Returns:
        The comparison. After a Unix signal its `signal` is set, and runs are missing.

    Raises:
        ValueError: before any training, if a list is empty, `jobs` is below 1, a name is unknown, a model does not
            admit a method, data is missing, several learning rates are given for data without a validation part, or
            the cluster cannot be reached; later, if a run cannot be trained.
        OSError: if a folder cannot be written.
    """
    check_arguments(config=base, methods=methods, models=models)
    out = Path(out)
    rates = tuple(dict.fromkeys(lrs if lrs is not None else (base.lr,)))
    for kind, values in (("method", methods), ("model", models), ("seed", seeds), ("learning rate", rates)):
        if not values:
            raise ValueError(f"expected at least one {kind}, got none; name one")
    resources = {"cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run}
    executor = choose_executor(on, shared=out, jobs=jobs, device=base.device, **resources)
    data = open_data(base)
    if len(rates) > 1:
        _require_validation(base, data)
    specs = tuple(dict.fromkeys(methods))
    depths = _depths(base, data, specs, tuple(dict.fromkeys(models)))
    # The deepest models come first, so that the processes end at about the same time.
    configs = [
        base.with_changes(method=method, model=model, lr=lr, seed=seed)
        for model in sorted(depths, key=lambda name: -depths[name])
        for method in specs
        for lr in rates
        for seed in dict.fromkeys(seeds)
    ]
    place = out if on == LOCAL else out.absolute()
    tasks = [RunTask(config, place / folder_name(config)) for config in configs]
    with made_folder("the runs in", out):
        runs, signal = _train_missing(tasks, depths, executor, progress)
    order = {task.folder.name: number for number, task in enumerate(tasks)}
    settings = {key: value for key, value in asdict(base).items() if key not in {*VARIED, *NOT_IN_FINGERPRINT}}
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


def network_depth(plan: ResidualPlan) -> int:
    """Count the weight layers between input and output, without those of shortcuts.

    This is the number in the name of a CIFAR ResNet or MLP; the name of a wide ResNet also counts two shortcuts.
    """
    return len(plan.stem) + sum(b.degree for b in plan.branches) + len(plan.body) + len(plan.classifier)


def _require_validation(base: TrainConfig, data: Data) -> None:
    """Raise `ValueError` if the data has no validation part."""
    if (missing := data.missing_validation(base)) is not None:
        raise ValueError(
            f"expected a validation part to choose the learning rate by, {missing}, or give one learning rate"
        )


def _depths(base: TrainConfig, data: Data, methods: Sequence[str], models: Sequence[str]) -> dict[str, int]:
    """Return the depth of every model; refuse a model that does not admit a method."""
    if data.kind == "text":
        tried = {m: [build(m, get(method), form=base.form, device="meta") for method in methods] for m in models}
        kinds = (EncoderLayer, DecoderLayer)  # the layers that people count, not the weight layers inside
        return {m: sum(isinstance(part, kinds) for part in alike[0].modules()) for m, alike in tried.items()}
    example = torch.zeros_like(data.example(base, 2)[0])
    depths = {}
    for model in models:
        for method in methods:
            if is_foreign(model):
                with torch.random.fork_rng(devices=[]):
                    built, plan = data.build_model(base.with_changes(model=model, method=method))
                depths[model] = network_depth(plan or discover(built, example))
            else:
                depths[model] = network_depth(
                    build(model, get(method), form=base.form, example=example, device="meta").plan
                )
    return depths


def _train_missing(
    tasks: Sequence[RunTask], depths: dict[str, int], executor: RunExecutor, progress: ProgressCallback | None
) -> tuple[list[ComparedRun], int | None]:
    """Train the runs that have not ended yet; return all that have, and the signal that stopped the others."""
    for task in tasks:
        _require_same_method(task)
    found = {task: ended_result(task) for task in tasks}
    runs = [_record(task, depths, result) for task, result in found.items() if result]
    missing = [task for task, result in found.items() if not result]
    left = TimeLeft([(task.config.model, depths[task.config.model]) for task in missing])

    def show(text: str = "") -> None:
        if progress is not None:
            progress(len(runs), len(tasks), ", ".join(part for part in (left.text, text) if part))

    def add(task: RunTask, result: dict[str, Any]) -> None:
        runs.append(_record(task, depths, result))
        left.end(numbers[task], runs[-1].seconds)
        show(str(runs[-1]))

    def show_reports(reports: Reports) -> None:
        left.see(reports)
        show(summarize_reports(reports, names))

    names = [f"{config.method}, {config.model}, lr {config.lr:g}" for config, _ in missing]
    numbers = {task: number for number, task in enumerate(missing)}
    show()
    return runs, train_runs(missing, add, executor=executor, on_report=show_reports)


def _require_same_method(task: RunTask) -> None:
    """Raise if the folder of a run holds one by another method: the name may have meant another in its release."""
    run = RunFolder(task.folder)
    if not run.config_path.exists():
        return
    found = run.read_config().method
    if found != task.config.method:
        raise ValueError(
            f"expected a run of '{task.config.method}' in '{task.folder}', got one of '{found}' by an earlier release; "
            "choose another folder, or name that method"
        )


def _record(task: RunTask, depths: dict[str, int], result: dict[str, Any]) -> ComparedRun:
    config = task.config
    return ComparedRun(
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


# Single runs, also for the claims of the papers


class RunTask(NamedTuple):
    """One run to train: its configuration and its folder."""

    config: TrainConfig
    folder: Path


def ended_result(task: RunTask) -> dict[str, Any] | None:
    """Read the result of a run that finished or diverged; None for any other folder.

    Raises:
        ValueError: If the result in the folder is not one of the task's settings.
    """
    run = RunFolder(task.folder)
    if run.status not in ("finished", "diverged"):
        return None
    result = run.read_result()
    wanted: dict[str, Any] = to_json_values(without_folders(asdict(task.config)))
    stored = {**wanted, **result.get("config", {})}
    differing = [name for name in wanted if name not in _NOT_COMPARED and stored[name] != wanted[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"expected a result of {name}={wanted[name]} in '{run.result_path}', got one of {name}={stored[name]}; it "
            "belongs to another run: delete it to train the run again"
        )
    return result


def train_run(
    task: RunTask, report: Callable[[str], None], lock_seconds: float = 0.0, on_epoch: OnEpoch | None = None
) -> dict[str, Any]:
    """Train one run in its folder or continue it, and return its result; a run that has ended is only read.

    While another process trains the run, wait for it, for `lock_seconds` at most.
    """
    if (done := ended_result(task)) is not None:
        return done
    _wait_for_folder(task.folder, report, lock_seconds)
    if (done := ended_result(task)) is not None:
        return done  # the other process ended it

    def show(seen: Snapshot) -> None:
        metrics = metrics_text(loss=seen.loss, throughput=seen.throughput, unit=seen.unit)
        report(f"{seen.done / seen.total:.0%}, {metrics}")

    resume = RunFolder(task.folder).exists
    result = fit(task.config, out=task.folder, resume=resume, picture=False, progress=show, on_epoch=on_epoch)
    return ended_result(task) or result.to_json()  # the stored result also names hardware and versions


def _wait_for_folder(folder: Path, report: Callable[[str], None], lock_seconds: float) -> None:
    """Wait while another process trains the run; if it does not end in time, `fit` refuses the folder."""
    deadline = time.monotonic() + lock_seconds
    with Stop() as stop:
        while is_held(folder) and time.monotonic() < deadline and not stop.requested:
            report("waits for another process to leave its folder")
            time.sleep(_LOOK_SECONDS)


def train_runs(
    tasks: Sequence[T],
    on_result: Callable[[T, dict[str, Any]], None],
    *,
    executor: RunExecutor,
    on_report: Callable[[Reports], None],
    function: Callable[..., dict[str, Any]] | None = None,
) -> int | None:
    """Train runs by an executor, and pass the result of each that ends to `on_result`.

    Args:
        tasks: The runs.
        on_result: Called with a task and its result.
        executor: Where the runs are trained.
        on_report: Called with the latest reports of the running tasks.
        function: Trains one run; its result has a status, and the signal of a run that was interrupted. By default
            `train_run`, which waits for a locked folder as long as the executor says.

    Returns:
        The signal that stopped the training, or None.
    """
    signal = None
    function = function or partial(train_run, lock_seconds=executor.lock_seconds)
    with Stop() as stop:
        try:
            for number, result in executor.run_tasks(function, tasks, stop=stop, on_report=on_report):
                if result["status"] == "interrupted":
                    signal = result["signal"]  # another worker may still end its run
                else:
                    on_result(tasks[number], result)
        except KeyboardInterrupt:  # a second ctrl-C, or one before a run has anything to save
            if stop.requested is None:
                raise
        return stop.requested or signal


class TimeLeft:
    """An estimate of how long the runs of a comparison will take, from those that ended and those in progress.

    A run in progress is expected to continue at its speed so far. Another run is expected to take the mean time of the
    runs of its model; if none of them has begun, its time is estimated from the other models, in proportion to the
    depth. The sum is divided by the number of runs in progress.

    >>> left = TimeLeft([("resnet20", 20), ("resnet20", 20), ("resnet8", 8)], clock=lambda: 0.0)
    >>> left.seconds is None
    True
    >>> left.end(0, 60.0)
    >>> left.seconds, left.text  # 60 s of a resnet20 and 8/20 of that of a resnet8
    (84.0, 'about 1 min 24 s left')

    Args:
        runs: The model and the depth of every run.
        clock: Returns the time in seconds.
    """

    def __init__(self, runs: Sequence[tuple[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._ended: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        self._shares: dict[int, tuple[float, float]] = {}  # of the run that is done: at its first report, and now

    def see(self, reports: Reports) -> None:
        """Take in which runs are in progress, and how far they are."""
        self._begun = {number: self._begun.get(number, self._clock()) for number in reports}
        found = {number: re.match(r"(\d+)%", text) for number, text in reports.items()}
        shares = {number: int(share[1]) / 100 for number, share in found.items() if share}
        self._shares = {number: (self._shares.get(number, (now, now))[0], now) for number, now in shares.items()}

    def end(self, number: int, seconds: float) -> None:
        """Take in that a run ended, and its time."""
        self._ended[number] = seconds
        self._begun.pop(number, None)
        self._shares.pop(number, None)

    @property
    def seconds(self) -> float | None:
        """The time left; None before a run has ended or has done a twentieth of its steps."""
        moving = {
            number: (self._clock() - self._begun[number]) / (now - first)
            for number, (first, now) in self._shares.items()
            if now - first >= _ENOUGH
        }
        known = {**moving, **self._ended}
        if not known:
            return None
        by_model: dict[str, list[float]] = {}
        for number, seconds in known.items():
            by_model.setdefault(self._runs[number][0], []).append(seconds)
        per_layer = fmean(seconds / max(1, self._runs[number][1]) for number, seconds in known.items())

        def rest(number: int) -> float:
            if number in moving:
                return moving[number] * (1 - self._shares[number][1])
            model, depth = self._runs[number]
            whole = fmean(by_model[model]) if model in by_model else per_layer * depth
            begun = self._begun.get(number)
            return whole if begun is None else max(0.0, whole - (self._clock() - begun))

        open_runs = [rest(number) for number in range(len(self._runs)) if number not in self._ended]
        return max(sum(open_runs) / max(1, len(self._begun)), max(open_runs, default=0.0))

    @property
    def text(self) -> str:
        """The time left in words; empty if it is not known or nothing is left."""
        seconds = self.seconds
        return f"about {duration(seconds)} left" if seconds and len(self._ended) < len(self._runs) else ""
