"""Two processes against one: the same numbers, one writer, and a clean end when one of them fails or is killed.

Run as a program this file is one of the processes.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import normfree
from normfree.data import ImageSet
from normfree.data import load as load_images
from normfree.data.images.image_set import Split
from normfree.models import build
from normfree.nn.sync_batchnorm import SyncedBatchNorm, sync_batch_norms_
from normfree.train import RunResult, TrainConfig, fit, load, read_config
from normfree.train import data_sources as train_data
from normfree.train.engine import distributed, setup
from normfree.train.engine import loop as engine
from normfree.train.engine.distributed import Processes, join_processes
from normfree.train.engine.step import TrainStep
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder

SMALL = {"model": "resnet8", "epochs": 2, "batch_size": 32, "lr": 0.02, "device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "fixup": {"method": "fixup", "mixup": 0.2, "crop": 2, "flip": True, "clip": "agc"},
    "batchnorm": {"method": "batchnorm"},
    "parts": {"method": "batchnorm", "accumulate": 2, "mixup": 0.2, "ema": 0.9},
}
STOPPED_AT, KILLED_AT = 7, 8
FLIPPED = 0.01  # of the largest number: rounding may turn a ReLU that is close to 0 (2.4e-3 was seen, and 3e-7 without)


def small(test: int = 50) -> ImageSet:
    """A few of the embedded images: five steps of 32 an epoch after a tenth is held out."""
    whole = load_images("fashion14")
    return ImageSet(
        name="small",
        classes=whole.classes,
        train=Split(whole.train.images[:160], whole.train.labels[:160]),
        test=Split(whole.test.images[:test], whole.test.labels[:test]),
        mean=whole.mean,
        std=whole.std,
    )


def perceptron(seed: int) -> nn.Module:
    """A model that every process initializes in its own way."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


# What each of two processes does


def main(place: Path) -> None:
    """All in one job, because a process takes seconds to start; at the end the second one is killed."""
    with join_processes(torch.device("cpu")):  # every run below joins again, and is here already
        live(place)
        hang(place)
        die(place / "killed")


def live(place: Path) -> None:
    """What needs two living processes."""
    rank = int(os.environ["RANK"])
    engine.write_curves = lambda *_: None  # matplotlib takes a second
    engine._POLL_SECONDS = -1.0  # look at every step
    said: dict[str, Any] = {}

    def trained(name: str, config: dict[str, Any], **options: Any) -> RunResult:
        result = fit(TrainConfig(**{**SMALL, **config}), **{"data": small(), "out": place / name, **options})
        save_file(result.model.state_dict(), place / f"{name}-{rank}.safetensors")
        said[name] = {"status": result.status, "steps": result.steps, "test": result.test, "loss": result.train_loss}
        said[name]["plain"] = not any(isinstance(module, SyncedBatchNorm) for module in result.model.modules())
        return result

    for name, config in CASES.items():
        trained(name, config)
    model = trained("given", {"model": "given"}, model=perceptron(rank), data=small(test=1)).model
    said["alone"] = rank == 1 or bool(model.train()(torch.zeros(3, 1, 14, 14)).isfinite().all())  # the other does not

    def stop(snapshot: Any) -> None:
        if rank == 1 and snapshot.done == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    trained("stopped", CASES["parts"], progress=stop)
    dist.barrier()
    if rank == 0:
        shutil.copytree(place / "stopped", place / "stopped-copy")
    trained("resumed", CASES["parts"], out=place / "stopped", resume=True)
    said["errors"] = [
        refused({"data": "cifar10" if rank else "fashion14", "data_dir": str(place)}, data=None),
        refused({"batch_size": 33}),
        refused({"batch_size": 36, "accumulate": 4, "epochs": 1}),
        refused(CASES["fixup"], out=place / "fixup"),
        refused({"method": "fixup"}, out=place / "stopped", resume=True),
    ]
    clock = {"checkpoint_epochs": 0, "checkpoint_minutes": 0.0 if rank else 1e-9}  # the second never keeps a state
    diverged = trained("diverged", {"method": "fixup", "lr": 100.0, "warmup": 2.0, **clock})
    said["diverged"]["finite"] = all(bool(t.isfinite().all()) for t in diverged.model.state_dict().values())
    setup.sync_batch_norms_ = lambda *_: None
    trained("unsynchronized", CASES["batchnorm"], out=None)
    setup.sync_batch_norms_ = sync_batch_norms_
    (place / f"said-{rank}.json").write_text(json.dumps(said))


def refused(config: dict[str, Any], **options: Any) -> str:
    """The sentence that ends a run which cannot be."""
    try:
        fit(TrainConfig(**{**SMALL, **config}), **{"data": small(), **options})
    except ValueError as error:
        return str(error)
    return "accepted"


