"""`tune`: it finds a rate that is known, goes on after a kill, and several processes share its trials."""

import json
import logging
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna  # so that this file is left out where optuna is not installed
import pytest

from normfree.comparison import compare_runs
from normfree.storage.folder_lock import is_held
from normfree.train import RunFolder, TrainConfig
from normfree.tuning import study as studies
from normfree.tuning import tune
from normfree.tuning.search_space import parse_search
from normfree.tuning.tuning_result import Tuning
from one_weight import CONFIG, OneStep
from ray_nodes import SOURCES, wait_until

SEARCH = ["lr=0.01..100:log"]
DECADES = 4
LOSS: dict[str, Any] = {"metric": "loss", "pruner": "none"}
SMALL = TrainConfig(model="resmlp-1-8", epochs=1, batch_size=1000, validation=0.5, device="cpu")


@pytest.fixture(scope="module")
def one_step() -> OneStep:
    return OneStep()


def _ends(found: Tuning) -> list[Any]:
    return [(trial.number, trial.values, trial.status, trial.score) for trial in found.trials]


def test_scores_are_those_of_the_closed_form(tmp_path: Path, one_step: OneStep) -> None:
    level = logging.getLogger("optuna").level
    told: list[tuple[int, int, str]] = []
    found = tune(CONFIG, SEARCH, trials=4, out=tmp_path, progress=lambda *news: told.append(news), **LOSS)
    for trial in found.trials:
        # The loss of 3,000 images in float32; each term has a relative error of about 1e-6.
        assert trial.score == pytest.approx(one_step.loss(trial.values["lr"]), rel=1e-5)
    assert found.best is not None
    assert found.best.score == min(trial.score for trial in found.trials if trial.score is not None)
    assert [told[0][:2], told[-1][:2]] == [(0, 4), (4, 4)]
    assert logging.getLogger("optuna").level == level
    json.dumps(found.to_json(), allow_nan=False)


