"""The configuration: round trips, typed changes, every refusal, and what its fingerprint counts."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import normfree
from normfree.data.images.augment import Augmentation
from normfree.methods import FORMS
from normfree.optim.learning_rates import Schedule, ScheduleKind, WarmupShape
from normfree.optim.master_weights import OptimizerName
from normfree.optim.rate_trials import OPTIMIZERS
from normfree.train.config import TrainConfig
from normfree.train.data_sources import augmentation_of
from normfree.train.setting_fields import field_types

positive = st.floats(1e-12, 1e12)
at_least_0 = st.floats(0, 1e12)
below_1 = st.floats(0, 1, exclude_max=True)
count, natural = st.integers(1, 10**6), st.integers(0, 10**6)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": texts,
    "method": texts,
    "form": st.sampled_from([None, *FORMS]),
    "dropout": below_1,
    "inner_dropout": st.none() | below_1,
    "data": texts,
    "data_dir": texts,
    "validation": below_1,
    "crop": natural,
    "flip": st.booleans(),
    "cutout": natural,
    "mixup": at_least_0,
    "randaugment": st.tuples(natural, st.integers(0, 30)),
    "epochs": st.integers(0, 100_000_000),
    "batch_size": count,
    "accumulate": st.just(1),
    "eval_batch_size": count,
    "block": count,
    "beam": count,
    "length_penalty": st.floats(-1e6, 1e6),
    "optimizer": st.sampled_from(["sgd", "adam", "adamw"]),
    "lr": positive,
    "momentum": below_1,
    "nesterov": st.just(False),
    "betas": st.tuples(below_1, below_1),
    "eps": positive,
    "weight_decay": at_least_0,
    "label_smoothing": below_1,
    "clip": st.sampled_from(["none", "agc", "norm"]),
    "clip_at": positive,
    "ema": below_1,
    "schedule": st.sampled_from(get_args(ScheduleKind)),
    "milestones": st.lists(st.floats(0, 1), max_size=4).map(lambda m: tuple(sorted(m))),
    "decay": st.floats(0, 1, exclude_min=True),
    "cosine_by": st.sampled_from(["step", "epoch"]),
    "warmup": at_least_0,
    "warmup_in": st.sampled_from(["epochs", "steps"]),
    "warmup_shape": st.sampled_from(get_args(WarmupShape)),
    "precision": st.sampled_from(["auto", "float32", "bf16", "mixed"]),
    "channels_last": st.none() | st.booleans(),
    "compile": st.none() | st.booleans(),
    "graph": st.none() | st.booleans(),
    "kernels": st.sampled_from(["auto", "stage", "compiled"]),
    "region": count,
    "recompute": natural,
    "seed": st.integers(0, 2**63 - 1),
    "loss_limit": positive,
    "device": texts,
    "checkpoint_minutes": at_least_0,
    "checkpoint_epochs": natural,
    "keep_last": count,
    "keep_best": st.booleans(),
    "workers": natural,
    "tensorboard": st.booleans(),
    "measure_signal": st.booleans(),
}
configs = st.builds(TrainConfig, **VALUES)


def test_values_cover_every_field() -> None:
    assert set(VALUES) == {field.name for field in fields(TrainConfig)}


@settings(max_examples=40)
@given(config=configs)
def test_toml_reads_back_equal(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8", newline="")
    read = TrainConfig.from_toml(path)
    assert read == config
    assert read.fingerprint() == config.fingerprint()
    assert {name: type(value) for name, value in asdict(read).items()} == {
        name: type(value) for name, value in asdict(config).items()
    }


def as_text(value: Any) -> str:
    """A value as somebody would type it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(repr, value))}]"
    return str(value)


@settings(max_examples=40)
@given(config=configs)
def test_changes_from_texts_give_the_configuration(config: TrainConfig) -> None:
    plain = {name: value for name, value in asdict(config).items() if str(value).strip() == str(value)}
    changes = TrainConfig.parse_changes(f"{name}={as_text(value)}" for name, value in plain.items())
    assert changes == plain
    assert {name: type(value) for name, value in changes.items()} == {n: type(v) for n, v in plain.items()}


def test_toml_of_nothing_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert TrainConfig.from_toml(tmp_path / "empty.toml") == TrainConfig()


