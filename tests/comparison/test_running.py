"""`compare`: which runs are made, read, resumed and refused, and what is made of them."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from normfree.comparison.comparison import Comparison, Run, page, panel, panel_over_rates, redraw, save, table
from normfree.comparison.running import compare, layers
from normfree.comparison.scheduling import Task, folder_name
from normfree.comparison.workers import Said, _answer, _send_next, _work, run_tasks
from normfree.data.images.fashion14 import LINEAR_ACCURACY
from normfree.models import build
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.engine import loop as engine
from normfree.train.engine.environment import Stop
from normfree.train.recipes import recipe
from tiny_text import tiny_text

BASE = TrainConfig(epochs=1, batch_size=1000, validation=0.5)  # three steps
SMALL = {"methods": ["fixup", "he_in"], "models": ["resmlp-3-8", "resmlp-1-8"]}


def run(method: str, depth: int, lr: float, validation: float, test: float | None, seed: int = 0) -> Run:
    return Run(
        method=method,
        model=f"resmlp-{depth}-8",
        depth=depth,
        lr=lr,
        seed=seed,
        status="diverged" if test is None else "finished",
        validation=validation,
        test=test,
        seconds=1.0,
        folder=f"{method}-{depth}-{lr}-{seed}",
    )


def made(*runs: Run, lrs: tuple[float, ...] = (0.1, 0.01), seeds: tuple[int, ...] = (0,)) -> Comparison:
    return Comparison(
        runs=runs,
        settings={"data": "fashion14", "epochs": 1, "batch_size": 64},
        methods=tuple(dict.fromkeys(run.method for run in runs)),
        lrs=lrs,
        seeds=seeds,
        chance=0.1,
        linear_accuracy=0.8,
    )


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of a run takes longer than these runs."""
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


@pytest.mark.parametrize(
    ("tests", "drawn"),
    [
        ((0.69, 0.78), ["linear"]),  # chance would take six times the room of the curves
        ((0.30, 0.78), ["linear", "chance"]),
        ((0.775, 0.78), ["linear", "chance"]),  # a small difference shall look like one
    ],
)
def test_line_far_below_the_curves_is_said_and_not_drawn(tests: tuple[float, float], drawn: list[str]) -> None:
    found = made(
        *(run(method, 10, lr, 0.5, test) for method, test in zip("ab", tests, strict=True) for lr in (0.1, 0.01))
    )
    for shown in (panel(found), panel_over_rates(found)):
        assert [level.name.split()[0].strip(",") for level in shown.levels] == drawn
        assert ("The axis begins above chance, 10.0 %." in shown.note) == ("chance" not in drawn)


@pytest.mark.parametrize("lrs", [(0.1,), (0.1, 0.01)])
def test_comparison_on_text_speaks_of_tokens(lrs: tuple[float, ...]) -> None:
    settings = {"data": "pairs:.data/multi30k-8000", "epochs": 6, "batch_size": 4000}
    found = dataclasses.replace(made(run("fixup", 10, 0.1, 0.5, 0.5), lrs=lrs), settings=settings, chance=1 / 8000)
    assert table(found).title == "Test accuracy on multi30k-8000 after 6 epochs, batches of 4,000 tokens"
    book = dataclasses.replace(found, settings={**found.settings, "data": "text:.data/book-8000", "batch_size": 32})
    assert table(book).title == "Test accuracy on book-8000 after 6 epochs, batches of 32 blocks"
    (shown,) = page(dataclasses.replace(found, linear_accuracy=None), "title").panels
    assert shown.y_label == "target tokens predicted in the test, %"


