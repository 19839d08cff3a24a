"""`fit`: what it trains equals a plain loop, at the edges of its settings too, and it leaves nothing behind."""

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.data.images.image_set import ImageBatches, Split, image_set, in_order
from normfree.train import RunFolder, RunResult, Snapshot
from normfree.train.data_sources import augmentation_of, image_sums
from normfree.train.engine import loop as engine
from normfree.train.engine.setup import score
from normfree.train.engine.step import TrainStep
from normfree.train.run import checkpoint
from normfree.train.run.run_records import Score
from tiny_images import tiny_images

SMALL = {"model": "cnn-4-8", "method": "he_in", "epochs": 2, "batch_size": 16, "workers": 0}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)  # it takes longer than a run here


def fit(
    *,
    data: Any = None,
    net: nn.Module | None = None,
    out: Path | None = None,
    progress: Callable[[Snapshot], None] | None = None,
    **changes: Any,
) -> RunResult:
    config = nf.TrainConfig(**{**SMALL, **changes})
    return nf.fit(config, data=tiny_images() if data is None else data, model=net, out=out, progress=progress)


def weights(result: RunResult) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def example(count: int = 64) -> Tensor:
    data = tiny_images()
    return next(in_order(data.train, batch_size=count, mean=data.mean, std=data.std))[0]