def test_toml_changes_its_base(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text("lr = 1\nmilestones = [0.25]\n")
    base = TrainConfig(model="resnet110", form="pre")
    assert TrainConfig.from_toml(path, base) == replace(base, lr=1.0, milestones=(0.25,))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr=.5", 0.5),
        (" lr = 5e-1 ", 0.5),
        ("lr=1", 1.0),
        ("epochs=3", 3),
        ("flip=True", True),
        ("flip=false", False),
        ("form=none", None),
        ("form=pre", "pre"),
        ("method=fixup:scalar_lr=1/L", "fixup:scalar_lr=1/L"),
        ("milestones=0.5,0.75", (0.5, 0.75)),
        ("milestones=[0.5, 0.75]", (0.5, 0.75)),
        ("milestones=(0.5,)", (0.5,)),
        ("milestones=[]", ()),
        ("randaugment=[2,9]", (2, 9)),
        ("model=none", "none"),
    ],
)
def test_change_is_typed_by_its_field(text: str, value: Any) -> None:
    (parsed,) = TrainConfig.parse_changes([text]).values()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr", r"expected a change as 'name=value', such as 'lr=0.2', got 'lr'"),
        ("lrr=1", r"unknown setting 'lrr'; did you mean 'lr'"),
        ("learning=1", r"unknown setting 'learning'; "),
        ("batchsize=1", r"did you mean 'batch_size'"),
        ("=1", r"unknown setting ''"),
        ("lr=fast", r"expected a number for 'lr', got 'fast'"),
        ("lr=nan", r"expected a finite number for 'lr', got nan"),
        ("lr=inf", r"expected a finite number for 'lr', got inf"),
        ("lr=none", r"expected a number for 'lr', got 'none'"),
        ("epochs=1.5", r"expected a whole number for 'epochs', got '1.5'"),
        ("flip=1", r"expected true or false for 'flip', got '1'"),
        ("optimizer=sgdd", r"unknown value of 'optimizer' 'sgdd'; did you mean 'sgd'\? .*: sgd, adam, adamw"),
        ("form=diagonal", r"unknown value of 'form' 'diagonal'; .*expected one of: post, pre, linear"),
        ("betas=0.9", r"expected a list of 2 numbers for 'betas', got \[0.9\]"),
        ("milestones=a,b", r"expected a number for 'milestones', got 'a'"),
        ("randaugment=2,9.5", r"expected a whole number for 'randaugment', got '9.5'"),
    ],
)
def test_bad_change_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainConfig.parse_changes([text])