def test_search_goes_on_as_if_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(CONFIG, SEARCH, trials=12, out=tmp_path / "whole", **LOSS)
    count, fit = 0, compare_runs.fit

    def killed(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise MemoryError  # ends the process without a word to the study
        return fit(*arguments, **options)

    monkeypatch.setattr(compare_runs, "fit", killed)
    with pytest.raises(MemoryError):
        tune(CONFIG, SEARCH, trials=12, out=tmp_path / "killed", **LOSS)
    again = tune(CONFIG, SEARCH, trials=12, out=tmp_path / "killed", **LOSS)
    assert _ends(again) == _ends(whole)
    assert count == 13  # one trial began twice
    assert tune(CONFIG, SEARCH, trials=12, out=tmp_path / "killed", **LOSS) == again
    assert tune(CONFIG, SEARCH, trials=3, out=tmp_path / "killed", **LOSS).finished == 12
    assert count == 13


def test_kill_between_result_and_study_trains_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, fit, count = optuna.Study.tell, compare_runs.fit, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return fit(*arguments, **options)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(compare_runs, "fit", counted)
    monkeypatch.setattr(optuna.Study, "tell", fail)
    with pytest.raises(MemoryError):
        tune(CONFIG, SEARCH, trials=1, out=tmp_path, **LOSS)
    monkeypatch.setattr(optuna.Study, "tell", tell)
    assert [trial.status for trial in tune(CONFIG, SEARCH, trials=1, out=tmp_path, **LOSS).trials] == ["finished"]
    assert count == 1


def _scripted(score: Any) -> Any:
    """A `fit` that trains nothing, and reports the scores of a function of the rate and the epoch."""

    def fit(config: TrainConfig, *, on_epoch: Any, **_: Any) -> Any:
        for epoch in range(1, config.epochs + 1):
            on_epoch({"epoch": epoch, "validation_accuracy": score(config.lr, epoch)})
        end = {"accuracy": score(config.lr, config.epochs)}
        return SimpleNamespace(
            to_json=lambda: {"status": "finished", "seconds": 0.0, "validation": end, "test": None, "signal": None}
        )

    return fit


def test_trials_below_the_median_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's median pruner: after five trials, a trial ends whose best score is below the median at its epoch."""
    monkeypatch.setattr(compare_runs, "fit", _scripted(lambda lr, epoch: lr * epoch / 10))
    config = SMALL.with_changes(epochs=4)
    found = tune(config, ["lr=0.01..1"], trials=20, out=tmp_path, sampler="random")
    for trial in found.trials:
        lr, before = trial.values["lr"], found.trials[: trial.number]
        seen = [[t.scores[epoch] for t in before if t.status == "finished" and len(t.scores) > epoch] for epoch in (0,)]
        pruned = len([t for t in before if t.status == "finished"]) >= 5 and lr / 10 < statistics.median(seen[0])
        if pruned:
            assert trial.status == "pruned"
            assert len(trial.scores) == 1
    assert 0 < sum(trial.status == "pruned" for trial in found.trials) < 15
    none = tune(config, ["lr=0.01..1"], trials=20, out=tmp_path / "none", sampler="random", pruner="none")
    assert {trial.status for trial in none.trials} == {"finished"}  # the control
    assert [trial.values for trial in none.trials] == [trial.values for trial in found.trials]


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_pruned_run_keeps_its_epochs(tmp_path: Path, pruner: Any) -> None:
    rates = "lr=0.3,0.2,0.1,0.25,0.15,0.000001"
    config = SMALL.with_changes(epochs=3)
    found = tune(config, [rates], trials=6, out=tmp_path, sampler="grid", pruner=pruner)
    assert len(found.trials) == 6
    assert {trial.values["lr"] for trial in found.trials} == set(rates.removeprefix("lr=").split(","))
    for trial in found.trials:
        records = RunFolder(tmp_path / trial.folder).read_metrics()
        assert trial.scores == tuple(record["validation_accuracy"] for record in records)
        assert len(records) == 3 if trial.status == "finished" else len(records) < 3


def test_diverged_trials_count_as_the_worst(tmp_path: Path) -> None:
    found = tune(SMALL, ["lr=0.1,1e30"], trials=9, out=tmp_path, sampler="grid")
    assert found.total == 2  # the points of the grid
    assert sorted(trial.status for trial in found.trials) == ["diverged", "finished"]
    assert found.best is not None
    assert found.best.values == {"lr": "0.1"}
    wild = tune(SMALL, ["lr=1e29..1e30"], trials=2, out=tmp_path / "wild", metric="loss")
    assert [trial.status for trial in wild.trials] == ["diverged"] * 2
    assert wild.best is None


def test_trials_of_a_folder_of_before_are_locked_where_its_workers_look(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"metric": "loss", "sampler": "random", "pruner": "none"}
    space = parse_search(SEARCH)
    settings = studies.StudySettings(folder=tmp_path, config=SMALL, space=space, total=9, **kinds)
    with ExitStack() as held:
        assert studies._lock_trial(settings, 7, held)
        assert is_held(tmp_path / "locks" / "0007")
    (tmp_path / "locks").rename(tmp_path / "claims")
    with ExitStack() as held:
        assert studies._lock_trial(settings, 7, held)
        assert is_held(tmp_path / "claims" / "0007")
    assert not (tmp_path / "locks").exists()


def test_settings_that_exclude_each_other_are_a_trial(tmp_path: Path) -> None:
    found = tune(SMALL, ["optimizer=sgd,adam", "nesterov=true,false"], trials=4, out=tmp_path, sampler="grid")
    (refused,) = (trial for trial in found.trials if trial.status == "refused")
    assert refused.values == {"optimizer": "adam", "nesterov": "true"}
    assert "expected optimizer 'sgd' with a momentum above 0 for 'nesterov'" in refused.reason
    assert found.finished == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"search": ["lr=0.01..10:log"]}, r"expected the search 'lr=0.01..100:log' of the study in '.*', got 'lr=0.01"),
        ({"metric": "accuracy"}, "expected the metric 'loss' of the study"),
        (
            {"config": CONFIG.with_changes(seed=1)},
            "the study in .* has seed=0, but this command gives seed=1",
        ),
        ({"trials": 0}, "expected at least 1 trial, got 0"),
        ({"sampler": "tep"}, "unknown sampler 'tep'; did you mean 'tpe'"),
        ({"pruner": "mean"}, "unknown pruner 'mean'"),
        ({"metric": "bleu"}, "unknown metric 'bleu'"),
        ({"sampler": "grid"}, "expected choices or a step for 'lr' in a grid"),
        ({"config": CONFIG.with_changes(validation=0.0)}, "expected a validation part to score trials by, got valid"),
        ({"config": CONFIG.with_changes(epochs=0)}, "expected at least 1 epoch to score trials by, got 0"),
        ({"on": "slurm"}, "expected 'local', 'ray' or 'ray://HOST:PORT' as the place of the runs, got 'slurm'"),
        ({"jobs": 0}, "expected at least 1 job"),
    ],
)
def test_another_search_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    tune(CONFIG, SEARCH, trials=1, out=tmp_path, **LOSS)
    before = (tmp_path / studies.JOURNAL).read_bytes()
    options: dict[str, Any] = {"config": CONFIG, "search": SEARCH, "trials": 2, "out": tmp_path, **LOSS, **changes}
    with pytest.raises(ValueError, match=says):
        tune(**options)
    assert (tmp_path / studies.JOURNAL).read_bytes() == before