def tiny_net() -> nn.Module:
    """A model from elsewhere, with statistics and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(576, 10)
    )


# What is computed


@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
def test_fit_equals_a_plain_loop(method: str) -> None:
    config = nf.TrainConfig(
        model="resnet8", method=method, epochs=2, batch_size=16, warmup=0.5, crop=2, flip=True, validation=0.0, seed=3
    )
    data = tiny_images()
    result = nf.fit(config, data=data)
    generator = torch.Generator().manual_seed(3)
    model = nf.build("resnet8", method, num_classes=10, example=example(), generator=generator).train()
    optimizer = torch.optim.SGD(nf.param_groups(model, lr=0.1, weight_decay=5e-4), lr=0.1, momentum=0.9)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = ImageBatches(
        data.train, batch_size=16, mean=data.mean, std=data.std, augmentation=augmentation_of(config), seed=3
    )
    for step in range(10):
        batches.start_epoch(step // 5)
        batch = batches.batch(torch.tensor(step % 5))
        factor = config.lr_schedule.factor(step, 5, 2)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=2e-4, atol=2e-6)
    assert result.steps == 10


def test_score_is_that_of_the_model_that_is_returned() -> None:
    data = tiny_images()
    for changes in ({"method": "batchnorm", "model": "resnet8"}, {"ema": 0.8}, {"channels_last": True}):
        result = fit(**changes)
        again = score(result.model, in_order(data.test, batch_size=1000, mean=data.mean, std=data.std), image_sums)
        assert again == result.test
        assert not any(module.training for module in result.model.modules())


def test_model_has_storages_of_its_own_in_float32() -> None:
    for precision in ("float32", "bf16", "mixed"):
        model = fit(model="resnet8", method="batchnorm", precision=precision, epochs=1).model
        parameters = list(model.parameters())
        assert {p.dtype for p in parameters} == {torch.float32}
        assert {b.dtype for b in model.buffers()} <= {torch.float32, torch.int64}
        assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in parameters)
        assert all(p.grad is None and p.requires_grad for p in parameters)
        assert model(example(2)).dtype == torch.float32


def test_average_is_what_is_scored_and_kept(tmp_path: Path) -> None:
    result = fit(ema=0.9, out=tmp_path)
    saved = checkpoint.load(tmp_path)[0]
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, saved[f"average.{name}"])
        assert not torch.equal(parameter, saved[f"model.{name}"])


def test_accumulated_micro_batches_equal_the_batch() -> None:
    one = fit(model="resnet8", method="fixup", mixup=0.4, label_smoothing=0.1)
    two = fit(model="resnet8", method="fixup", mixup=0.4, label_smoothing=0.1, accumulate=2)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-4, atol=1e-6)
    assert two.train_loss == pytest.approx(one.train_loss, rel=1e-5)


@pytest.mark.parametrize("method", ["fixup", "he_in", "batchnorm", "selu:dropout=0.2"])
def test_recomputed_segments_train_the_same(method: str) -> None:
    one, two = (fit(model="resnet8", method=method, recompute=recompute) for recompute in (0, 2))
    assert equal(weights(one), weights(two))


@pytest.mark.parametrize("precision", ["float32", "bf16", "mixed"])
@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
def test_every_precision_learns(precision: str, method: str) -> None:
    losses: list[float] = []
    result = fit(
        model="resnet8", method=method, precision=precision, epochs=4, lr=0.05, data=tiny_images(40), validation=0.0
    )
    first = fit(model="resnet8", method=method, precision=precision, epochs=1, lr=0.05, data=tiny_images(40))
    losses = [first.train_loss or 0.0, result.train_loss or 0.0]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01},
        {"momentum": 0.0},
        {"nesterov": True},
        {"clip": "agc", "clip_at": 0.05},
        {"clip": "norm", "clip_at": 1.0},
        {"label_smoothing": 0.1},
        *({"schedule": s} for s in ("constant", "step", "cosine", "inverse_sqrt", "linear")),
        {"cosine_by": "epoch", "warmup": 1.0, "warmup_shape": "quadratic"},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_every_setting_learns(changes: dict[str, Any], tmp_path: Path) -> None:
    result = fit(**{"epochs": 6, "validation": 0.0, "lr": 0.05, "out": tmp_path, **changes})
    losses = [record["train_loss"] for record in RunFolder(tmp_path).read_metrics()]
    assert result.status == "finished"
    assert losses[-1] < losses[0]
    assert losses[-1] == result.train_loss


def test_same_seed_same_run_and_another_seed_another() -> None:
    one, two, other = (fit(seed=seed, epochs=1) for seed in (5, 5, 6))
    assert equal(weights(one), weights(two))
    assert one.test == two.test
    assert not equal(weights(one), weights(other))


# Edges


def test_one_image_and_a_batch_larger_than_the_data() -> None:
    result = fit(data=tiny_images(1, 1), batch_size=8, epochs=20, lr=0.05)
    assert (result.status, result.steps, result.validation) == ("finished", 20, None)
    assert result.train_accuracy == 1.0
    for method in ("batchnorm", "lsuv", "wn_data"):
        assert fit(data=tiny_images(1, 1), method=method, model="resnet8", epochs=1).status == "finished"


def test_zero_epochs_score_the_initial_model(tmp_path: Path) -> None:
    result = fit(epochs=0, out=tmp_path)
    built = nf.build("cnn-4-8", "he_in", num_classes=10, example=example(), generator=torch.Generator().manual_seed(0))
    assert equal(weights(result), dict(built.state_dict()))
    assert (result.status, result.steps, result.epochs, result.train_loss) == ("finished", 0, 0.0, None)
    assert result.test is not None
    assert equal(weights(result), dict(nf.load(tmp_path).state_dict()))
    assert nf.fit(result.config, data=tiny_images(), out=tmp_path, resume=True).status == "finished"


def test_validation_is_held_out_and_may_be_nothing() -> None:
    assert fit(epochs=1).steps == 5  # 72 of 80 images in batches of 16
    assert fit(epochs=1, validation=0.5).steps == 3
    result = fit(epochs=1, validation=0.0)
    assert result.validation is None
    with pytest.raises(ValueError, match="leave at least one to train on"):
        fit(validation=0.999)


def test_one_class_trains() -> None:
    split = tiny_images().train
    alone = Split(split.images[:8], torch.zeros(8, dtype=torch.int64))
    result = fit(data=image_set("alone", ("only",), alone, alone), epochs=1)
    assert result.test == (0.0, 1.0)


@pytest.mark.parametrize(
    ("labels", "test", "says"),
    [
        ([0, 1, 2], 3, "expected training labels of 0 to 1 for the 2 classes of 'mine', got 0 to 2"),
        ([0, 1, -1], 3, "got -1 to 1"),
        ([0, 1, 1], 0, "expected test images in 'mine', found none"),
        ([], 3, "expected training images in 'mine', found none"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_at_once(labels: list[int], test: int, says: str) -> None:
    def split(numbers: list[int]) -> Split:
        return Split(torch.zeros(len(numbers), 1, 14, 14, dtype=torch.uint8), torch.tensor(numbers, dtype=torch.int64))

    with pytest.raises(ValueError, match=says):
        fit(data=image_set("mine", ("a", "b"), split(labels), split([0] * test)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"graph": True}, "expected a GPU for graph=true, got device 'cpu'"),
        ({"device": "meta"}, "expected a device such as cpu or cuda, got 'meta'"),
        ({"device": "toaster"}, "expected a device such as cpu or cuda, got 'toaster'"),
        ({"model": "resnet9"}, "expects a depth"),
        ({"method": "fixupp"}, "fixup"),
        ({"tensorboard": True}, r"pip install '\.\[tracking\]'"),
        ({"dropout": 0.1}, r"setting dropout=0\.1 has no effect on images; leave it out"),
        ({"beam": 3}, "setting beam=3 has no effect on images"),
        (
            {"model": "torchvision:resnet18", "method": "as built", "form": "pre"},
            "setting form=pre has no effect on a third-party model; leave it out",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=says) as caught:
        fit(out=tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)
    assert RunFolder(tmp_path / "run").status is None  # so that the folder can be used


# Models and data of one's own


def test_own_model_is_trained_in_place_and_named(tmp_path: Path) -> None:
    model = tiny_net()
    before = model[0].weight.detach().clone()
    result = fit(net=model, out=tmp_path)
    assert result.model is model
    assert not torch.equal(model[0].weight, before)
    assert (result.config.model, result.config.data) == ("torch.nn.modules.container:Sequential", "tiny")
    with pytest.raises(ValueError, match=r"expected the model of the run .* pass model="):
        nf.load(tmp_path, trust=True)
    assert equal(weights(result), dict(nf.load(tmp_path, model=tiny_net()).state_dict()))


def test_own_model_of_ours_is_named_with_its_method(tmp_path: Path) -> None:
    model = nf.build("resnet8", "rezero", num_classes=10, example=example(2))
    result = fit(net=model, out=tmp_path, epochs=1)
    assert (result.config.model, result.config.method) == ("resnet8", "rezero")
    assert equal(weights(result), dict(nf.load(tmp_path).state_dict()))


def test_factory_by_name_is_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets_of_the_engine.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(196, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    config = nf.TrainConfig(**{**SMALL, "model": "my_nets_of_the_engine:make"})
    one = nf.fit(config, data=tiny_images(), out=tmp_path / "run")
    torch.rand(3)
    two = nf.fit(config, data=tiny_images())
    other = nf.fit(config.with_changes(seed=1), data=tiny_images())
    assert equal(weights(one), weights(two))
    assert not equal(weights(one), weights(other))
    assert equal(weights(one), dict(nf.load(tmp_path / "run", trust=True).state_dict()))


def test_frozen_parameters_stay_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(14, 14)
            self.twin = nn.Linear(14, 14)
            self.twin.weight = self.inner.weight
            self.last = nn.Linear(196, 10)
            self.register_buffer("scale", torch.tensor([2.0]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.scale * self.twin(self.inner(x))).flatten(1))

    model = Tied()
    model.last.bias.requires_grad_(False)
    bias = model.last.bias.detach().clone()
    fit(net=model, out=tmp_path, weight_decay=0.1)
    assert torch.equal(model.last.bias, bias)
    assert model.twin.weight is model.inner.weight
    loaded = nf.load(tmp_path, model=Tied())
    assert equal(dict(model.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(196, 5)), r"a score for each of 10 classes, got \(2, 5\) from 2 images"),
        (nn.Conv2d(3, 10, 3), r"images of \(1, 14, 14\).*Conv2d failed: .*channels"),
        (nn.Conv2d(1, 10, 3), r"got \(2, 10, 12, 12\)"),
        (nn.Linear(14, 10).double(), "Linear failed"),
    ],
)
def test_model_that_does_not_fit_the_data_is_refused_at_once(model: nn.Module, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        fit(net=model)
    assert "\n" not in str(caught.value)


def test_model_without_a_linear_classifier_trains() -> None:
    model = nn.Sequential(nn.Conv2d(1, 10, 14), nn.Flatten())
    assert fit(net=model, epochs=1).status == "finished"
    with pytest.raises(ValueError, match="classifier"):
        fit(net=model, epochs=1, clip="agc")


@pytest.mark.parametrize("method", ["lsuv", "wn_data"])
def test_methods_that_look_at_data_see_the_training_images(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    built = nf.build("resnet8", method, num_classes=10, example=example(), generator=generator)
    result = nf.fit(nf.TrainConfig(model="resnet8", method=method, epochs=0), data=tiny_images())
    assert equal(weights(result), dict(built.state_dict()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image folder of two classes, dark and bright; images are brought to 16 × 16."""
    from PIL import Image

    monkeypatch.setattr("normfree.train.data_sources.FOLDER_SIZE", 16)
    draws = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for label, level in (("bright", 160), ("dark", 0)):
            place = tmp_path / "images" / part / label
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(level, level + 90, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return f"folder:{tmp_path / 'images'}"


def test_image_folder_trains_scores_and_resumes(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = nf.TrainConfig(
        **{
            **SMALL,
            "method": "batchnorm",
            "data": folder,
            "validation": 0.2,
            "workers": 2,
            "batch_size": 4,
            "epochs": 3,
        },
        flip=True,
        mixup=0.2,
    )
    whole = nf.fit(config, out=tmp_path / "one")
    assert (whole.status, whole.steps) == ("finished", 12)
    assert whole.test is not None
    assert whole.test.accuracy == 1.0
    assert not multiprocessing.active_children()
    with monkeypatch.context() as patch:
        original, calls = TrainStep.__call__, 0

        def step(self: TrainStep) -> None:
            nonlocal calls
            calls += 1
            if calls == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self)

        patch.setattr(TrainStep, "__call__", step)
        assert nf.fit(config, out=tmp_path / "two").steps == 6
    assert not multiprocessing.active_children()
    again = nf.fit(config.with_changes(workers=0), out=tmp_path / "two", resume=True)
    assert equal(weights(whole), weights(again))
    assert nf.evaluate(tmp_path / "two") == whole.test
    with pytest.raises(ValueError, match="hold out fewer"):
        nf.fit(config.with_changes(validation=0.99))


def test_image_folder_that_lost_a_file_is_refused_on_resuming(folder: str, tmp_path: Path) -> None:
    changes = {"data": folder, "batch_size": 4, "epochs": 1}
    config = nf.TrainConfig(**{**SMALL, **changes})
    nf.fit(config, out=tmp_path / "run")
    lost = next(tmp_path.glob("images/train/dark/*.png"))
    kept = lost.read_bytes()
    lost.write_bytes(kept + b" ")  # another file of the same name
    with pytest.raises(
        ValueError, match=r"expected '.*' to have the same images as the run in '.*', but it differs; use the"
    ):
        nf.fit(config, out=tmp_path / "run", resume=True)
    lost.unlink()
    with pytest.raises(ValueError, match=r"to have the same number of training and test images"):
        nf.fit(config, out=tmp_path / "run", resume=True)
    lost.write_bytes(kept)
    assert nf.fit(config, out=tmp_path / "run", resume=True).status == "finished"


def test_image_folder_that_moved_is_evaluated_where_it_lies(folder: str, tmp_path: Path) -> None:
    result = nf.fit(nf.TrainConfig(**{**SMALL, "data": folder, "batch_size": 4, "epochs": 1}), out=tmp_path / "run")
    (tmp_path / "images").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="expected a folder of images at"):
        nf.evaluate(tmp_path / "run")
    assert nf.evaluate(tmp_path / "run", data_dir=str(tmp_path / "moved")) == result.test