def test_repeated_change_is_refused() -> None:
    with pytest.raises(ValueError, match="expected each setting once, got 'lr' twice; leave one out"):
        TrainConfig.parse_changes(["lr=1", "lr=2"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": ""}, r"expected 'model' not to be empty, got ''"),
        ({"lr": 0}, r"expected 'lr' above 0, got 0.0"),
        ({"eps": -1.0}, r"expected 'eps' above 0, got -1.0"),
        ({"clip_at": 0.0}, r"expected 'clip_at' above 0"),
        ({"loss_limit": 0.0}, r"expected 'loss_limit' above 0"),
        ({"decay": 1.5}, r"expected 'decay' above 0 and at most 1, got 1.5"),
        ({"validation": 1.0}, r"expected 'validation' at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1}, r"expected 'momentum' at least 0 and below 1"),
        ({"label_smoothing": 1.0}, r"expected 'label_smoothing' at least 0 and below 1"),
        ({"ema": 1.0}, r"expected 'ema' at least 0 and below 1"),
        ({"batch_size": 0}, r"expected 'batch_size' at least 1, got 0"),
        ({"accumulate": 0}, r"expected 'accumulate' at least 1"),
        ({"region": 0}, r"expected 'region' at least 1"),
        ({"eval_batch_size": 0}, r"expected 'eval_batch_size' at least 1"),
        ({"epochs": -1}, r"expected 'epochs' at least 0 and at most 100 million, got -1"),
        ({"epochs": 10**23}, r"expected 'epochs' at least 0 and at most 100 million, got 1000"),
        ({"crop": -1}, r"expected 'crop' at least 0"),
        ({"cutout": -1}, r"expected 'cutout' at least 0"),
        ({"mixup": -1}, r"expected 'mixup' at least 0"),
        ({"weight_decay": -1}, r"expected 'weight_decay' at least 0"),
        ({"warmup": -1}, r"expected 'warmup' at least 0"),
        ({"recompute": -1}, r"expected 'recompute' at least 0"),
        ({"checkpoint_minutes": -1}, r"expected 'checkpoint_minutes' at least 0"),
        ({"checkpoint_epochs": -1}, r"expected 'checkpoint_epochs' at least 0"),
        ({"workers": -1}, r"expected 'workers' at least 0"),
        ({"seed": -1}, r"expected 'seed' at least 0 and below 2\^63, got -1"),
        ({"seed": 2**63}, r"expected 'seed' at least 0 and below 2\^63"),
        ({"betas": (0.9, 1.0)}, r"expected 'betas' at least 0 and below 1, got \[0.9, 1.0\]"),
        ({"randaugment": (2, 31)}, r"expected 'randaugment' as at least 0 operations and a magnitude of 0 to 30"),
        ({"randaugment": (-1, 3)}, r"expected 'randaugment' as at least 0 operations"),
        ({"milestones": (100, 150)}, r"expected 'milestones' as rising fractions .* got \[100.0, 150.0\]; divide"),
        ({"milestones": (0.5, 0.2)}, r"expected 'milestones' as rising fractions of the run"),
        ({"batch_size": 10, "accumulate": 3}, r"expected 'accumulate' to divide the batch size of 10, got 3"),
        ({"nesterov": True, "momentum": 0.0}, r"expected optimizer 'sgd' with a momentum above 0 for 'nesterov'"),
        ({"nesterov": True, "optimizer": "adam"}, r"for 'nesterov', got 'adam' and 0.9"),
        ({"schedule": "cosin"}, r"unknown value of 'schedule' 'cosin'; did you mean 'cosine'\?"),
        ({"precision": "fp16"}, r"unknown value of 'precision' 'fp16'; .*expected one of: auto, float32, bf16, mixed"),
        ({"epochs": True}, r"expected a whole number for 'epochs', got True"),
        ({"lr": "0.1"}, r"expected a number for 'lr', got '0.1'"),
        ({"flip": 1}, r"expected true or false for 'flip', got 1"),
        ({"model": None}, r"expected a text for 'model', got None"),
        ({"milestones": 0.5}, r"expected a list of numbers for 'milestones', got 0.5"),
    ],
)
def test_bad_value_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**change)
    with pytest.raises(ValueError, match=sentence):
        TrainConfig().with_changes(**change)


def test_zero_epochs_and_a_warmup_longer_than_the_run_are_allowed() -> None:
    assert TrainConfig(epochs=0, warmup=5).epochs == 0


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown setting 'momentun'; did you mean 'momentum'\?"):
        TrainConfig().with_changes(momentun=0.9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr = ", r"the file '.*bad.toml' is not valid TOML \(Invalid value .*\); correct it there"),
        ("lrr = 1", r"unknown setting 'lrr' in '.*bad.toml'; did you mean 'lr'\?"),
        ("[lr]\nx = 1", r"expected a number for 'lr', got \{'x': 1\}; correct it in '.*bad.toml'"),
        ("lr = '0.1'", r"expected a number for 'lr', got '0.1'; correct it in '.*bad.toml'"),
        ("lr = -1", r"expected 'lr' above 0, got -1.0; correct it in '.*bad.toml'"),
        ("seed = 2024-01-01", r"expected a whole number for 'seed', got datetime.date"),
    ],
)
def test_bad_toml_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        TrainConfig.from_toml(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"lr = \xff")
    with pytest.raises(ValueError, match="is not valid TOML"):
        TrainConfig.from_toml(tmp_path / "bad.toml")


def test_missing_toml_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^expected a file of settings at '.*none.toml', found none; check"):
        TrainConfig.from_toml(tmp_path / "none.toml")


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().lr = 0.2  # type: ignore[misc]
    assert hash(TrainConfig()) == hash(TrainConfig())


def test_folder_may_be_a_path() -> None:
    assert TrainConfig(data_dir=Path("a") / "b").data_dir == os.path.join("a", "b")  # type: ignore[arg-type]


