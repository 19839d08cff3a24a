"""A stored file with right checksums and a wrong value in any place is read, or refused by one sentence."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import normfree as nf
from normfree.comparison import comparison_report
from normfree.data.text.prepared_folder import open_prepared
from normfree.storage.writing import write_sealed_json
from normfree.train.engine import loop as engine
from normfree.train.run import checkpoint
from tiny_images import tiny_images
from tiny_text import tiny_pairs

pytestmark = pytest.mark.faults
VALUES = (None, -1, "x", [], {}, True, 10**30, [[]], "nan")
CONFIG = nf.TrainConfig(model="resmlp-2-8", epochs=1, batch_size=16, device="cpu", workers=0)
STORED = Path(__file__).parents[2] / "results" / "conversion" / "resnet18" / "comparison.json"


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in plain data; of a list, in its first two."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value[:2]):
        yield (*above, key)
        if isinstance(item, dict | list):
            yield from places(item, (*above, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Plain data with one value replaced."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


def require_one_sentence_each(
    body: dict[str, Any], write: Callable[[dict[str, Any]], object], read: Callable[[], object], values: Any
) -> None:
    write(body)
    read()  # the control
    wrong, refused = [], 0
    for place in places(body):
        for value in values:
            write(changed(body, place, value))
            try:
                read()
            except (ValueError, OSError) as error:
                refused += 1
                if "\n" in str(error):
                    wrong.append((place, value, str(error)))
            except Exception as error:
                wrong.append((place, value, repr(error)))
    assert not wrong
    assert refused


some_or_all = pytest.mark.parametrize(
    "values", [VALUES[2:4], pytest.param(VALUES, marks=pytest.mark.slow)], ids=["some", "all"]
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images, and no pictures."""
    monkeypatch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    monkeypatch.setattr(comparison_report, "write_plot", lambda *_, **__: None)


@some_or_all
def test_comparison(values: Any, tmp_path: Path) -> None:
    path, body = tmp_path / "comparison.json", json.loads(STORED.read_bytes())
    require_one_sentence_each(
        body, lambda body: write_sealed_json(path, body), lambda: comparison_report.redraw(path), values
    )


@some_or_all
def test_prepared_text(values: Any, tmp_path: Path) -> None:
    folder = tiny_pairs(tmp_path).folder
    body = json.loads((folder / "prepared.json").read_bytes())

    def read() -> None:
        found = open_prepared(folder)
        found.report(), found.vocabulary(), found.pairs("train"), found.references("test")

    require_one_sentence_each(body, lambda body: write_sealed_json(folder / "prepared.json", body), read, values)


@some_or_all
def test_result_of_a_compared_run(values: Any, tmp_path: Path) -> None:
    def compare() -> None:
        nf.compare(CONFIG, methods=["fixup"], models=["resmlp-2-8"], out=tmp_path)

    compare()
    path = next(tmp_path.glob("*/result.json"))
    body = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "sha256"}
    require_one_sentence_each(body, lambda body: write_sealed_json(path, body), compare, values)


@some_or_all
def test_state_of_a_checkpoint(values: Any, tmp_path: Path) -> None:
    nf.fit(CONFIG, out=tmp_path / "run")
    saved = checkpoint.latest(tmp_path / "run")
    assert saved is not None
    digest, body = checkpoint.read_state(saved)
    (tmp_path / "run" / "result.json").unlink()

    def write(body: dict[str, Any]) -> None:
        (saved / "state.json").write_bytes(checkpoint._render_state(digest, body, None))

    def read() -> None:
        nf.load(tmp_path / "run")
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        nf.fit(CONFIG, out=shutil.copytree(tmp_path / "run", tmp_path / "copy"), resume=True)

    require_one_sentence_each(body, write, read, values)
