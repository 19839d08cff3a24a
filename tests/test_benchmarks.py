"""What the benchmarks of the stage kernels measure, and how the page shows it, without measuring."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from normfree.report.plots import write_plot

FOLDER = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not here")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made_up(tasks: Iterable[tuple[str, str, int, int, bool]]) -> list[dict[str, object]]:
    return [
        {"what": f"{model}, {path}", "model": model, "path": path, "batch": batch, "cold": cold, "steps": steps}
        | {"images_per_second": 1e6 / batch, "peak_gib": batch / 64, "precision": "bf16", "milliseconds": 1.0}
        for model, path, batch, steps, cold in tasks
    ]


def swept() -> dict[str, list[dict[str, object]]]:
    training = load("training")
    deeper, larger = training.kernel_tasks(400, [20, 56]), training.batch_tasks(400, [128, 32, 512])
    return {"depth": made_up(deeper), "batch": made_up(larger)}


def test_every_point_of_a_curve_has_all_paths() -> None:
    page, rows = load("page"), swept()
    for axis, places in (("depth", [20, 56, 110]), ("batch", [32, 128, 512])):
        found = page.curves(axis, rows[axis])
        assert {name: [*points] for name, points in found.items()} == dict.fromkeys(page.SWEPT.values(), places)
        assert max(Counter((row["what"], row["batch"]) for row in rows[axis]).values()) == 1


def test_curves_are_drawn_if_they_were_measured(tmp_path: Path) -> None:
    page, rows = load("page"), swept()
    assert "| 512 | 1,953 (8.0 GiB) |" in page.table_of_curves("batch", rows["batch"])
    for axis in rows:
        assert page.table_of_curves(axis, rows[axis][:1]) == ""
    panels = page.panels_over_depth_and_batch(rows)
    assert [panel.title for panel in panels] == [
        "images/s, batch 128",
        "GiB, batch 128",
        "images/s, ResNet-110",
        "GiB, ResNet-110",
    ]
    write_plot(panels, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 10_000