def hang(place: Path) -> None:
    """The second process stops to work for longer than the first one waits."""
    rank, step, calls = int(os.environ["RANK"]), TrainStep.__call__, 0
    distributed._HUNG_SECONDS, limit = 1.0, distributed._HUNG_SECONDS

    def slow(self: TrainStep) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 and rank == 1:
            time.sleep(1.5)  # compiles
        if calls == KILLED_AT and rank == 1:
            time.sleep(4.0)
        step(self)

    TrainStep.__call__ = slow  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        said = refused({"method": "fixup"}, out=place / "hung")
    except ConnectionError as error:
        said = str(error)
    finally:
        TrainStep.__call__ = step  # type: ignore[method-assign]
        distributed._HUNG_SECONDS = limit
    (place / f"hung-{rank}.json").write_text(json.dumps([said, calls, time.perf_counter() - began]))


def die(run: Path) -> None:
    """The command line on a few images; the second process is killed in the middle of an epoch."""
    from normfree import cli

    train_data.load = lambda *_: small()
    engine._POLL_SECONDS = 1000.0
    if os.environ["RANK"] == "1":
        one, steps = TrainStep.__call__, iter(range(1, KILLED_AT + 1))

        def until_killed(self: TrainStep) -> None:
            if next(steps) == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            one(self)

        TrainStep.__call__ = until_killed  # type: ignore[method-assign]
    changes = {**SMALL, **CASES["batchnorm"], "data": "fashion14"}
    cli.main(["train", "--out", str(run), *(part for k, v in changes.items() for part in ("--set", f"{k}={v}"))])