def test_compare_is_what_single_runs_give(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    told = []
    found = compare(
        BASE, **SMALL, seeds=(0, 1), out=tmp_path, progress=lambda done, total, now: told.append((done, total))
    )
    assert len(found.runs) == len(fitted) == 8
    assert told[0] == (0, 8)
    assert told[-1] == (8, 8)
    assert [run.depth for run in found.runs] == [4] * 4 + [8] * 4
    assert (found.chance, found.linear_accuracy) == (0.1, LINEAR_ACCURACY)
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


def test_interrupted_run_goes_on(tmp_path: Path, fitted: list[TrainConfig]) -> None:
    config = BASE.with_changes(method="fixup", model="resmlp-3-8", epochs=30)
    task = Task(config, tmp_path / folder_name(config))
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


def test_run_without_a_test_split_is_blank_and_not_diverged(tmp_path: Path) -> None:
    finished = dataclasses.replace(run("fixup", 4, 0.1, 0.5, 0.5), test=None)
    wild = run("he_in", 4, 0.1, 0.5, None)
    assert str(finished) == "fixup, resmlp-4-8, lr 0.1: not tested"
    found = made(finished, wild, lrs=(0.1,))
    assert [(p.test, p.spread, p.diverged) for p in found.points] == [(None, None, 0), (0.1, None, 1)]
    assert [row[5] for row in table(found).rows] == ["", "10.0 %"]
    assert math.isnan(panel(found).curves[0].values[0])
    assert [card.name for card in page(found, "").cards] == ["he_in"]
    half = made(finished, dataclasses.replace(wild, method="fixup", seed=1), lrs=(0.1,), seeds=(0, 1))
    assert [(p.test, p.diverged) for p in half.points] == [(None, 1)]  # not the chance of the other seed alone
    assert all(path.exists() for path in save(made(finished, lrs=(0.1,)), tmp_path))


def test_learning_rate_is_chosen_by_validation() -> None:
    found = made(run("fixup", 4, 0.1, 0.7, 0.2), run("fixup", 4, 0.01, 0.6, 0.9))
    assert [(p.lr, p.test) for p in found.points] == [(0.1, 0.2)]


def test_validation_of_a_diverged_run_does_not_count() -> None:
    found = made(run("fixup", 4, 0.1, 0.9, None), run("fixup", 4, 0.01, 0.3, 0.3))
    assert [p.lr for p in found.points] == [0.01]
    both = made(run("fixup", 4, 0.1, 0.9, None), run("fixup", 4, 0.01, 0.9, None))
    assert [(p.lr, p.test, p.diverged) for p in both.points] == [(0.01, 0.1, 1)]


def test_panel_shows_spread_levels_and_one_curve_a_shape() -> None:
    runs = [run("fixup", d, 0.1, 0.5, 0.5 + 0.1 * seed, seed) for d in (4, 40) for seed in (0, 1)]
    drawn = panel(made(*runs, lrs=(0.1,), seeds=(0, 1)))
    assert drawn.log_x
    assert [level.value for level in drawn.levels] == [80.0, 10.0]
    (curve,) = drawn.curves
    assert curve.x == (4.0, 40.0)
    assert curve.values == pytest.approx((55.0, 55.0))
    assert curve.spread == pytest.approx((100 * statistics.stdev([0.5, 0.6]),) * 2)


def test_depth_is_the_number_of_layers_in_a_row() -> None:
    names = {"resnet20": 20, "resnet110": 110, "mlp-20-8": 20, "resmlp-49-8": 100, "preact_resnet18": 18}
    assert {name: layers(build(name, "he_in", device="meta").plan) for name in names} == names


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


def test_save_writes_every_kind(tmp_path: Path) -> None:
    found = made(run("fixup", 4, 0.1, 0.5, 0.5), run("he_in", 4, 0.1, 0.5, None), lrs=(0.1,))
    paths = save(found, tmp_path / "new")
    assert [path.read_bytes()[:4] for path in paths] == [b'{\n "', b"<!do", b"\x89PNG", b"<?xm"]
    assert [path.name for path in paths] == [f"comparison.{kind}" for kind in ("json", "html", "png", "svg")]
    assert json.loads(paths[0].read_text())["points"][1]["diverged"] == 1
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)
    assert [card.status for card in page(found, "").cards] == ["good", "bad"]


# Processes, with functions that a new one finds without these tests.


