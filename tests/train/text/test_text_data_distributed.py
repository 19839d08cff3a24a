"""Two processes against one, on tokens: the same numbers, one translation, one sentence.

Run as a program this file is one of the processes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import normfree
from normfree.data.text.prepared_folder import open_prepared
from normfree.train import RunResult, TrainConfig, fit
from normfree.train.engine import loop as engine
from normfree.train.engine.distributed import join_processes
from normfree.train.engine.step import TrainStep
from normfree.train.run.run_folder import RunFolder
from tiny_text import tiny_pairs, tiny_text

ADAM = {"optimizer": "adam", "betas": (0.9, 0.98), "weight_decay": 0.0, "lr": 1e-3, "epochs": 2, "device": "cpu"}
ADAM |= {"label_smoothing": 0.1, "schedule": "inverse_sqrt", "warmup": 4.0, "warmup_in": "steps", "ema": 0.9}
PAIRS = {**ADAM, "model": "transformer-1-1-16-32-2", "batch_size": 67, "beam": 2}  # which two do not share evenly
TEXT = {**ADAM, "model": "decoder-2-16-32-2", "batch_size": 6, "block": 16}
CASES: dict[str, dict[str, Any]] = {
    "fixup": {**PAIRS, "method": "fixup"},
    "layernorm": {**PAIRS, "method": "layernorm", "clip": "norm", "clip_at": 0.5},
    "text": {**TEXT, "method": "fixup"},
}
STOPPED_AT = 5


def fitted(place: Path, case: str, out: Path, **options: Any) -> RunResult:
    """Train a case on what was prepared in `place`."""
    data = open_prepared(place / ("text/text" if case == "text" else "pairs/pairs"))
    return fit(TrainConfig(**CASES[case]), data=data, out=out, **options)


# What each of two processes does


def main(place: Path) -> None:
    """All in one job, because a process takes seconds to start."""
    rank = int(os.environ["RANK"])
    engine.write_curves = lambda *_: None
    said: dict[str, Any] = {}

    def tell(name: str, result: RunResult) -> None:
        save_file({n: p.detach() for n, p in result.model.named_parameters()}, place / f"{name}-{rank}.safetensors")
        said[name] = {"status": result.status, "test": result.test, "bleu": result.bleu, "steps": result.steps}

    with join_processes(torch.device("cpu")):
        for case in CASES:
            tell(case, fitted(place, case, place / case))
        one, calls = TrainStep.__call__, 0

        def stopping(self: TrainStep) -> None:
            nonlocal calls
            calls += 1
            if calls == STOPPED_AT and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            one(self)

        TrainStep.__call__ = stopping  # type: ignore[method-assign]
        tell("stopped", fitted(place, "fixup", place / "stopped"))
        TrainStep.__call__ = one  # type: ignore[method-assign]
        tell("resumed", fitted(place, "fixup", place / "stopped", resume=True))
        said["errors"] = []
        for changes in ({"batch_size": 12}, {"accumulate": 67}, {"model": "resnet8"}):
            try:
                data = open_prepared(place / "pairs/pairs")
                fit(TrainConfig(**{**CASES["fixup"], **changes}), data=data)
            except ValueError as error:
                said["errors"].append(str(error))
    (place / f"said-{rank}.json").write_text(json.dumps(said))


# The tests


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started as torchrun would start them, have left what they did."""
    place = tmp_path_factory.mktemp("job")
    tiny_pairs(place / "pairs")
    tiny_text(place / "text")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = (Path(normfree.__file__).parents[1], Path(__file__).parents[2] / "support")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(place)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all((place / f"said-{rank}.json").exists() for rank in range(2)), errors[0] + errors[1]
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


def said(job: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / f"said-{rank}.json").read_text())
    return found


def numbers(run: Path) -> list[float]:
    told = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
    return [record[name] for record in RunFolder(run).read_metrics() for name in told if name in record]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_numbers_of_one(case: str, job: Path, tmp_path: Path) -> None:
    alone = fitted(job, case, tmp_path)
    assert len(numbers(tmp_path)) == (4 if case == "text" else 8)
    assert numbers(job / case) == pytest.approx(numbers(tmp_path), rel=1e-6)
    assert said(job)[case]["test"] == pytest.approx(list(alone.test or ()), rel=1e-6)
    assert said(job, 1)[case]["test"] == said(job)[case]["test"]
    states = [load_file(job / f"{case}-{rank}.safetensors") for rank in range(2)]
    for name, tensor in alone.model.named_parameters():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], tensor.detach(), rtol=1e-4, atol=1e-5)


def test_first_process_translates_for_all(job: Path, tmp_path: Path) -> None:
    alone = fitted(job, "fixup", tmp_path)
    assert alone.bleu
    assert said(job)["fixup"]["bleu"] == list(alone.bleu)
    assert said(job, 1)["fixup"]["bleu"] is None
    assert RunFolder(job / "fixup").read_result()["bleu"] == alone.bleu._asdict()
    assert (job / "fixup" / "translations.txt").read_bytes() == (tmp_path / "translations.txt").read_bytes()


def test_signal_to_one_process_stops_all_and_they_go_on_bit_for_bit(job: Path) -> None:
    for rank in range(2):
        told = said(job, rank)
        assert (told["stopped"]["status"], told["stopped"]["steps"]) == ("interrupted", STOPPED_AT)
        assert told["resumed"]["status"] == "finished"
        whole, resumed = (load_file(job / f"{name}-{rank}.safetensors") for name in ("fixup", "resumed"))
        assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert numbers(job / "stopped") == numbers(job / "fixup")


def test_error_is_one_of_all_processes(job: Path) -> None:
    assert said(job)["errors"] == said(job, 1)["errors"]
    room, parts, kind = said(job)["errors"]
    assert "room for the longest sentence of 11 tokens for each of 2 ranks" in room
    assert "expected accumulate=1 for tokens" in parts
    assert "expected a model 'transformer-…'" in kind


if __name__ == "__main__":
    main(Path(sys.argv[1]))
