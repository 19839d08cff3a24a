"""`evaluate` scores the model of a run on the data that it learned."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import normfree as nf
from normfree.train.engine import loop as engine
from tiny_images import tiny_images


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    monkeypatch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())


def fit(out: Path, **changes: Any) -> nf.train.RunResult:
    return nf.fit(nf.TrainConfig(**{"model": "resnet8", "epochs": 2, "batch_size": 16, **changes}), out=out)


def test_evaluate_tells_of_every_batch(tmp_path: Path) -> None:
    result = fit(tmp_path, epochs=0, eval_batch_size=10)
    told: list[int] = []
    assert nf.evaluate(tmp_path, progress=told.append) == result.test
    assert told == list(range(1, math.ceil(len(tiny_images().test) / 10) + 1))


def test_evaluate_looks_for_data_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit(tmp_path, epochs=0, data_dir="there")
    asked: list[str] = []

    def load(name: str, root: str) -> Any:
        asked.append(root)
        return tiny_images()

    monkeypatch.setattr("normfree.train.data_sources.load", load)
    assert nf.evaluate(tmp_path) == nf.evaluate(tmp_path, data_dir="moved") == result.test
    assert asked == ["there", "moved"]


def test_images_of_other_classes_are_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path)
    data = tiny_images()
    turned = replace(data, classes=data.classes[::-1])
    monkeypatch.setattr("normfree.train.data_sources.load", lambda name, root: turned)
    with pytest.raises(ValueError, match=r"expected .* to have the same classes as the run in .*, but it differs"):
        nf.evaluate(tmp_path)