# The tests


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started as torchrun would start them, have left what they did."""
    place = tmp_path_factory.mktemp("job")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(normfree.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    environment.pop("NORMFREE_TRACEBACK", None)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(place)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [(*process.communicate(timeout=200), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert (place / "said-0.json").exists(), ends[0][1] + ends[1][1]
    (place / "ends.json").write_text(json.dumps(ends))
    return place


def test_process_that_hangs_is_noticed_and_the_run_can_be_resumed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, calls, _ = json.loads((job / "hung-0.json").read_text())
    assert "expected 2 processes to train together, but another one ended, hangs or cannot be reached" in said
    assert "start all of them again with --resume" in said
    assert calls == KILLED_AT  # the first step, in which one was as slow, was no reason
    run = RunFolder(job / "hung")
    assert run.saved_step == 5
    assert (
        fit(TrainConfig(**{**SMALL, "method": "fixup"}), data=small(), out=run.path, resume=True).status == "finished"
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


def said(job: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return tuple(json.loads((job / f"said-{rank}.json").read_text()) for rank in range(2))  # type: ignore[return-value]


def losses(run: Path) -> list[float]:
    records = RunFolder(run).read_metrics()
    return [r[name] for r in records for name in ("train_loss", "validation_loss", "validation_accuracy")]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two states, as a share of the largest number of its tensor."""
    assert a.keys() == b.keys()
    return max(
        float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-3)) for n in a if a[n].is_floating_point()
    )


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_numbers_of_one(case: str, job: Path, tmp_path: Path) -> None:
    alone = fit(TrainConfig(**{**SMALL, **CASES[case]}), data=small(), out=tmp_path / "alone")
    expected = losses(tmp_path / "alone")
    assert len(expected) == 6
    assert losses(job / case) == pytest.approx(expected, rel=1e-5)
    assert said(job)[0][case]["test"] == pytest.approx(list(alone.test or ()), rel=1e-5)
    for rank in range(2):
        assert apart(load_file(job / f"{case}-{rank}.safetensors"), alone.model.state_dict()) < FLIPPED
    states = [load_file(job / f"{case}-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert asdict(read_config(job / case)) == asdict(read_config(tmp_path / "alone"))


def test_numbers_are_others_without_synchronization(job: Path) -> None:
    """The control: the same job with a batch norm for each process."""
    with_it, without = said(job)[0]["batchnorm"]["loss"], said(job)[0]["unsynchronized"]["loss"]
    assert abs(with_it - without) > 1e-3 * with_it
    states = [load_file(job / f"{name}-0.safetensors") for name in ("batchnorm", "unsynchronized")]
    assert apart(*states) > 10 * FLIPPED


def test_processes_start_from_the_weights_of_the_first(job: Path) -> None:
    """A given model differs between the processes, and a single test image is in one process only."""
    alone = fit(TrainConfig(**{**SMALL, "model": "given"}), model=perceptron(0), data=small(test=1))
    assert said(job)[0]["given"]["test"] == pytest.approx(list(alone.test or ()), rel=1e-5)
    assert said(job)[1]["given"]["test"] == said(job)[0]["given"]["test"]
    assert apart(load_file(job / "given-1.safetensors"), alone.model.state_dict()) < 1e-5


def test_trained_model_needs_no_other_process(job: Path) -> None:
    for told in said(job):
        assert told["alone"]
        assert told["parts"]["plain"]
    model = load(job / "parts")
    state = load_file(job / "parts-0.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_signal_to_one_process_stops_all_at_the_same_step(job: Path) -> None:
    for told in said(job):
        assert (told["stopped"]["status"], told["stopped"]["steps"]) == ("interrupted", STOPPED_AT)
        assert (told["resumed"]["status"], told["resumed"]["steps"]) == ("finished", 10)


def test_resumed_processes_go_on_bit_for_bit(job: Path) -> None:
    assert losses(job / "stopped") == losses(job / "parts")
    whole, resumed = (load_file(job / f"{name}-1.safetensors") for name in ("parts", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_one_process_goes_on_with_a_run_of_two(job: Path) -> None:
    run, forgetful = job / "stopped-copy", job / "stopped-forgetful"
    shutil.copytree(run, forgetful)
    resumed = fit(read_config(run), data=small(), out=run, resume=True)
    assert resumed.status == "finished"
    assert losses(run) == pytest.approx(losses(job / "parts"), rel=1e-5)
    whole = load_file(job / "parts-0.safetensors")
    assert apart(resumed.model.state_dict(), whole) < FLIPPED
    # The control: without the optimizer's memory it goes on otherwise.
    tensors, state = checkpoint.load(forgetful)
    forgotten = {name: t.zero_() if name.startswith("memory") else t for name, t in tensors.items()}
    checkpoint.save(forgetful, forgotten, state)
    other = fit(read_config(forgetful), data=small(), out=forgetful, resume=True)
    assert losses(forgetful) != pytest.approx(losses(job / "parts"), rel=1e-4)
    assert apart(other.model.state_dict(), whole) > 5 * FLIPPED


def test_error_of_one_process_is_one_of_all(job: Path) -> None:
    first, second = said(job)
    assert first["errors"] == second["errors"]
    missing, odd, parts, taken, other = first["errors"]
    assert "cifar10" in missing
    assert "(in process 1 of 2)" in missing
    assert "2 processes" in odd
    assert "got 33" in odd
    assert "4 micro-batches" in parts
    assert "holds one" in taken
    assert "but this command gives" in other
    assert "(in process 0 of 2)" in other


def test_divergence_ends_all_processes(job: Path) -> None:
    for told in said(job):
        assert told["diverged"]["status"] == "diverged"
        assert told["diverged"]["finite"]
    assert said(job)[0]["diverged"]["steps"] == said(job)[1]["diverged"]["steps"] > 2
    one, two = (load_file(job / f"diverged-{rank}.safetensors") for rank in range(2))
    assert apart(one, two) == 0  # both have gone back to what the first kept
    start = build(
        "resnet8", "fixup", example=small().train.images[:2].float(), generator=torch.Generator().manual_seed(0)
    )
    assert apart(one, start.state_dict()) > 0


def test_killed_process_ends_the_others_in_one_sentence(job: Path) -> None:
    first, second = json.loads((job / "ends.json").read_text())
    assert second == ["", "", -signal.SIGKILL]
    output, errors, status = first
    assert (output, status) == ("", 2)
    assert errors.count("\n") == 1
    assert errors.startswith("error: expected 2 processes to train together, but another one ended")
    assert "--resume" in errors


def test_run_of_a_killed_process_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "load", lambda *_: small())
    run = job / "killed"
    assert RunFolder(run).status == "unfinished"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-5"]
    resumed = fit(read_config(run), out=run, resume=True)
    assert resumed.status == "finished"
    assert losses(run) == pytest.approx(losses(job / "batchnorm"), rel=1e-5)
    assert apart(resumed.model.state_dict(), load_file(job / "batchnorm-0.safetensors")) < FLIPPED


def test_single_process_of_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with join_processes(torch.device("cpu")) as processes:
        assert processes == Processes()
        assert not dist.is_initialized()


def test_graph_is_for_one_process() -> None:
    config = TrainConfig(graph=True)
    assert config.resolved(cuda=True).graph
    assert not config.resolved(cuda=True, world=2).graph


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job of torchrun with a checkpoint."""
    changes = {"model": "resnet8", "epochs": 500, "device": "cpu", "checkpoint_minutes": 0.005}
    settings = [part for k, v in changes.items() for part in ("--set", f"{k}={v}")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, "-m", "normfree", "train", "fashion", *settings, "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not list((tmp_path / "run").glob("checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.1)
    yield process, tmp_path / "run"
    process.kill()


def workers(run: Path) -> list[Path]:
    """The processes that have the run's folder among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(run) in (process / "cmdline").read_text():
                found.append(process)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_to_the_launcher_saves_and_leaves_no_process(number: int, launched: Any) -> None:
    process, run = launched
    assert len(workers(run)) == 3
    process.send_signal(number)
    process.communicate(timeout=200)
    end = time.monotonic() + 30
    while workers(run) and time.monotonic() < end:
        time.sleep(0.1)
    assert workers(run) == []
    result = RunFolder(run).read_result()
    assert result["status"] == "interrupted"
    assert result["signal"] == (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_processes_that_cannot_meet_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    says = r"expected 2 processes .*, but they could not meet: .*RANK expected, but not set; start them with torchrun"
    with pytest.raises(ConnectionError, match=says) as caught, join_processes(torch.device("cpu")):
        pass
    assert "\n" not in str(caught.value)
