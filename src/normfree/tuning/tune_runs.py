"""`tune` trains one run per trial of a search, and returns all trials with the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normfree.comparison.compare_runs import RunTask, ended_result, train_run, train_runs
from normfree.comparison.run_executor import LOCAL, Reports, choose_executor
from normfree.errors import require_package
from normfree.report.tables import compact, shorten_names
from normfree.report.terminal import ProgressCallback
from normfree.train import RunFolder, TrainConfig
from normfree.train.data_sources import open_data
from normfree.tuning.search_space import SearchSpace, grid_size, parse_search, require_valid, texts_of
from normfree.tuning.study import (
    Metric,
    PrunerName,
    SamplerName,
    StudySettings,
    TakenTrial,
    count_finished,
    create_study,
    read_trials,
    take_trial,
)
from normfree.tuning.tuning_result import TunedTrial, Tuning


class PrunedError(Exception):
    """The pruner ended a trial; its run stays as it is."""


def tune(
    config: TrainConfig,
    search: Iterable[str],
    *,
    trials: int,
    out: str | Path,
    metric: Metric = "accuracy",
    sampler: SamplerName = "tpe",
    pruner: PrunerName = "median",
    jobs: int = 1,
    on: str = LOCAL,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    progress: ProgressCallback | None = None,
) -> Tuning:
    """Search for the settings with the best validation score.

    Each trial is a run in a folder of `out`. The same call continues a search; a trial that was interrupted continues
    from its checkpoint. Several processes, on several machines, may call it with the same `out`: they share the trials
    until there are `trials` in all. For the sampler, a trial that
    diverges counts as an accuracy of 0, or an infinite loss; its `score` is None.

    Args:
        config: The settings that all trials share; its seed is also that of the sampler.
        search: The settings to search, such as 'lr=0.001..1:log' or 'method=fixup,batchnorm'.
        trials: The number of trials in all. A grid has at most as many as it has points.
        out: Folder of the search.
        metric: The validation score to compare: 'accuracy' or 'loss'.
        sampler: 'tpe', 'random' or 'grid'.
        pruner: 'median' stops a trial below the median of the others at the same epoch. 'hyperband' lets only a few
            trials run for all epochs. 'none' stops no trial early. All use the validation score after each epoch.
        jobs: Trials at a time on this machine.
        on: Where to train, as in `compare`; so are `cpus_per_run` and `gpus_per_run`.
        cpus_per_run: CPU cores of each trial on a cluster.
        gpus_per_run: GPUs of each trial on a cluster, or a share of one.
        progress: Called with the trials that ended, the number of all trials, and a string on those in progress.

    Returns:
        The trials. After a Unix signal its `signal` is set.

    Raises:
        ValueError: before any training, if a setting, a range or a name is wrong, the data has no validation part, or
            the folder holds another search; later, if a trial cannot be trained.
        OSError: if the folder cannot be written.
    """
    require_package("optuna", "a search")
    space = parse_search(search)
    require_valid(config, space)
    if trials < 1:
        raise ValueError(f"expected at least 1 trial, got {trials}")
    if sampler == "grid":
        trials = min(trials, grid_size(space))
    if config.epochs < 1:
        raise ValueError(f"expected at least 1 epoch to score trials by, got {config.epochs}")
    out = Path(out)
    executor = choose_executor(
        on, shared=out, jobs=jobs, cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run, device=config.device
    )
    data = open_data(config)
    if (missing := data.missing_validation(config)) is not None:
        raise ValueError(f"expected a validation part to score trials by, {missing}")
    settings = StudySettings(
        folder=out if on == LOCAL else out.absolute(),
        config=config,
        space=space,
        metric=metric,
        sampler=sampler,
        pruner=pruner,
        total=trials,
    )
    if not settings.journal.exists() and (first := _first_config(config, space)) is not None:
        data.build_model(first)  # which refuses a wrong model before the folder is made
    create_study(settings)
    done = count_finished(settings)

    def show(text: str = "") -> None:
        if progress is not None:
            progress(done, max(trials, done), text)

    def add(_: StudySettings, result: dict[str, Any]) -> None:
        nonlocal done
        done = max(done, result["finished"])
        show(result["text"])

    def show_reports(reports: Reports) -> None:
        show(shorten_names([reports[number] for number in sorted(reports)], limit=2))

    show()
    slots = [settings] * (trials - done)
    signal = train_runs(slots, add, executor=executor, on_report=show_reports, function=run_trial)
    return collect(settings, signal)


def _first_config(config: TrainConfig, space: SearchSpace) -> TrainConfig | None:
    """The settings with the first value of each range and list; None if these do not go together."""
    try:
        return config.with_changes(**{one.name: one.first for one in space})
    except ValueError:
        return None


def run_trial(settings: StudySettings, report: Callable[[str], None]) -> dict[str, Any]:
    """Take a trial, train it, and tell the study its score.

    Returns:
        The status of the trial, or 'none left'; a text on it; and the number of trials that ended.
    """
    with take_trial(settings) as taken:
        if taken is None:
            status, text = "none left", ""
        else:
            name = f"trial {taken.trial.number}, {_values_text(taken.values)}"
            found = _train(settings, taken, lambda text: report(f"{name}: {text}"))
            if found["status"] == "interrupted":
                return found
            status, text = found["status"], f"{name}: {found['text']}"
    return {"status": status, "text": text, "finished": count_finished(settings)}


def _train(settings: StudySettings, taken: TakenTrial, report: Callable[[str], None]) -> dict[str, Any]:
    """Train the run of a trial or continue it, and tell the study how it ended."""
    from optuna.trial import TrialState

    study, trial = taken.study, taken.trial
    try:
        values = {one.name: one.parse(taken.values[one.name]) for one in settings.space}
        config = settings.config.with_changes(**values)
    except ValueError as error:
        trial.set_user_attr("reason", str(error))
        study.tell(trial, state=TrialState.FAIL)
        return {"status": "refused", "text": f"refused: {error}"}
    task = RunTask(config, settings.run_folder(trial.number))
    key = f"validation_{settings.metric}"
    known = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def tell_epoch(record: dict[str, Any]) -> None:
        score, epoch = record[key], record["epoch"]
        if epoch not in known and math.isfinite(score):
            trial.report(score, epoch)
        if epoch < config.epochs and trial.should_prune():
            raise PrunedError

    result = ended_result(task)
    if result is None:
        run = RunFolder(task.folder)
        try:
            for record in run.read_metrics() if run.exists else ():
                tell_epoch(record)  # of a process that was killed before it could
            result = train_run(task, report, on_epoch=tell_epoch)
        except PrunedError:
            study.tell(trial, state=TrialState.PRUNED)
            return {"status": "pruned", "text": "pruned"}
    if result["status"] == "interrupted":
        return {"status": "interrupted", "signal": result["signal"]}
    trial.set_user_attr("seconds", result["seconds"])
    score = None if result["status"] == "diverged" else result["validation"][settings.metric]
    if score is None or not math.isfinite(score):
        trial.set_user_attr("diverged", True)
        study.tell(trial, 0.0 if settings.maximize else math.inf)
        return {"status": "diverged", "text": "diverged"}
    if result["test"]:
        trial.set_user_attr("test", result["test"]["accuracy"])
    study.tell(trial, score)
    return {"status": "finished", "text": f"validation {settings.metric} {compact(score)}"}


def collect(settings: StudySettings, signal: int | None = None) -> Tuning:
    """Read all trials of a study.

    Raises:
        ValueError: if the journal is damaged.
    """
    from optuna.trial import TrialState

    names = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "refused"}
    trials = []
    for trial in read_trials(settings):
        diverged = bool(trial.user_attrs.get("diverged"))
        status: Any = "diverged" if diverged else names.get(trial.state, "unfinished")
        scores = tuple(score for _, score in sorted(trial.intermediate_values.items()))
        score = None if diverged else trial.value if status == "finished" else scores[-1] if scores else None
        trials.append(
            TunedTrial(
                number=trial.number,
                values=dict(trial.params),
                status=status,
                score=score,
                scores=scores,
                test=trial.user_attrs.get("test"),
                seconds=trial.user_attrs.get("seconds"),
                folder=settings.run_folder(trial.number).name,
                reason=str(trial.user_attrs.get("reason", "")),
            )
        )
    searched = {one.name for one in settings.space}
    return Tuning(
        trials=tuple(trials),
        search=tuple(texts_of(settings.space)),
        metric=settings.metric,
        total=settings.total,
        settings={name: value for name, value in asdict(settings.config).items() if name not in searched},
        signal=signal,
    )


def _values_text(values: Any) -> str:
    return " ".join(f"{name}={compact(value) if isinstance(value, float) else value}" for name, value in values.items())