# What is left behind


def test_nothing_global_is_changed(tmp_path: Path) -> None:
    def everything() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            list(warnings.filters),
            os.getcwd(),
            dict(os.environ),
            list(__import__("sys").path),
        ]

    before = everything()
    fit(out=tmp_path / "one")
    fit(net=tiny_net(), method="batchnorm")
    fit(method="selu:dropout=0.1", lr=1e6, epochs=5)
    with pytest.raises(ValueError, match="holds one"):
        fit(out=tmp_path / "one")
    unchanged = [a == b for a, b in zip(before, everything(), strict=True)]
    assert all(unchanged[1:])
    assert before[0] != everything()[0]  # tiny_net() itself draws
    state = torch.get_rng_state()
    fit(method="selu:dropout=0.1")
    assert torch.equal(torch.get_rng_state(), state)


def test_result_says_where_it_comes_from(tmp_path: Path) -> None:
    result = fit(out=tmp_path, seed=4)
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["seed"] == record["config"]["seed"] == 4
    assert record["config"] == json.loads(json.dumps(result.to_json()["config"]))
    assert set(record["versions"]) >= {"python", "torch", "numpy", "normfree"}
    assert record["hardware"]["cpu"]
    assert record["commit"]
    assert record["test"] == {"loss": result.test.loss, "accuracy": result.test.accuracy} if result.test else False
    assert str(tmp_path) not in json.dumps(record)
    metrics = RunFolder(tmp_path).read_metrics()
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert metrics[-1]["validation_accuracy"] == record["validation"]["accuracy"]
    assert nf.TrainConfig.from_toml(tmp_path / "config.toml") == result.config


