"""The commands of the README and the guide: times that can be read and were measured, and the order printed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the benchmarks are not here")


@pytest.fixture(scope="module")
def times() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_times", ROOT / "benchmarks" / "readme_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def listed(times: ModuleType) -> list[Any]:
    found: list[Any] = times.commands(times.documents())
    return found


def test_every_command_has_a_time_and_few_are_left_out(times: ModuleType) -> None:
    found = listed(times)
    assert len({one.command for one in found}) == len(found) >= 20
    assert [one.command for one in found][:3] == ["make demo", "make test", "normfree methods"]
    assert {one.left_out for one in found} == {"", "a GPU", "a download"}
    assert sum(bool(one.left_out) for one in found) == 2
    assert [one.command for one in found if one.until_interrupted] == ["normfree watch runs --page runs.html"]


@pytest.mark.parametrize(
    ("printed", "seconds"),
    [
        ("seconds", (10.0, False)),
        ("5 seconds", (5.0, True)),
        ("half a minute", (30.0, True)),
        ("a minute", (60.0, True)),
        ("½ minute", (30.0, True)),
        ("2½ minutes, the first time some more", (150.0, True)),
        ("half an hour", (1800.0, True)),
        ("minutes", (600.0, False)),
        ("too long", None),
    ],
)
def test_printed_times_are_read(times: ModuleType, printed: str, seconds: tuple[float, bool] | None) -> None:
    assert times.printed_seconds(printed) == seconds


def test_time_that_cannot_be_read_is_refused(times: ModuleType) -> None:
    text = times.documents().replace("trains | 70 seconds |", "trains | a while |")
    with pytest.raises(ValueError, match=r"expected a time such as '5 seconds' beside 'normfree lr .*', got 'a while'"):
        times.commands(text)


def test_times_in_the_comments_of_code_blocks_count(times: ModuleType) -> None:
    found = {one.command: one.printed for one in listed(times)}
    assert found["normfree diagnose torchvision:resnet50 -o report.html"] == "5 seconds"  # the end of its comment
    assert not any(command.startswith("torchrun") for command in found)


def test_two_times_of_one_command_are_refused(times: ModuleType) -> None:
    text = times.documents() + "\n```\nnormfree methods   # 5 seconds\n```\n"
    with pytest.raises(ValueError, match="expected one time for 'normfree methods', got 'seconds' and '5 seconds'"):
        times.commands(text)


@pytest.mark.parametrize(
    ("printed", "status", "ratio", "says"),
    [
        ("a minute", 0, 1.4, ""),
        ("a minute", 0, 1.6, "slower than printed"),
        ("a minute", 0, 0.6, "faster than printed"),
        ("seconds", 0, 0.1, ""),
        ("seconds", 0, 1.6, "slower than printed"),
        ("a minute", 2, 1.0, "status 2"),
        ("until ctrl-C", 0, None, ""),
    ],
)
def test_row_is_wrong_beyond_a_factor_of_one_and_a_half(
    times: ModuleType, printed: str, status: int, ratio: float | None, says: str
) -> None:
    row = {"command": "normfree", "printed": printed, "left_out": "", "status": status, "ratio": ratio, "seconds": 1.0}
    assert times.wrong(row) == says
    assert times.wrong({**row, "left_out": "a GPU"}) == ""
    assert times.table([row]).rows[0][-1] == says


def test_commands_run_in_the_folder_and_failures_are_kept(times: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "normfree").mkdir()
    (tmp_path / "normfree" / "here").write_text("yes")
    rows = times.measure(
        [times.Timed("cat here", "seconds"), times.Timed("cat there", "seconds"), times.Timed("no", "hours", "a GPU")],
        tmp_path / "normfree",
    )
    assert [row["status"] for row in rows] == [0, 1, None]
    assert "there" in rows[1]["output"]
    assert [times.wrong(row) for row in rows] == ["", "status 1", ""]


def test_stored_times_cover_every_command(times: ModuleType) -> None:
    if not times.STORED.exists():
        pytest.skip("not measured yet: python benchmarks/readme_times.py")
    stored = json.loads(times.STORED.read_text(encoding="utf-8"))
    assert {"command", "commit", "versions", "hardware", "date", "load"} <= stored.keys()
    assert [(row["command"], row["printed"]) for row in stored["rows"]] == [
        (one.command, one.printed) for one in listed(times)
    ]
    assert [times.wrong(row) for row in stored["rows"]] == [""] * len(stored["rows"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_table_run_in_the_order_printed(times: ModuleType, tmp_path: Path) -> None:
    """All but `make`, in a fresh clone; their times are not compared here."""
    chosen = [one for one in listed(times) if one.command.startswith("normfree")]
    rows = times.measure(chosen, times.fresh_clone(tmp_path))
    assert [row["command"] for row in rows if row["status"]] == [], [row["output"] for row in rows if row["status"]]
    assert sum(row["status"] == 0 for row in rows) == sum(not one.left_out for one in chosen)