def test_damaged_journals_are_one_sentence(tmp_path: Path) -> None:
    first = tune(CONFIG, SEARCH, trials=2, out=tmp_path, **LOSS)
    journal = tmp_path / studies.JOURNAL
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    for line in lines:
        json.loads(line)  # no other format is in it
    damaged = {
        "a cut line": b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]]),
        "a lost study": b"".join(lines[1:]),
        "another format": b"\x80\x04\x95" + whole,
        "a list": b"[]\n" + whole,
        "an unknown record": whole + b'{"op_code":99,"worker_id":"x"}\n',
        "no description": lines[0],
        "a forged search": whole.replace(b'"search":["lr=0.01..100:log"]', b'"search":7'),
        "a lost value": b"".join(line for line in lines if b'"param_name"' not in line),
    }
    for name, content in damaged.items():
        journal.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"expected the journal of a search in '.*', but it is damaged \(.+\); rest"
        ):
            tune(CONFIG, SEARCH, trials=2, out=tmp_path, **LOSS)
        assert journal.read_bytes() == content, name
    journal.write_bytes(whole + b'{"op_code":4,"wor')  # of a process that was killed while it wrote
    assert tune(CONFIG, SEARCH, trials=2, out=tmp_path, **LOSS) == first
    assert journal.read_bytes() == whole


def test_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"the search in"):
        tune(CONFIG, SEARCH, trials=1, out=tmp_path / "file", **LOSS)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("search", [SEARCH, ["model=transformer-1-1-8-16-2,resmlp-1-8"]])
def test_model_that_cannot_be_built_leaves_no_folder(tmp_path: Path, search: list[str]) -> None:
    config = SMALL.with_changes(model="transformer-1-1-8-16-2")
    with pytest.raises(ValueError, match=r"model 'transformer-1-1-8-16-2' expects an example of 2 int64 tensors"):
        tune(config, search, trials=2, out=tmp_path / "search")
    assert not any(tmp_path.iterdir())


def test_missing_optuna_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.errors.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^a search needs optuna, which is not installed; .*pip install '.\[tune\]'$"):
        tune(CONFIG, SEARCH, trials=1, out=tmp_path, **LOSS)


# A known rate


