"""Training by the stage kernels beside the compiled path, on a GPU: `pytest -m gpu`.

Run as a program this file is one of two processes, which train together or each alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import normfree as nf
from normfree.data import Split, image_set
from normfree.methods import get, names
from normfree.train import RunFolder
from normfree.train.engine.distributed import join_processes
from normfree.train.engine.setup import TrainSetup, prepare_training
from normfree.train.run import checkpoint
from stopped_steps import stop_at

pytestmark = pytest.mark.gpu
NORM_FREE = [name for name in names() if get(name).norm is None and "residual" in get(name).skips]
BF16 = 2.0**-8  # one step of bfloat16
PATHS = (Path(nf.__file__).parents[1], Path(__file__).parents[2] / "support")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}  # of this file as a program
BASE: dict[str, Any] = {
    "model": "resnet20",
    "batch_size": 32,
    "epochs": 2,
    "validation": 0.0,
    "crop": 4,
    "flip": True,
    "lr": 0.01,
    "schedule": "constant",
    "compile": False,
}


def noise(count: int = 160) -> Any:
    g = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=g)
    train = Split(pictures, torch.randint(0, 10, (count,), generator=g))
    return image_set("noise", tuple("0123456789"), train, Split(pictures[:20], torch.arange(20) % 10))


@contextmanager
def prepared(**settings: Any) -> Iterator[TrainSetup]:
    config = nf.TrainConfig(**{**BASE, **settings})
    device = torch.device("cuda", 0)
    with (
        join_processes(device) as processes,
        prepare_training(
            config, model=None, data=noise(), plan=None, resume=False, device=device, processes=processes
        ) as setup,
    ):
        yield setup


def first_gradient(**settings: Any) -> tuple[float, dict[str, Tensor], str]:
    """Loss and gradient of the first step, after weights that are zero at first got values."""
    with prepared(**settings) as setup:
        step = setup.step
        views = step.masters.named(step.masters.values)
        for i, name in enumerate(sorted(views)):
            view = views[name]
            view.add_(0.02 * torch.randn(view.shape, generator=torch.Generator().manual_seed(i)).to(view))
        step.masters.copy_to_model_()
        step.start_epoch(0, [1.0] * setup.steps_per_epoch)
        step()
        gradients = {name: g.double().contiguous().clone() for name, g in step.masters.gradients.items()}
        return float(step.loss_sum), gradients, setup.config.kernels


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    error = sum(float((got[name] - g).square().sum()) for name, g in expected.items())
    return (error / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


@pytest.mark.parametrize(
    ("method", "precision"), [*((m, "bf16") for m in NORM_FREE), ("fixup", "mixed"), ("nf", "mixed"), ("wn", "mixed")]
)
def test_a_step_is_as_near_to_float32_as_the_compiled_path(method: str, precision: str) -> None:
    """Both round to bf16; the kernels may be 1.5 times as far from float32 as the other path, and a few roundings."""
    loss, gradients, path = first_gradient(method=method, precision=precision)
    if path == "compiled":
        with pytest.raises(ValueError, match="kernels=stage") as error:
            first_gradient(method=method, precision=precision, kernels="stage")
        print(f"{method}: {error.value}")
        return
    compiled_loss, compiled, other = first_gradient(method=method, precision=precision, kernels="compiled")
    exact_loss, exact, _ = first_gradient(method=method, precision="float32", kernels="compiled")
    assert (path, other) == ("stage", "compiled")
    ours, theirs = distance(gradients, exact), distance(compiled, exact)
    print(
        f"{method}, {precision}: gradient {ours:.4f} by kernels, {theirs:.4f} compiled; loss {loss - exact_loss:+.1e}"
    )
    assert ours < 1.5 * theirs + 8 * BF16
    assert abs(loss - exact_loss) < 1.5 * abs(compiled_loss - exact_loss) + 8 * BF16 * exact_loss


def fit(out: Path | None = None, *, resume: bool = False, **settings: Any) -> nf.RunResult:
    return nf.fit(nf.TrainConfig(**{**BASE, "method": "fixup", **settings}), data=noise(), out=out, resume=resume)


def state(out: Path) -> dict[str, Tensor]:
    return checkpoint.load(out)[0]


@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_two_runs_give_the_same_bits(tmp_path: Path, method: str) -> None:
    for name in ("one", "two"):
        assert fit(tmp_path / name, method=method).config.kernels == "stage"
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_processes_with_the_defaults_give_the_same_bits(tmp_path: Path) -> None:
    """With `kernels`, `compile` and `graph` as they are if nothing is set: each process compiles for itself."""
    alone = [[sys.executable, __file__, str(tmp_path / name), "alone"] for name in ("one", "two")]
    started = [subprocess.Popen(command, env=ENVIRONMENT) for command in alone]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    assert RunFolder(tmp_path / "one").read_result()["config"]["kernels"] == "stage"
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_resuming_in_an_epoch_is_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        assert fit(tmp_path / "parts").status == "interrupted"
    assert fit(tmp_path / "parts", resume=True).status == "finished"
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_run_resumes_by_the_other_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    fit(tmp_path / "whole", kernels="compiled")
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        fit(tmp_path / "parts", kernels="compiled")
    assert fit(tmp_path / "parts", resume=True, kernels="stage").status == "finished"
    assert "began with kernels=compiled" in caplog.text
    assert RunFolder(tmp_path / "parts").status == "finished"
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    weights = [name for name in whole if name.startswith("model.")]
    error = sum(float((whole[name] - parts[name]).square().sum()) for name in weights)
    assert error / sum(float(whole[name].square().sum()) for name in weights) < 1e-3


def test_losses_follow_the_compiled_path() -> None:
    """Six steps of training, by the mean loss of the epochs; noise cannot be learned, so the loss stays near ln 10."""
    losses = [fit(kernels=kernels, epochs=2, lr=0.05).train_loss for kernels in ("stage", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=8 * BF16)


@pytest.mark.parametrize("settings", [{"recompute": 1}, {"accumulate": 2}, {"graph": False}, {"model": "wrn-16-2"}])
def test_settings_work_with_the_kernels(settings: dict[str, Any]) -> None:
    ours = fit(kernels="stage", **settings)
    theirs = fit(kernels="compiled", **settings)
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=8 * BF16)
    assert ours.test is not None
    assert theirs.test is not None
    assert ours.test.loss == pytest.approx(theirs.test.loss, rel=8 * BF16)


def apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    weights = {name: value.double() for name, value in expected.items() if name.startswith("model.")}
    return distance({name: got[name].double() for name in weights}, weights)


def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Two processes on one GPU, with gloo because NCCL wants a GPU for each; another seed shows what is far."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, str(tmp_path / "two")]
    started = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in (0, 1)]
    assert [process.wait(timeout=180) for process in started] == [0, 0]
    one, other = fit(tmp_path / "one", kernels="stage"), fit(tmp_path / "other", kernels="stage", seed=1)
    two = RunFolder(tmp_path / "two").read_result()
    assert two["config"]["kernels"] == "stage"
    assert two["train_loss"] == pytest.approx(one.train_loss, rel=BF16)
    assert other.status == "finished"
    states = {name: state(tmp_path / name) for name in ("one", "two", "other")}
    near, far = apart(states["two"], states["one"]), apart(states["other"], states["one"])
    print(f"weights of two processes {near:.1e} from those of one, of another seed {far:.1e}")
    assert near < BF16
    assert far > 10 * BF16


def main(out: Path, *, alone: bool) -> None:
    if alone:
        fit(out, compile=None)
        return
    dist.init_process_group("gloo")
    fit(out, kernels="stage")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), alone="alone" in sys.argv)