def test_linear_baseline_stands_beside_the_embedded_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(epochs=0).linear_accuracy is None
    assert fit(epochs=0, data=tiny_images(linear_accuracy=0.835)).linear_accuracy == 0.835


def test_progress_is_told_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    seen: list[Snapshot] = []
    result = fit(progress=seen.append)
    assert [s.done for s in seen] == list(range(1, 11))
    assert {s.total for s in seen} == {10}
    assert seen[-1].loss == result.train_loss
    assert all(s.throughput > 0 for s in seen)


def test_checkpoints_by_the_clock_and_by_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    original = checkpoint.save

    def save(run: Path, tensors: Any, state: Any, **options: Any) -> Path:
        steps.append(state["step"])
        return original(run, tensors, state, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    fit(out=tmp_path / "a", epochs=4, checkpoint_epochs=2, checkpoint_minutes=0.0)
    assert steps == [10, 20]
    steps.clear()
    fit(out=tmp_path / "b", epochs=2, checkpoint_epochs=0, checkpoint_minutes=0.0)
    assert steps == [10]  # the end is always kept
    steps.clear()
    fit(out=tmp_path / "c", epochs=1, checkpoint_epochs=0, checkpoint_minutes=1e-9)
    assert steps == [1, 2, 3, 4, 5, 5]


def test_large_checkpoints_come_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short epochs of a large model: saving after each would take longer than training."""
    saved: list[int] = []
    save, takes = checkpoint.save, 0.0

    def slow(run: Path, tensors: Any, state: Any, **options: Any) -> None:
        time.sleep(takes)
        saved.append(state["step"])
        save(run, tensors, state, **options)

    monkeypatch.setattr(checkpoint, "save", slow)
    fit(out=tmp_path / "small", epochs=20)
    assert saved == [5 * (1 + epoch) for epoch in range(20)]
    saved.clear()
    monkeypatch.setattr(engine, "_SMALL_BYTES", 0)
    takes = 0.2
    result = fit(out=tmp_path / "large", epochs=20)
    assert (saved[0], saved[-1]) == (5, 100)
    assert takes * (len(saved) - 2) <= engine._SAVE_SHARE * result.seconds
    assert len(saved) < 20


# Models of others in a short type


class Positioned(nn.Module):
    """A bare parameter between two layers; with `fixed` a buffer, which stays in float32 and widens the signal."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(196, 8), nn.Linear(8, 10)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        position = torch.linspace(-1, 1, 8)
        if fixed:
            self.register_buffer("position", position)
        else:
            self.position = nn.Parameter(position)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.frozen(self.first(x.flatten(1)) + self.position)))


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_model_of_others_trains_in_bf16_and_comes_back_in_float32(tmp_path: Path, ema: float) -> None:
    model = Positioned()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fit(net=model, precision="bf16", ema=ema, out=tmp_path)
    assert result.status == "finished"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.equal(model.position, before["position"])
    assert torch.equal(model.frozen.weight, before["frozen.weight"])  # not rounded
    kept = nf.load(tmp_path, model=Positioned())
    assert equal(kept.state_dict(), model.state_dict())