@pytest.mark.slow
def test_50_trials_find_the_known_rate(tmp_path: Path, one_step: OneStep) -> None:
    """Of 50 rates drawn at random over four decades, one is within 0.2 decades of the best but for 0.5 % of all seeds.

    The chance that none is is (1 - 0.4 / 4)^50. A sampler that learns has to do at least as well.
    """
    assert (1 - 0.4 / DECADES) ** 50 < 0.006
    best = one_step.best_rate(0.01, 100.0)
    assert one_step.loss(best) <= min(one_step.loss(10 ** (power / 50)) for power in range(-100, 101))
    found = tune(CONFIG, SEARCH, trials=50, out=tmp_path, **LOSS)
    assert len(found.trials) == 50
    assert found.best is not None
    assert abs(math.log10(found.best.values["lr"] / best)) < 0.2
    assert found.best.score is not None
    assert found.best.score < max(one_step.loss(best * 10**0.2), one_step.loss(best * 10**-0.2))
    # The sampler learns: of 25 rates drawn at random, 13 are within half a decade for 0.4 % of all seeds.
    assert sum(math.comb(25, k) * 0.25**k * 0.75 ** (25 - k) for k in range(13, 26)) < 0.004
    assert sum(abs(math.log10(trial.values["lr"] / best)) < 0.5 for trial in found.trials[25:]) >= 13
    # The controls: the worst trial, and the best one where the best rate is not searched.
    worst = max(found.trials, key=lambda trial: trial.score or 0.0)
    assert abs(math.log10(worst.values["lr"] / best)) > 0.2
    below = tune(CONFIG, ["lr=0.01..0.5:log"], trials=10, out=tmp_path / "below", **LOSS)
    assert below.best is not None
    assert abs(math.log10(below.best.values["lr"] / best)) > 0.2


# Several processes

COMMAND = ("tune", "--search", *SEARCH, "--metric", "loss", "--pruner", "none", "--trials", "50", "--jobs", "1")
SHARED = [f"--set={name}={getattr(CONFIG, name)}" for name in ("model", "method", "data", "batch_size", "validation",
          "momentum", "weight_decay", "schedule", "device")]  # fmt: skip


def _start(out: Path, *more: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "normfree", *COMMAND, *SHARED, "--set=epochs=1", "--out", str(out), *more]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finished(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("trial-*/result.json")}


@pytest.mark.slow
@pytest.mark.faults
def test_processes_share_one_study_and_survive_kills(tmp_path: Path, one_step: OneStep) -> None:
    first, second = _start(tmp_path), _start(tmp_path)
    wait_until(lambda: len(_finished(tmp_path)) >= 8, 120, "the end of 8 trials")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    time.sleep(1)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    before = _finished(tmp_path)
    assert len(before) < 50
    third, fourth = _start(tmp_path), _start(tmp_path)
    for process in (third, fourth):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    after = _finished(tmp_path)
    assert sorted(after) == [f"trial-{number:04d}" for number in range(50)]
    assert before.items() <= after.items()
    found = tune(CONFIG, SEARCH, trials=50, out=tmp_path, **LOSS)
    assert [trial.status for trial in found.trials] == ["finished"] * 50
    for trial in found.trials:
        assert len(RunFolder(tmp_path / trial.folder).read_metrics()) == 1
        assert trial.score == pytest.approx(one_step.loss(trial.values["lr"]), rel=1e-5)
    assert found.best is not None
    assert abs(math.log10(found.best.values["lr"] / one_step.best_rate(0.01, 100.0))) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_keeps_the_trials(tmp_path: Path, number: int) -> None:
    process = _start(tmp_path)
    wait_until(lambda: len(_finished(tmp_path)) >= 3, 120, "the end of 3 trials")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "stopped; the trials so far are kept" in errors
    count = len(_finished(tmp_path))
    assert 3 <= count < 50
    assert tune(CONFIG, SEARCH, trials=count + 1, out=tmp_path, **LOSS).finished == count + 1


@pytest.mark.slow
def test_cluster_takes_the_trials_of_a_search(tmp_path: Path, one_step: OneStep) -> None:
    pytest.importorskip("ray")
    from ray_nodes import started_nodes

    with started_nodes():
        found = tune(CONFIG, SEARCH, trials=8, out=tmp_path, on="ray", **LOSS)
    assert [trial.status for trial in found.trials] == ["finished"] * 8
    for trial in found.trials:
        assert trial.score == pytest.approx(one_step.loss(trial.values["lr"]), rel=1e-5)