CHANGED: dict[str, Any] = {
    "model": "resnet26", "method": "batchnorm", "form": "pre", "dropout": 0.1, "inner_dropout": 0.2,
    "data": "mnist", "validation": 0.2,
    "crop": 1, "flip": True, "cutout": 1, "mixup": 0.5, "randaugment": (1, 1), "epochs": 11, "batch_size": 64,
    "accumulate": 2, "eval_batch_size": 10, "block": 64, "beam": 4, "length_penalty": 0.6, "optimizer": "adam",
    "lr": 0.2, "momentum": 0.8, "nesterov": True, "betas": (0.8, 0.9),
    "eps": 1e-6, "weight_decay": 0.0, "label_smoothing": 0.1, "clip": "agc", "clip_at": 0.1, "ema": 0.9,
    "schedule": "step", "milestones": (0.1,), "decay": 0.2, "cosine_by": "epoch", "warmup": 1.0, "warmup_in": "steps",
    "warmup_shape": "quadratic", "precision": "bf16", "channels_last": True, "compile": True, "graph": True,
    "region": 2, "recompute": 3, "seed": 1, "loss_limit": 10.0,
}  # fmt: skip
UNCOUNTED: dict[str, Any] = {
    "data_dir": "elsewhere", "device": "cpu", "checkpoint_minutes": 1.0, "checkpoint_epochs": 5, "workers": 0,
    "keep_last": 1, "keep_best": False, "tensorboard": True, "measure_signal": False, "kernels": "compiled",
}  # fmt: skip


def test_every_field_is_counted_or_not() -> None:
    assert set(CHANGED) | set(UNCOUNTED) == set(field_types(TrainConfig))


@pytest.mark.parametrize("name", CHANGED)
def test_fingerprint_changes_with_what_changes_the_numbers(name: str) -> None:
    assert TrainConfig(**{name: CHANGED[name]}).fingerprint() != TrainConfig().fingerprint()


@pytest.mark.parametrize("name", UNCOUNTED)
def test_fingerprint_stays_with_what_does_not(name: str) -> None:
    assert TrainConfig(**{name: UNCOUNTED[name]}).fingerprint() == TrainConfig().fingerprint()


def test_fingerprint_does_not_depend_on_how_a_number_is_written() -> None:
    written = TrainConfig(lr=1, milestones=[0, 1])  # type: ignore[arg-type]
    assert written.fingerprint() == TrainConfig(lr=1.0, milestones=(0.0, 1.0)).fingerprint()


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_fingerprint_is_the_same_in_another_process_which_needs_no_torch(hash_seed: str) -> None:
    code = (
        "import sys; from normfree.train.config import TrainConfig as T; "
        "print(T(lr=0.3).fingerprint(), 'torch' in sys.modules)"
    )
    path = str(Path(normfree.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [TrainConfig(lr=0.3).fingerprint(), "False"]
    assert len(TrainConfig().fingerprint()) == 12


def test_choices_are_those_of_the_rooms_that_use_them() -> None:
    types = field_types(TrainConfig)
    assert set(get_args(types["optimizer"])) == set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert set(get_args(types["schedule"])) == set(get_args(ScheduleKind))
    assert set(get_args(types["warmup_shape"])) == set(get_args(WarmupShape))
    assert set(get_args(get_args(types["form"])[0])) == set(FORMS)


def test_schedule_takes_every_setting_over() -> None:
    config = TrainConfig(
        schedule="step", milestones=(0.2,), decay=0.3, cosine_by="epoch", warmup=2.0, warmup_shape="quadratic"
    )
    assert config.lr_schedule == Schedule(
        kind="step", milestones=(0.2,), decay=0.3, by="epoch", warmup=2.0, warmup_shape="quadratic"
    )


def test_augmentation_takes_every_setting_over() -> None:
    config = TrainConfig(crop=4, flip=True, cutout=16, mixup=0.7, randaugment=(2, 9))
    assert augmentation_of(config) == Augmentation(crop=4, flip=True, cutout=16, mixup=0.7, randaugment=(2, 9))
    assert augmentation_of(TrainConfig()) == Augmentation()


@pytest.mark.parametrize(
    ("changes", "steps", "says"),
    [
        ({"warmup": 2.0, "epochs": 1}, 100, "the warm-up of 2 epochs is longer than the run of 100 steps"),
        ({"warmup": 200.0, "warmup_in": "steps"}, 100, "the warm-up of 200 steps is longer"),
        ({"batch_size": 5000, "epochs": 3}, 3, "a batch of 5,000 holds all training images, and repeats some"),
        ({"data": "pairs:x", "epochs": 3}, 3, "a batch of 128 tokens holds all training sentences; make"),
        ({"data": "text:x", "epochs": 3}, 3, "a batch of 128 blocks holds the complete training text; make"),
    ],
)
def test_warnings_name_the_setting(changes: dict[str, Any], steps: int, says: str) -> None:
    (found,) = TrainConfig(**changes).warnings(steps)
    assert says in found
    assert not TrainConfig().warnings(steps=1000)
