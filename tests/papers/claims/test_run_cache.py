"""The training runs behind claims: made once, kept whole, gone on with after any end.

As a script it is a process of `forked_runs` that knows a claim that trains.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import normfree
from forked_runs import Runs, _serve
from made_up_runs import reproduce
from normfree.comparison.compare_runs import RunTask, train_run
from normfree.report.panels import Curve, Panel
from normfree.storage.writing import TEMPORARY
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train import data_sources as train_data
from normfree.train.config import folder_name
from normfree.train.engine.step import TrainStep
from normfree.train.run.run_folder import RunFolder as Folder
from normfree_papers.claims import run_training as place
from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Settings
from normfree_papers.claims.registry import register
from normfree_papers.claims.run_cache import RunCache, StoppedError
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from tiny_images import tiny_images

BASE = TrainConfig(model="resmlp-2-8", epochs=2, batch_size=24, lr=0.01)
# What may differ between two makings.
TIMES = {"seconds", "setup_seconds", "images_per_second", "date", "commit", "files", "sha256"}
FILES = ["config.toml", "metrics.jsonl", "result.json"]


def wanted(epochs: int = 2) -> dict[str, TrainConfig]:
    return {
        f"{m}, seed {s}": BASE.with_changes(method=m, seed=s, epochs=epochs) for m in ("fixup", "he_in") for s in (1,)
    }


def measure(settings: Settings) -> Measurement:
    """The accuracy of two runs, long enough to be stopped in."""
    found = {name: run for name, run in settings.train(wanted(12)).items() if run is not None}
    curves = tuple(Curve(name, tuple(m["train_loss"] for m in run.metrics)) for name, run in found.items())
    values = {name.split(",")[0]: run.accuracy(0.1) for name, run in found.items()}
    return Measurement(values=values, panels=(Panel("loss", curves),) if curves else ())


CLAIM = Claim(
    id="fixup/trained",
    where="Nowhere",
    statement="Both train.",
    paper_value="",
    how="By training.",
    cost=Cost(quick_seconds=1, full_seconds=1),
    checks=tuple(Check(name=n, statement=f"{n} trains", low=0.0, why="made up") for n in ("fixup", "he_in")),
    measure=measure,
    needs_training=True,
    seeds=1,
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "load", lambda name, root: tiny_images())


def made(folder: Path, **options: Any) -> RunCache:
    return RunCache(folder / "kept", folder / "work", **options)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def timeless(value: Any) -> Any:
    """Data without the values that depend on time."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def kept_numbers(kept: Path) -> dict[str, Any]:
    """All that is kept of runs, but for times."""
    found: dict[str, Any] = {}
    for folder in sorted(kept.iterdir()):
        run = RunFolder(folder)
        assert names(folder) == FILES
        found[folder.name] = timeless([run.read_result(), run.read_metrics()]), run.config_path.read_text()
    return found


# In one process


