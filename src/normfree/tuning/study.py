"""The study of a search: its journal, which all workers share, and the trials that they take from it.

    study.jsonl      Optuna's journal, one JSON record per line
    locks/0007/      the lock of trial 7, held by the worker that trains it
    trial-0007/      the run of trial 7

A worker takes a trial while it holds the lock of the study. It first looks for a trial that is not finished and whose
lock nobody holds, because its worker ended, and continues it. So there are exactly as many trials as were asked for,
however many workers share the study and however often they are killed.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from normfree.errors import require_package, unknown_name
from normfree.storage.folder_lock import FolderLock, HeldError, is_held
from normfree.storage.writing import explain_os_errors
from normfree.train.config import NOT_IN_FINGERPRINT, TrainConfig
from normfree.tuning.search_space import SearchSpace, grid_of, texts_of

if TYPE_CHECKING:
    import optuna

Metric = Literal["accuracy", "loss"]
SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "hyperband", "none"]
JOURNAL = "study.jsonl"
_NAME = "normfree"  # of the only study in a journal


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """All that a worker needs to take part in a search.

    Attributes:
        folder: Folder of the journal and the runs.
        config: The settings that all trials share.
        space: The settings that are searched.
        metric: The validation score that is compared.
        sampler: How the values of a trial are chosen.
        pruner: How trials with low scores are stopped early.
        total: The number of trials in all.
    """

    folder: Path
    config: TrainConfig
    space: SearchSpace
    metric: Metric
    sampler: SamplerName
    pruner: PrunerName
    total: int

    def __post_init__(self) -> None:
        for name, kinds in (("metric", Metric), ("sampler", SamplerName), ("pruner", PrunerName)):
            if getattr(self, name) not in get_args(kinds):
                raise unknown_name(name, str(getattr(self, name)), get_args(kinds))

    @property
    def maximize(self) -> bool:
        """Whether a higher score is better."""
        return self.metric == "accuracy"

    @property
    def journal(self) -> Path:
        """The file of the study."""
        return self.folder / JOURNAL

    def run_folder(self, number: int) -> Path:
        """Return the folder of a trial's run."""
        return self.folder / f"trial-{number:04d}"


class TakenTrial(NamedTuple):
    """A trial that this process trains, with its values by name as Optuna stores them."""

    study: optuna.Study
    trial: optuna.Trial
    values: Mapping[str, Any]


def create_study(settings: StudySettings) -> None:
    """Make the study in its folder, or check that the one there has the same settings.

    Raises:
        ValueError: if optuna is missing, the journal is damaged, or the study has other settings.
        OSError: in one sentence, if the folder cannot be written.
    """
    require_package("optuna", "a search")
    with explain_os_errors("the search in", settings.folder):
        settings.folder.mkdir(parents=True, exist_ok=True)
        with settings.journal.open("ab"):
            pass
    with _locked(settings), _quiet():
        storage = _open_storage(settings)
        if not storage.get_all_studies():
            import optuna

            if settings.journal.stat().st_size:
                raise _damage(settings.journal, "it has no study")
            direction = "maximize" if settings.maximize else "minimize"
            study = optuna.create_study(storage=storage, study_name=_NAME, direction=direction)
            for name, value in _description(settings).items():
                study.set_user_attr(name, value)
    _require_same(settings, read_study(settings))


def read_study(settings: StudySettings) -> optuna.Study:
    """Open the study.

    Raises:
        ValueError: if the journal is damaged.
    """
    import optuna

    with _quiet(), _damage_explained(settings.journal):
        return optuna.load_study(
            study_name=_NAME, storage=_open_storage(settings), sampler=optuna.samplers.RandomSampler(seed=0)
        )


def read_trials(settings: StudySettings) -> list[optuna.trial.FrozenTrial]:
    """Return all trials in order.

    Raises:
        ValueError: if the journal is damaged.
    """
    with _quiet(), _damage_explained(settings.journal):
        trials = list(read_study(settings).get_trials(deepcopy=False))
    for trial in trials:
        lost = [one.name for one in settings.space if trial.state.is_finished() and one.name not in trial.params]
        if lost:
            raise _damage(settings.journal, f"trial {trial.number} has no {lost[0]}")
    return trials


def count_finished(settings: StudySettings) -> int:
    """Count the trials that ended."""
    return sum(trial.state.is_finished() for trial in read_trials(settings))


