"""A run on tokens that is killed or stopped goes on as if nothing had happened, to the last bit."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from compared_runs import differences
from forked_runs import Runs, forked_runs
from normfree.data.text.prepared_folder import Prepared
from normfree.train import RunFolder, RunResult
from normfree.train.engine import loop as engine
from normfree.train.run import checkpoint
from normfree.train.text import generation as translating
from normfree.train.text.text_data import TextData
from stopped_steps import stop_at
from tiny_text import SIZE, drawn, tiny_pairs, tiny_text

# Everything that a run can forget: order of pairs and batches, dropout, both memories of Adam, average, warm-up.
ALL = {
    "model": "transformer-1-1-16-32-2",
    "method": "fixup",
    "dropout": 0.2,
    "epochs": 3,
    "batch_size": 60,
    "optimizer": "adam",
    "betas": (0.9, 0.98),
    "lr": 0.01,
    "weight_decay": 0.0,
    "label_smoothing": 0.1,
    "ema": 0.9,
    "schedule": "inverse_sqrt",
    "warmup": 7.0,
    "warmup_in": "steps",
    "beam": 2,
    "device": "cpu",
}
TEXT = {**ALL, "model": "decoder-2-16-32-2", "batch_size": 8, "block": 16}
KEYWORDS = dict(translating.translate_tokens.__kwdefaults__ or {})


def fit(data: Prepared, out: Path, *, resume: bool = False, **changes: Any) -> RunResult:
    settings = ALL if len(data.manifest["sides"]) == 2 else TEXT
    return nf.fit(nf.TrainConfig(**{**settings, **changes}), data=data, out=out, resume=resume)


@pytest.fixture(autouse=True, scope="module")
def no_picture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(pairs: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run on pairs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert fit(pairs, out).status == "finished"
    return out


def test_data_has_several_shapes_of_batches(pairs: Prepared) -> None:
    feed = TextData(pairs).batches(nf.TrainConfig(**ALL), "train")
    assert len({feed.shape_of(step) for step in range(feed.steps)}) >= 3
    assert feed.steps > 4


# Signals


@pytest.mark.faults
def test_run_stopped_inside_epochs_equals_the_uninterrupted_one(
    pairs: Prepared, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = 0
    for calls in (2, 5, 1, 3):
        with monkeypatch.context() as patch:
            stop_at(patch, calls, signal.SIGTERM)
            result = fit(pairs, tmp_path, resume=bool(reached))
        reached += calls
        assert (result.status, result.signal, result.steps) == ("interrupted", signal.SIGTERM, reached)
        assert (result.test, result.bleu) == (None, None)
        assert not (tmp_path / "translations.txt").exists()
        torch.rand(7)  # another process would have drawn other numbers
    assert fit(pairs, tmp_path, resume=True).status == "finished"
    assert differences(whole, tmp_path) == []


@pytest.mark.faults
def test_run_stopped_at_the_end_of_an_epoch_has_all_metrics(
    pairs: Prepared, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = TextData(pairs).batches(nf.TrainConfig(**ALL), "train").steps
    for epoch in range(3):
        with monkeypatch.context() as patch:
            stop_at(patch, steps, signal.SIGTERM)
            assert fit(pairs, tmp_path, resume=epoch > 0).steps == (epoch + 1) * steps
        assert len(RunFolder(tmp_path).read_metrics()) == epoch
    assert fit(pairs, tmp_path, resume=True).status == "finished"
    assert differences(whole, tmp_path) == []


@pytest.mark.parametrize("changes", [{"method": "layernorm"}, {"method": "admin", "clip": "norm", "clip_at": 1.0}])
@pytest.mark.faults
def test_language_model_stopped_inside_epochs_equals_the_uninterrupted_one(
    text: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit(text, one, **changes)
    with monkeypatch.context() as patch:
        stop_at(patch, 9, signal.SIGTERM)
        assert fit(text, two, **changes).status == "interrupted"
    assert fit(text, two, resume=True, **changes).status == "finished"
    assert differences(one, two) == []


@pytest.mark.parametrize("what", ["memory0.", "memory1.", "average."])
def test_state_that_is_lost_changes_the_result(
    pairs: Prepared, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The control."""
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signal.SIGTERM)
        fit(pairs, tmp_path)
    saved, state = checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, {n: torch.zeros_like(t) if n.startswith(what) else t for n, t in saved.items()}, state)
    fit(pairs, tmp_path, resume=True)
    assert any(name.startswith(what) for name in differences(whole, tmp_path))