def test_stored_comparison_is_drawn_anew(tmp_path: Path) -> None:
    found = made(run("a", 4, 0.1, 0.5, 0.5), run("a", 8, 0.1, 0.5, 0.5))
    data, page, picture, drawing = save(found, tmp_path, command="normfree compare")
    before = {path: path.read_bytes() for path in (data, page, picture)}
    page.write_text("old")
    picture.unlink()
    drawing.unlink()
    assert redraw(data) == (page, picture)
    assert {path: path.read_bytes() for path in before} == before
    assert not drawing.exists()


@pytest.mark.parametrize("text", [None, "{}", "[1]", "no JSON"])
def test_what_is_no_comparison_is_not_drawn(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "comparison.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"expected a comparison in .* found none"):
        redraw(path)


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


def test_error_of_a_process_is_one_sentence() -> None:
    with Stop() as stop, pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'x'$"):
        list(run_tasks(int, ["1", "x"], jobs=2, stop=stop))


def test_bleu_has_a_column_where_runs_translate() -> None:
    runs = [run("a", 2, 0.1, 0.5, 0.5, seed) for seed in (0, 1)] + [run("b", 2, 0.1, 0.5, None)]
    told = table(made(*(dataclasses.replace(r, bleu=b) for r, b in zip(runs, (20.0, 25.0, None), strict=True))))
    place = [column.name for column in told.columns].index("BLEU")
    assert [row[place] for row in told.rows] == ["22.5", ""]
    assert "BLEU" not in [column.name for column in table(made(*runs)).columns]


def test_what_a_task_says_on_its_way_is_heard() -> None:
    def counted(task: int, say: Callable[[str], None]) -> int:
        say(f"at {task}")
        say(f"beyond {task}")
        return task + 1

    heard: list[Said] = []
    with Stop() as stop:
        assert dict(run_tasks(counted, [5, 6], stop=stop, heard=heard.append)) == {0: 6, 1: 7}
    assert heard == [{0: "at 5"}, {0: "beyond 5"}, {1: "at 6"}, {1: "beyond 6"}]


def test_task_goes_on_when_nobody_listens_any_more() -> None:
    """A run that says something after its parent is gone still saves what it has."""
    ours, theirs = multiprocessing.Pipe()
    saved = []

    def work(task: str, say: Callable[[str], None]) -> None:
        ours.close()
        say("half")
        saved.append(task)

    ours.send("run")
    _work(work, theirs, True)
    assert saved == ["run"]


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


def test_killed_process_is_noticed() -> None:
    with Stop() as stop, pytest.raises(ValueError, match="killed with status 7; free some memory"):
        list(run_tasks(os._exit, [7, 7], jobs=2, stop=stop))


def test_process_that_is_gone_before_its_task_is_noticed_by_its_answer() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    assert _send_next(ours, iter([(3, "run")])) == 3
    assert _answer(ours) is None


def test_signal_stops_the_processes_and_keeps_their_runs(tmp_path: Path) -> None:
    def send() -> None:
        for _ in range(600):
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


def test_single_model_is_drawn_over_the_learning_rate(tmp_path: Path) -> None:
    """Over depth it would be dots above each other."""
    runs = [
        run(m, 3, lr, 0.5, t) for m, lr, t in [("a", 0.1, 0.6), ("a", 0.01, 0.7), ("b", 0.1, None), ("b", 0.01, 0.4)]
    ]
    comparison = made(*runs)
    drawn = panel_over_rates(comparison)
    assert {c.name: (c.x, c.values, c.crossed) for c in drawn.curves} == {
        "a": ((0.01, 0.1), pytest.approx((70.0, 60.0)), ()),
        "b": ((0.01, 0.1), pytest.approx((40.0, 100 * comparison.chance)), (1,)),
    }
    assert "best" not in drawn.note
    page = save(comparison, tmp_path)[1].read_text()
    assert "against the learning rate" in page
    deeper = save(made(*runs, run("a", 5, 0.1, 0.5, 0.5)), tmp_path)[1].read_text()
    assert "against the learning rate" not in deeper