def test_kept_run_is_not_trained_again(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    told: list[tuple[int, int, str]] = []
    found = made(tmp_path, progress=lambda *now: told.append(now))(wanted())
    assert len(fitted) == 2
    assert list(dict.fromkeys(now[:2] for now in told)) == [(0, 2), (1, 2), (2, 2)]
    assert told[-1][2] == "he_in, seed 1"
    for name, run in found.items():
        assert run is not None
        alone = fit(wanted()[name])
        assert alone.test
        assert run.accuracy(0.1) == alone.test.accuracy
        assert [m["epoch"] for m in run.metrics] == [1, 2]
    again = made(tmp_path)
    assert again(wanted()) == found
    shutil.rmtree(tmp_path / "work")
    assert made(tmp_path)(wanted()) == found
    assert len(fitted) == 2
    assert (again.missing, list(again.asked)) == ({}, list(wanted()))


def test_run_that_ended_and_was_not_kept_is_copied(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    first = made(tmp_path)(wanted())
    shutil.rmtree(tmp_path / "kept")
    assert made(tmp_path)(wanted()) == first
    assert len(fitted) == 2


def test_two_names_of_one_run_train_it_once(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    found = made(tmp_path)({"one": BASE, "the same": BASE})
    assert found["one"] == found["the same"] is not None
    assert len(fitted) == 1


def test_one_name_of_two_runs_is_refused(tmp_path: Path) -> None:
    cache = made(tmp_path, only=())
    cache({"one": BASE})
    cache({"one": BASE})
    with pytest.raises(ValueError, match="expected one run of the name 'one', got two that differ"):
        cache({"one": BASE.with_changes(seed=9)})


def test_only_trains_what_it_names(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    nothing = made(tmp_path, only=())
    assert nothing(wanted()) == dict.fromkeys(wanted())
    assert list(nothing.missing) == list(wanted())
    assert not (tmp_path / "kept").exists()
    some = made(tmp_path, only=["fix"])
    found = some(wanted())
    assert [name for name, run in found.items() if run] == ["fixup, seed 1"]
    assert list(some.missing) == ["he_in, seed 1"]
    assert len(fitted) == 1
    assert made(tmp_path, only=())(wanted()) == found  # what is kept is read


def test_whole_name_means_no_longer_one(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    runs = {f"seed {seed}": BASE.with_changes(seed=seed) for seed in (1, 10)}
    found = made(tmp_path, only=["seed 1"])(runs)
    assert [run is not None for run in found.values()] == [True, False]


def test_diverged_run_is_kept_and_counts_as_chance(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    wild = {"wild": BASE.with_changes(lr=1e30, method="he_in")}
    (run,) = made(tmp_path)(wild).values()
    assert run is not None
    assert (run.diverged, run.accuracy(0.1), list(run.metrics)) == (True, 0.1, [])  # in its first epoch
    assert names(tmp_path / "kept" / folder_name(wild["wild"])) == FILES
    assert made(tmp_path)(wild)["wild"] == run
    assert len(fitted) == 1


def test_accuracy_of_a_finished_run_is_its_own() -> None:
    assert EndedRun({"status": "finished", "test": {"accuracy": 0.75}}, []).accuracy(0.1) == 0.75


def test_kept_files_name_no_folder(tmp_path: Path) -> None:
    secret = tmp_path / "my" / "data"
    for data in (secret, Path("../elsewhere")):
        made(tmp_path, data=data, device="cpu")({"one": BASE})
        (folder,) = (tmp_path / "kept").iterdir()
        assert names(folder) == FILES
        for file in FILES:
            text = (folder / file).read_text()
            for word in (str(tmp_path), "my/data", "elsewhere", str(Path.home()), str(Path.cwd()), os.uname().nodename):
                assert word not in text
        assert TrainConfig.from_toml(folder / "config.toml").data_dir == ".data"
        assert json.loads((folder / "result.json").read_text())["config"]["data_dir"] == ".data"
        shutil.rmtree(tmp_path / "kept")


def test_kept_configuration_makes_the_run_again(tmp_path: Path) -> None:
    (run,) = made(tmp_path)({"one": BASE}).values()
    assert run is not None
    (file,) = (tmp_path / "kept").glob("*/config.toml")
    again = fit(TrainConfig.from_toml(file))
    assert again.test
    assert again.test.accuracy == run.accuracy(0.1)


def test_error_of_a_run_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'fixup'"):
        made(tmp_path)({"good": BASE, "bad": BASE.with_changes(method="fixupp")})
    assert [f.name for f in (tmp_path / "kept").iterdir()] == [folder_name(BASE)]


@pytest.mark.parametrize(("owner", "name"), [(Folder, "write_result"), (place, "keep")])
def test_signal_at_the_end_of_a_run_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    original = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        original(*args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(StoppedError) as caught:
        made(tmp_path)(wanted())
    assert caught.value.signal == signal.SIGINT
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_signal_in_a_run_stops_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: list[TrainConfig]
) -> None:
    whole = made(tmp_path / "whole")(wanted())
    count = len(fitted)
    step, calls = TrainStep.__call__, 0

    def stopping(self: TrainStep) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the second epoch of the first run
            os.kill(os.getpid(), signal.SIGTERM)
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", stopping)
        with pytest.raises(StoppedError) as caught:
            made(tmp_path / "parts")(wanted())
    assert caught.value.signal == signal.SIGTERM
    assert not (tmp_path / "parts" / "kept").exists()
    (folder,) = (tmp_path / "parts" / "work").iterdir()
    assert Folder(folder).status == "interrupted"
    found = made(tmp_path / "parts")(wanted())
    assert len(fitted) == count + 3
    assert kept_numbers(tmp_path / "parts" / "kept") == kept_numbers(tmp_path / "whole" / "kept")
    assert timeless([r.metrics for r in found.values() if r]) == timeless([r.metrics for r in whole.values() if r])


@pytest.mark.slow
def test_signal_stops_all_processes(tmp_path: Path) -> None:
    long = {name: config.with_changes(epochs=20_000, lr=1e-4) for name, config in wanted().items()}

    def send() -> None:
        for _ in range(1200):
            if len(list(tmp_path.glob("work/*/config.toml"))) == 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    with pytest.raises(StoppedError):
        made(tmp_path, jobs=2)(long)
    assert {Folder(folder).status for folder in (tmp_path / "work").iterdir()} == {"interrupted"}
    assert not (tmp_path / "kept").exists()


def test_copy_that_fails_is_one_sentence_and_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(place, "write_sealed_json", full)
        with pytest.raises(OSError, match=r"could not write the run '.*': No space left .*; free some room"):
            made(tmp_path)({"one": BASE})
    assert made(tmp_path, only=())({"one": BASE}) == {"one": None}
    assert made(tmp_path)({"one": BASE})["one"] is not None


def test_train_reads_what_has_ended(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    task = RunTask(BASE, tmp_path / folder_name(BASE))
    first = train_run(task, print)
    assert train_run(task, print)["test"] == first["test"]
    assert len(fitted) == 1


@pytest.mark.parametrize(
    ("model", "method"), [("wrn-202-1", "fixup"), ("resnet200", "fixup"), ("mlp-170-16", "wn"), ("cnn-170-8", "wn")]
)
def test_size_of_a_deep_network_follows_from_shallow_ones(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extrapolated = place._size.__wrapped__(model, method, None)
    monkeypatch.setattr(place, "_DEEP", 1000)
    assert extrapolated == pytest.approx(place._size.__wrapped__(model, method, None), rel=1e-12)


def test_seconds_grow_with_depth_epochs_and_images() -> None:
    base = TrainConfig(model="wrn-40-1", data="cifar10", epochs=10, validation=0.0)
    set_up = gpu_seconds(base.with_changes(epochs=0))
    assert gpu_seconds(base.with_changes(epochs=20)) - set_up == pytest.approx(2 * (gpu_seconds(base) - set_up))
    deep = gpu_seconds(base.with_changes(model="wrn-10000-1"))
    assert deep - set_up > 20 * (gpu_seconds(base) - set_up)
    assert gpu_seconds(base.with_changes(data="mnist")) > gpu_seconds(base)
    assert gpu_seconds(base.with_changes(model="torchvision:resnet18")) == gpu_seconds(
        base.with_changes(method="batchnorm", epochs=0)
    )


@pytest.mark.parametrize(
    ("method", "batch", "speed"),  # images per second of docs/benchmarks.md
    [
        ("fixup", 32, 37_886),
        ("fixup", 512, 151_814),
        ("nf", 128, 83_484),
        ("batchnorm", 32, 7_490),
        ("batchnorm", 128, 15_276),
        ("batchnorm", 512, 27_514),
    ],
)
def test_seconds_are_those_that_were_measured_within_a_third(method: str, batch: int, speed: int) -> None:
    config = TrainConfig(model="resnet110", method=method, data="cifar10", batch_size=batch, validation=0.0)
    seconds = gpu_seconds(config.with_changes(epochs=300)) - gpu_seconds(config.with_changes(epochs=0))
    assert seconds == pytest.approx(300 * 50_000 / speed, rel=1 / 3)


@pytest.mark.parametrize("change", [{"precision": "float32"}, {"kernels": "compiled"}, {"method": "batchnorm"}])
def test_seconds_grow_without_the_stage_kernels(change: dict[str, Any]) -> None:
    config = TrainConfig(model="resnet110", method="fixup", data="cifar10", epochs=100)
    assert gpu_seconds(config.with_changes(**change)) > 3 * gpu_seconds(config)


# A result for which runs are missing


def test_result_without_its_runs_is_measured_again_and_stays_when_nothing_came(make: Any, tmp_path: Path) -> None:
    fields = {name: getattr(CLAIM, name) for name in ("id", "checks", "seeds")}
    make(**fields, measure=lambda s: measure_short(s))
    result, judgement = reproduce(CLAIM.id, Settings(runs=made(tmp_path, only=())), tmp_path)
    assert (judgement.status, result["values"], result["panels"]) == ("not run", {}, [])
    assert {name: set(run) for name, run in result["runs"].items()} == {name: {"gpu_seconds"} for name in wanted()}
    path = tmp_path / "fixup" / "trained.json"
    assert not path.exists()
    result, judgement = reproduce(CLAIM.id, Settings(runs=made(tmp_path, only=["fixup"])), tmp_path)
    assert [row.verdict for row in judgement.rows] == ["undecided", "missing"]
    assert result["runs"]["fixup, seed 1"] == {"folder": folder_name(wanted()["fixup, seed 1"]), "method": "fixup"}
    before = path.read_bytes()
    os.utime(path, (1, 1))
    reproduce(CLAIM.id, Settings(runs=made(tmp_path, only=())), tmp_path)
    assert (path.read_bytes(), path.stat().st_mtime) == (before, 1.0)  # not even the date
    result, judgement = reproduce(CLAIM.id, Settings(runs=made(tmp_path)), tmp_path)
    assert judgement.status == "undecided"


def measure_short(settings: Settings) -> Measurement:
    found = {name: run for name, run in settings.train(wanted()).items() if run is not None}
    return Measurement(values={name.split(",")[0]: run.accuracy(0.1) for name, run in found.items()})


# Real processes, killed


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the processes run in."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def processes(home: Path) -> Iterator[Runs]:
    """As `forked_runs`, with a claim that trains."""
    here = Path(__file__)
    paths = (str(Path(normfree.__file__).parents[1]), str(here.parents[2] / "support"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(here)], env=environment, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        yield Runs(server)
        server.stdin.close()


def ledger(out: Path) -> Any:
    """All that a reproduction leaves, but for times: the claim's result and the runs."""
    result = json.loads((out / "fixup" / "trained.json").read_text())
    assert (out / "fixup" / "trained.png").stat().st_size > 1000
    assert not [name for name in names(out / "runs") if TEMPORARY in name]
    return timeless(result), kept_numbers(out / "runs")


@pytest.fixture(scope="module")
def uninterrupted(processes: Runs, home: Path) -> Any:
    processes.start("reproduce", CLAIM.id, "--device", "cpu", "--out", "whole", "--jobs", "1", prints=home / "prints")
    assert processes.wait() == 0, (home / "prints").read_text()
    shutil.rmtree(home / "runs")  # so that others train themselves
    return ledger(home / "whole")


def go_on(processes: Runs, home: Path, out: Path) -> Any:
    processes.start("reproduce", CLAIM.id, "--device", "cpu", "--out", str(out), "--jobs", "1", prints=home / "prints")
    assert processes.wait() == 0, (home / "prints").read_text()
    shutil.rmtree(home / "runs")
    return ledger(out)


@pytest.mark.faults
def test_reproduction_stopped_while_training_ends_alike(processes: Runs, home: Path, uninterrupted: Any) -> None:
    out = home / "stopped"
    for run in range(2):
        process = processes.start(
            "reproduce", CLAIM.id, "--device", "cpu", "--out", str(out), "--jobs", "1", prints=home / "said"
        )
        deadline = time.monotonic() + 60
        while len(list(home.glob("runs/claims/*/metrics.jsonl"))) <= run and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process, signal.SIGTERM)
        assert processes.wait() == 128 + signal.SIGTERM, (home / "said").read_text()
        assert "stopped; the runs so far are kept; run the same command to continue" in (home / "said").read_text()
        assert not (out / "fixup").exists()
        kept = list((out / "runs").iterdir()) if (out / "runs").exists() else []
        assert len(kept) <= run
    assert go_on(processes, home, out) == uninterrupted


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("normfree_papers.claims.run_training:write_sealed_text", 1),  # nothing is kept yet
        ("normfree_papers.claims.run_training:atomic_path", 1),  # the configuration is there
        ("normfree_papers.claims.run_training:write_sealed_json", 1),  # the first run is whole
        ("normfree_papers.claims.reproduction:run", 1),  # all is measured, and nothing written
        ("normfree_papers.claims.reproduction:write_sealed_json", 1),  # the picture is missing
    ],
)
@pytest.mark.faults
def test_reproduction_killed_while_it_keeps_ends_alike(
    processes: Runs, home: Path, uninterrupted: Any, tmp_path: Path, function: str, call: int
) -> None:
    out = tmp_path / "out"
    processes.start(
        "reproduce",
        CLAIM.id,
        "--device",
        "cpu",
        "--out",
        str(out),
        "--jobs",
        "1",
        prints=home / "prints",
        die=(function, call),
    )
    assert processes.wait() == -signal.SIGKILL, (home / "prints").read_text()
    for folder in (out / "runs").iterdir():  # whole, or none
        if (folder / "result.json").exists():
            assert set(FILES) <= set(names(folder))
            assert RunFolder(folder).status == "finished"
        else:
            assert RunCache(out / "runs", tmp_path, only=())(wanted(12)).popitem()[1] is None
    assert go_on(processes, home, out) == uninterrupted


if __name__ == "__main__":
    import matplotlib.pyplot  # noqa: F401  (once, not in every fork)

    register(CLAIM)
    _serve()


def test_full_scale_is_not_trained_unless_asked_for(home: Path, processes: Runs) -> None:
    """Whoever only looks at a claim does not start hours of training."""
    processes.start("reproduce", CLAIM.id, "--out", "looked", "--jobs", "1", prints=home / "prints")
    assert processes.wait() == 0, (home / "prints").read_text()
    said = (home / "prints").read_text()
    assert "training runs are missing" in said
    assert "--device cuda" in said
    assert not (home / "looked" / "runs").exists()