def test_dropout_that_is_drawn_again_changes_the_result(
    pairs: Prepared, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without seeds of its own for every step."""
    original = engine.Trainer._train

    def unseeded(self: engine.Trainer, *args: Any) -> Any:
        self.setup.seed_generators = lambda *_: None
        return original(self, *args)

    monkeypatch.setattr(engine.Trainer, "_train", unseeded)
    fit(pairs, tmp_path)
    assert any(name.startswith("model.") for name in differences(whole, tmp_path))


def test_finished_run_is_only_scored_again(pairs: Prepared, whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    (again / "translations.txt").unlink()
    result = fit(pairs, again, resume=True)
    assert result.status == "finished"
    assert result.bleu
    assert differences(whole, again) == []


@pytest.mark.faults
def test_run_stopped_while_it_translates_equals_the_uninterrupted_one(
    pairs: Prepared, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = translating.beam_search, 0

    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(translating, "beam_search", search)
        patch.setattr(translating.translate_tokens, "__kwdefaults__", {**KEYWORDS, "sentences": 1})
        stopped = fit(pairs, tmp_path)
    assert (stopped.status, stopped.signal, stopped.bleu, calls) == ("interrupted", signal.SIGTERM, None, 1)
    assert not (tmp_path / "translations.txt").exists()
    assert fit(pairs, tmp_path, resume=True).status == "finished"
    assert differences(whole, tmp_path) == []


def test_run_does_not_go_on_with_other_data(
    whole: Path, tmp_path: Path, pairs: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text in the same folder, with a vocabulary of the same size."""
    place = tmp_path / "place"
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        fit(tiny_pairs(place), tmp_path / "run")
    shutil.rmtree(place)
    other = tiny_pairs(place, drawn)
    assert other.vocabulary_size == SIZE
    with pytest.raises(
        ValueError, match=r"expected .* to have the same (data|vocabulary) as the run in .*, but it differs"
    ):
        fit(other, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"has data=pairs:.*, but this command gives data=pairs:"):
        fit(pairs, tmp_path / "run", resume=True)
    shutil.rmtree(place)
    assert fit(tiny_pairs(place), tmp_path / "run", resume=True).status == "finished"  # prepared again, alike


# kill -9


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with forked_runs() as started:
        yield started


@pytest.fixture(scope="module")
def whole_by_command(runs: Runs, pairs: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by the command; its process has one thread, which rounds in another order than two."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.toml").write_text(nf.TrainConfig(**ALL, data=f"pairs:{pairs.folder}").to_toml())
    runs.start("train", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), prints=folder / "prints")
    assert runs.wait() == 0, (folder / "prints").read_text()
    return folder / "run"


@pytest.mark.faults
def test_run_killed_at_random_moments_equals_the_uninterrupted_one(runs: Runs, pairs: Prepared, tmp_path: Path) -> None:
    one, two, prints = tmp_path / "one", tmp_path / "two", tmp_path / "prints"
    config = nf.TrainConfig(**{**ALL, "data": f"pairs:{pairs.folder}", "checkpoint_minutes": 0.0005, "epochs": 5})
    (tmp_path / "config.toml").write_text(config.to_toml())
    begin = ("--config", str(tmp_path / "config.toml"), "--out")
    runs.start("train", *begin, str(one), prints=prints)
    begun = time.monotonic()
    assert runs.wait() == 0, prints.read_text()
    lasted = time.monotonic() - begun
    draws, kills = random.Random(0), 0
    while kills < 3:
        process = runs.start("train", *(["--resume"] if RunFolder(two).exists else begin), str(two), prints=prints)
        time.sleep(draws.uniform(0.1, 0.5) * lasted)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if runs.wait() == 0:  # done before it was killed often enough
            shutil.rmtree(two)
            kills, lasted = 0, lasted / 2
        else:
            kills += 1
    runs.start("train", *(["--resume"] if RunFolder(two).exists else begin), str(two), prints=prints)
    assert runs.wait() == 0, prints.read_text()
    assert differences(one, two) == []


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("normfree.train.engine.loop:RunFolder.append", 2),  # logged, but not saved
        ("normfree.train.engine.step:TrainStep.__call__", 7),  # in an epoch, with nothing saved in it
        ("normfree.train.text.text_data:TextData.translate_test", 1),  # translated, but not written
    ],
)
@pytest.mark.faults
def test_run_killed_at_the_worst_moment_equals_the_uninterrupted_one(
    runs: Runs, whole_by_command: Path, tmp_path: Path, name: str, call: int
) -> None:
    out, prints = tmp_path / "run", tmp_path / "prints"
    settings = str(whole_by_command / "config.toml")
    runs.start("train", "--config", settings, "--out", str(out), prints=prints, die=(name, call))
    assert runs.wait() == -signal.SIGKILL, prints.read_text()
    runs.start("train", "--resume", str(out), prints=prints)
    assert runs.wait() == 0, prints.read_text()
    assert differences(whole_by_command, out) == []
