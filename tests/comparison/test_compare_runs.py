"""`compare`: which runs are trained, read, resumed and refused."""

import itertools
import json
import math
import os
import re
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from normfree.comparison.compare_runs import RunTask, compare, network_depth
from normfree.comparison.comparison_report import panel, table
from normfree.data.data_sets import LINEAR_ACCURACY
from normfree.models import build
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.config import folder_name
from normfree.train.engine import loop as engine
from normfree.train.recipes import recipe
from tiny_text import tiny_text

BASE = TrainConfig(epochs=1, batch_size=1000, validation=0.5)  # three steps
SMALL = {"methods": ["fixup", "he_in"], "models": ["resmlp-3-8", "resmlp-1-8"]}


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of a run takes longer than these runs."""
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


def test_compare_is_what_single_runs_give(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    told = []
    found = compare(
        BASE, **SMALL, seeds=(0, 1), out=tmp_path, progress=lambda done, total, now: told.append((done, total))
    )
    assert len(found.runs) == len(fitted) == 8
    assert told[0] == (0, 8)
    assert told[-1] == (8, 8)
    assert [run.depth for run in found.runs] == [4] * 4 + [8] * 4
    assert (found.chance, found.linear_accuracy) == (0.1, LINEAR_ACCURACY["fashion14"])
    one = found.runs[-1]
    alone = fit(BASE.with_changes(method=one.method, model=one.model, seed=one.seed))
    assert alone.test
    assert alone.validation
    assert (one.test, one.validation) == (alone.test.accuracy, alone.validation.accuracy)
    pair = [run.test for run in found.runs if (run.method, run.model) == ("fixup", "resmlp-3-8")]
    point = next(p for p in found.points if (p.method, p.model) == ("fixup", "resmlp-3-8"))
    assert point.test == pytest.approx(statistics.mean(pair))
    assert point.spread == pytest.approx(abs(pair[0] - pair[1]) / math.sqrt(2))
    json.dumps(found.to_json(), allow_nan=False)


def test_finished_runs_are_read_and_not_run_again(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    first = compare(BASE, **SMALL, out=tmp_path)
    count = len(fitted)
    assert compare(BASE, **SMALL, out=tmp_path) == first
    assert len(fitted) == count
    compare(BASE, **SMALL, lrs=(BASE.lr, 0.01), out=tmp_path)
    assert len(fitted) == 2 * count  # only those of the other rate
    compare(BASE.with_changes(weight_decay=0.0), **SMALL, out=tmp_path)
    assert len(fitted) == 3 * count  # another setting is another run


def test_result_of_another_run_is_refused(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    """It is whole, and under the right name."""
    compare(BASE, methods=["fixup"], models=["resmlp-2-8"], lrs=(0.1, 0.01), out=tmp_path)
    one, other = (path / "result.json" for path in sorted(tmp_path.iterdir()))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"expected a result of lr=.*, got one of lr=.*; it belongs to another run"):
        compare(BASE, methods=["fixup"], models=["resmlp-2-8"], lrs=(0.1, 0.01), out=tmp_path)
    one.write_bytes(content)  # the control
    compare(BASE, methods=["fixup"], models=["resmlp-2-8"], lrs=(0.1, 0.01), out=tmp_path)
    assert len(fitted) == 2


def test_interrupted_run_goes_on(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    config = BASE.with_changes(method="fixup", model="resmlp-3-8", epochs=30)
    task = RunTask(config, tmp_path / folder_name(config))
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGTERM)).start()
    found = compare(BASE.with_changes(epochs=3000), methods=["fixup"], models=["resmlp-3-8"], out=tmp_path)
    assert found.signal == signal.SIGTERM
    assert found.runs == ()
    (folder,) = tmp_path.iterdir()
    assert RunFolder(folder).status == "interrupted"
    assert task.folder != folder
    step = RunFolder(folder).read_result()["steps"]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    compare(BASE.with_changes(epochs=3000), methods=["fixup"], models=["resmlp-3-8"], out=tmp_path)
    assert RunFolder(folder).read_result()["steps"] > step


def test_diverged_run_counts_as_chance(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    wild = BASE.with_changes(lr=1e30)
    found = compare(wild, methods=["he_in"], models=["resmlp-2-8"], out=tmp_path)
    (point,) = found.points
    assert (found.runs[0].status, found.runs[0].test, point.test, point.diverged) == ("diverged", None, 0.1, 1)
    assert panel(found).curves[0].crossed == (0,)
    assert "1 of 1" in table(found).rows[0]
    assert compare(wild, methods=["he_in"], models=["resmlp-2-8"], out=tmp_path) == found
    assert len(fitted) == 1


def test_depth_is_the_number_of_layers_in_a_row() -> None:
    names = {"resnet20": 20, "resnet110": 110, "mlp-20-8": 20, "resmlp-49-8": 100, "preact_resnet18": 18}
    assert {name: network_depth(build(name, "he_in", device="meta").plan) for name in names} == names


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ["fixupp"]}, "did you mean 'fixup'"),
        ({"models": ["resnt20"]}, "did you mean 'resnet20'"),
        ({"models": ["mlp-4-8"]}, "method 'fixup' does not admit model 'mlp-4-8'"),
        ({"models": ["torchvision:resnet18"]}, "expected a model that gives images"),
        ({"models": []}, "expected at least one model"),
        ({"lrs": ()}, "expected at least one learning rate"),
        ({"jobs": 0}, "expected at least 1 job"),
    ],
)
def test_wrong_comparisons_are_refused_before_any_run(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare(BASE, **{**SMALL, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_learning_rates_without_validation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a validation part"):
        compare(BASE.with_changes(validation=0.0), **SMALL, lrs=(0.1, 0.01), out=tmp_path)


def test_learning_rates_of_text_need_a_valid_file(tmp_path: Path) -> None:
    """The setting `validation` holds out nothing of text."""
    data = tiny_text(tmp_path).folder  # train and test
    base = recipe("language_model", data=f"text:{data}", validation=0.1)
    with pytest.raises(ValueError, match=r"put a file such as book\.valid\.txt"):
        compare(base, methods=["fixup"], models=["decoder-1-16-32-2"], lrs=(0.1, 0.01), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_processes_train_what_one_trains(tmp_path: Path) -> None:
    one = compare(BASE, **SMALL, out=tmp_path / "one")
    two = compare(BASE, **SMALL, out=tmp_path / "two", jobs=2)
    assert [(r.folder, r.status, r.validation, r.test) for r in one.runs] == [
        (r.folder, r.status, r.validation, r.test) for r in two.runs
    ]


def test_processes_read_an_image_folder(tmp_path: Path) -> None:
    """They are daemonic, and may have no workers of their own."""
    for part, name in itertools.product(("train", "val"), ("cat", "dog")):
        place = tmp_path / "pictures" / part / name
        place.mkdir(parents=True)
        Image.new("RGB", (8, 8), "red" if name == "cat" else "blue").save(place / "0.png")
    base = TrainConfig(data=f"folder:{tmp_path / 'pictures'}", epochs=1, batch_size=2, validation=0.0, workers=1)
    found = compare(base, methods=["fixup", "he_in"], models=["resmlp-1-8"], out=tmp_path / "out", jobs=2)
    assert [run.status for run in found.runs] == ["finished", "finished"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_say_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.0)  # in this process; others look twice a second
    told: list[str] = []
    model, base = ("resmlp-2-16", BASE) if jobs == 1 else ("resnet8", TrainConfig(epochs=1))
    compare(
        base,
        methods=["fixup", "he_in"],
        models=[model],
        out=tmp_path,
        jobs=jobs,
        progress=lambda done, total, now: told.append(f"{done} of {total}, {now}"),
    )
    one = rf"(fixup|he_in), {model}, lr [\d.]+: \d+%, loss [\d.]+, [\d,]+ images/s"
    assert any(re.fullmatch(rf"[01] of 2, {one}(; {one})?", text) for text in told)
    assert told[-1].startswith("2 of 2, ")


def test_signal_stops_the_processes_and_keeps_their_runs(tmp_path: Path) -> None:
    def send() -> None:
        for _ in range(2400):  # two minutes: a loaded machine starts processes slowly
            if len(list(tmp_path.glob("*/config.toml"))) == 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    long = BASE.with_changes(epochs=20_000, lr=1e-4)
    found = compare(long, **SMALL, out=tmp_path, jobs=2)
    assert (found.signal, found.runs) == (signal.SIGINT, ())
    assert {RunFolder(folder).status for folder in tmp_path.iterdir()} == {"interrupted"}


def test_a_model_of_others_is_compared_with_what_it_becomes(tmp_path: Path) -> None:
    base = BASE.with_changes(batch_size=3000)  # one step
    state = torch.random.get_rng_state()
    found = compare(base, methods=["as built", "fixup"], models=["thin_resnet:deeper"], out=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [(r.method, r.depth, r.status) for r in found.runs] == [
        ("as built", 10, "finished"),
        ("fixup", 10, "finished"),
    ]