def test_weights_are_not_rounded_where_a_run_in_bf16_begins() -> None:
    model = Positioned()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(net=model, precision="bf16", epochs=0)
    assert equal(model.state_dict(), before)


class Teacher(nn.Module):
    """A layer that no gradient changes, but the model itself, as a mean teacher does."""

    def __init__(self) -> None:
        super().__init__()
        self.learner, self.mean = nn.Linear(196, 10), nn.Linear(196, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.weight.lerp_(self.learner.weight, 0.5)
        return self.learner(x.flatten(1).to(self.learner.weight.dtype))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_the_model_itself_changes_stays_changed(tmp_path: Path, precision: str) -> None:
    model = Teacher()
    bias = model.mean.bias.clone()
    fit(net=model, precision=precision, out=tmp_path, lr=0.1)
    assert (model.mean.weight - model.learner.weight).norm() < 0.2 * model.learner.weight.norm()
    assert torch.equal(model.mean.bias, bias)
    assert equal(nf.load(tmp_path, model=Teacher()).state_dict(), model.state_dict())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_model_given_in_bf16_comes_back_in_float32(precision: str) -> None:
    model = Teacher().bfloat16()
    fit(net=model, precision=precision)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("held", [2, nn.ModuleList([nn.Linear(2, 2)])])
def test_name_that_our_models_use_may_be_another_thing_in_others(held: Any) -> None:
    model = Positioned()
    model.streams = held
    assert fit(net=model, precision="bf16").status == "finished"


def test_speed_of_an_epoch_is_that_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = engine.Trainer._score

    def slow(trainer: engine.Trainer, batches: Any) -> Score | None:
        time.sleep(0.5)
        return scored(trainer, batches)

    monkeypatch.setattr(engine.Trainer, "_score", slow)
    result = fit(out=tmp_path, epochs=3, validation=0.5)
    metrics = RunFolder(tmp_path).read_metrics()
    assert result.seconds > 1.5
    for record in metrics:
        assert record["images_per_second"] > 2 * result.steps * 24 / 1.5


def test_model_that_cannot_compute_in_bf16_is_refused_as_it_was() -> None:
    model = Positioned(fixed=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"precision 'bf16', but Positioned failed: .*; use precision=float32") as got:
        fit(net=model, precision="bf16")
    assert "\n" not in str(got.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert equal(model.state_dict(), before)
    assert fit(net=model, precision="float32").status == "finished"


@pytest.mark.parametrize("precision", ["float32", "bf16", "mixed"])
def test_error_inside_a_run_leaves_a_model_that_works(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)
    model = nf.build("resnet8", "fixup", num_classes=10, example=example())
    parameters = list(model.parameters())

    def raising(_: Snapshot) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(net=model, precision=precision, progress=raising)
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    assert {p.dtype for p in parameters} == {torch.float32}
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() and p.grad is None for p in parameters)
    assert not any(module.training for module in model.modules())
    assert not any(getattr(module, "folded", False) for module in model.modules())
    again = nf.build("resnet8", "fixup", num_classes=10, example=example())
    again.load_state_dict(model.state_dict())
    assert torch.equal(model(example(4)), again.eval()(example(4)))
    assert fit(net=model, precision=precision).status == "finished"


def test_adaptive_clipping_without_a_classifier_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 10, 14), nn.Flatten())
    with pytest.raises(ValueError, match=r"expected a model with a Linear .* got Sequential; use clip=norm, or none"):
        fit(net=model, clip="agc")
    assert fit(net=model, clip="norm").status == "finished"