@contextmanager
def take_trial(settings: StudySettings) -> Iterator[TakenTrial | None]:
    """Take a trial until the end of the `with` block: one whose worker ended, else a new one; None if none is left.

    Raises:
        ValueError: if the journal is damaged.
        OSError: in one sentence, if the folder cannot be written.
    """
    import optuna

    with ExitStack() as held:
        with _locked(settings), _quiet(), explain_os_errors("the search in", settings.folder):
            study = read_study(settings)
            trials = study.get_trials(deepcopy=False)
            found = next(
                (
                    old
                    for old in trials
                    if old.state == optuna.trial.TrialState.RUNNING and _lock_trial(settings, old.number, held)
                ),
                None,
            )
            number = len(trials) if found is None else found.number
            if found is None and number >= settings.total:
                trial = None
            else:
                study.pruner = _pruner(settings)
                study.sampler = _sampler(settings, number)
                trial = study.ask() if found is None else optuna.Trial(study, found._trial_id)
                if found is None:
                    _lock_trial(settings, trial.number, held)
                values = {one.name: one.suggest(trial) for one in settings.space}
                # The sampler of a grid would stop Optuna's own loop at the end, which does not run.
                study.sampler = optuna.samplers.RandomSampler(seed=0)
        with _quiet():
            yield None if trial is None else TakenTrial(study, trial, values)


def _lock_trial(settings: StudySettings, number: int, held: ExitStack) -> bool:
    """Lock a trial until `held` is closed; False if another process holds it."""
    earlier = settings.folder / "claims"  # the name in folders of earlier releases, which their workers may still lock
    folder = (earlier if earlier.is_dir() else settings.folder / "locks") / f"{number:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    if is_held(folder):
        return False
    try:
        held.enter_context(FolderLock(folder).hold())
    except HeldError:
        return False
    return True


def _sampler(settings: StudySettings, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial, seeded by the number of the trial: a killed search makes the same trials."""
    import optuna

    if settings.sampler == "grid":  # the seed orders the points; trial n takes the n-th
        return optuna.samplers.GridSampler(grid_of(settings.space), seed=settings.config.seed % 2**32)
    seed = int(np.random.SeedSequence([settings.config.seed, number]).generate_state(1)[0])
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _pruner(settings: StudySettings) -> optuna.pruners.BasePruner:
    import optuna

    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=max(1, settings.config.epochs))
    return optuna.pruners.MedianPruner() if settings.pruner == "median" else optuna.pruners.NopPruner()


# The journal


def _open_storage(settings: StudySettings) -> Any:
    """Open the journal, and remove a last line that a killed process or a full disk left incomplete."""
    from filelock import FileLock
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # It ends with its process; the locks of Optuna are files that a killed process leaves.
    lock = FileLock(f"{settings.journal}.lock", poll_interval=0.01, fallback_to_soft=False)
    explained = explain_os_errors("the journal of the search", settings.journal)
    with explained, lock, settings.journal.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
    with _damage_explained(settings.journal):
        return JournalStorage(JournalFileBackend(str(settings.journal), lock_obj=lock))


@contextmanager
def _locked(settings: StudySettings) -> Iterator[None]:
    """Hold the lock of the study, under which trials are taken; waits for other workers."""
    from filelock import FileLock

    with explain_os_errors("the lock of the search in", settings.folder):
        lock = FileLock(settings.folder / "study.lock", poll_interval=0.02, fallback_to_soft=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _damage_explained(journal: Path) -> Iterator[None]:
    """Explain in one sentence that a journal cannot be read; it is JSON, and no code in it is run."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # records in a wrong order fail anywhere in Optuna
        raise _damage(journal, " ".join(f"{type(error).__name__}: {error}".split())) from error


def _damage(journal: Path, reason: str) -> ValueError:
    return ValueError(
        f"expected the journal of a search in '{journal}', but it is damaged ({reason}); restore it, or choose another "
        "folder"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's log and warnings from the terminal."""
    import optuna  # which sets the level of its log

    log = logging.getLogger(optuna.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"optuna(\.|$)")
            yield
    finally:
        log.setLevel(level)


# What a study is about


def _description(settings: StudySettings) -> dict[str, Any]:
    """Describe a study by plain data, which the journal keeps."""
    return {
        "search": list(texts_of(settings.space)),
        "metric": settings.metric,
        "config": settings.config.to_toml(),
    }


def _require_same(settings: StudySettings, study: optuna.Study) -> None:
    """Raise `ValueError` if a study in the folder searches other settings."""
    stored = study.user_attrs
    for name, wanted in _description(settings).items():
        if not isinstance(stored.get(name), type(wanted)):
            raise _damage(settings.journal, f"{name} is {json.dumps(stored.get(name))[:80]}")
        if name != "config" and stored[name] != wanted:
            said = [" ".join(map(str, value)) if isinstance(value, list) else value for value in (stored[name], wanted)]
            raise ValueError(
                f"expected the {name} '{said[0]}' of the study in '{settings.folder}', got '{said[1]}'; use the same, "
                "or choose another folder"
            )
    before = TrainConfig.from_toml_text(stored["config"], str(settings.journal))
    searched = {one.name for one in settings.space}
    settings.config.require_same(before, {*NOT_IN_FINGERPRINT, *searched}, f"the study in '{settings.folder}'")
