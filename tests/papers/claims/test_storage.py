"""A result's way to a file and back: whole or not at all, and nothing in it of the machine but its hardware."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from normfree.files import to_json_values, write_json
from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Column, Table
from normfree_papers.claims.claim import Measurement, Settings
from normfree_papers.claims.run_cache import RunCache
from normfree_papers.claims.storage import (
    collect,
    command,
    panels_of,
    read_result,
    result_path,
    stored,
    summarize,
    tables_of,
)

SETTINGS = Settings(scale="quick", seeds=(0, 1, 2), data=Path(".data"))


@pytest.fixture
def result(fake):
    return collect(fake, SETTINGS, fake.measure(SETTINGS), 1.25)


def test_result_comes_back_as_it_was(result, tmp_path):
    result["values"]["three"] = {"mean": math.inf, "values": [-math.inf, math.nan]}
    path = tmp_path / "deep" / "one.json"
    write_json(path, result)
    back = read_result(path)
    assert json.dumps(to_json_values(back)) == json.dumps(to_json_values(result))
    assert back["values"]["three"]["mean"] == math.inf
    assert math.isnan(back["values"]["three"]["values"][1])
    assert math.isnan(panels_of(back)[0].curves[1].values[0])
    assert panels_of(back)[0].curves[0] == panels_of(result)[0].curves[0]


def test_panels_and_tables_come_back_whole(fake, tmp_path):
    curve = Curve("one", (1.0, math.inf), (10.0, 100.0), spread=(0.5, 0.0), crossed=(1,))
    panel = Panel(
        "p", (curve,), log_x=True, levels=(ReferenceLine("chance", 0.1),), stages=(20,), point_names=("a", "nan")
    )
    named = Panel("p", (Curve("one", (1.0, 2.0)),), names=("inf", "nan"))
    table = Table("t", (Column("a"), Column("b", "right")), (("1", "nan"),))
    write_json(
        tmp_path / "one.json",
        collect(fake, SETTINGS, Measurement(values={}, panels=(panel, named), tables=(table,)), 0),
    )
    back = read_result(tmp_path / "one.json")
    assert panels_of(back) == (panel, named)
    assert [(t.title, [c.name for c in t.columns], t.rows) for t in tables_of(back)] == [("t", ["a", "b"], table.rows)]


def test_texts_that_look_like_numbers_stay_texts(result, tmp_path):
    result["notes"] = ["nan", "inf"]
    result["panels"][0]["title"] = "inf"
    write_json(tmp_path / "one.json", result)
    back = read_result(tmp_path / "one.json")
    assert (back["notes"], back["panels"][0]["title"]) == (["nan", "inf"], "inf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the result of a claim as it was written"),
        ('{"claim": "fixup/fake", "sca', "expected the result of a claim as it was written"),
        ("[1, 2]", "it holds no JSON object"),
        ('{"claim": "fixup/fake"}', "expected a result with 'scale'"),
        ('{"claim": "fixup/fake", "scale": "full", "seeds": [0], "values": [1], "panels": []}', "with 'values'"),
    ],
)
def test_damaged_file_is_one_sentence(text, says, tmp_path):
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        read_result(path)
    assert "\n" not in str(caught.value)
    assert "--again" in str(caught.value)


def test_bytes_that_are_no_text_are_one_sentence(tmp_path):
    (tmp_path / "one.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected the result of a claim as it was written"):
        read_result(tmp_path / "one.json")


def test_summary_has_mean_deviation_and_the_numbers():
    assert summarize([1.0, 2.0, 6.0]) == {"mean": 3.0, "std": pytest.approx(math.sqrt(7)), "values": [1.0, 2.0, 6.0]}
    assert summarize(3) == {"mean": 3.0, "values": [3.0]}
    assert summarize([1.0, math.inf])["mean"] == math.inf
    assert math.isnan(summarize([1.0, math.nan])["std"])
    with pytest.raises(ValueError, match="expected a number"):
        summarize([])


def test_path_tells_the_scale(fake):
    assert result_path("results", fake, "full") == Path("results/fixup/fake.json")
    assert result_path("results", fake, "quick", ".png") == Path("results/fixup/fake.quick.png")


def test_stored_result_is_of_this_measurement(fake, result, tmp_path):
    assert stored(tmp_path, fake, "quick") is None
    write_json(result_path(tmp_path, fake, "quick"), result)
    assert stored(tmp_path, fake, "quick") == read_result(result_path(tmp_path, fake, "quick"))
    assert stored(tmp_path, replace(fake, version=2), "quick") is None
    write_json(result_path(tmp_path, fake, "full"), result)
    with pytest.raises(ValueError, match="expected the full result of 'fixup/fake'"):
        stored(tmp_path, fake, "full")


# Where a number comes from


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(seeds=(0, 1, 2)), "normfree reproduce fixup/fake"),
        (Settings(scale="quick"), "normfree reproduce fixup/fake --quick"),
        (Settings(seeds=(0, 1), device="cuda"), "normfree reproduce fixup/fake --seeds 2 --device cuda"),
        (Settings(seeds=(0, 1, 2), data=Path("my data")), "normfree reproduce fixup/fake --data-dir 'my data'"),
        (Settings(seeds=(0, 1, 2), data=Path("/secret/place")), "normfree reproduce fixup/fake --data-dir DIR"),
        (Settings(seeds=(0, 1, 2), data=Path("../place")), "normfree reproduce fixup/fake --data-dir DIR"),
    ],
)
def test_command_runs_the_claim_again(fake, settings, expected):
    assert command(replace(fake, needs_data="CIFAR-10"), settings) == expected


def test_command_of_runs_that_were_found_makes_them(fake, tmp_path):
    trained = replace(fake, needs_training=True)
    for only, device in (((), " --device cuda"), (None, ""), (("a run",), "")):
        settings = Settings(seeds=(0, 1, 2), runs=RunCache(tmp_path, tmp_path, only=only))
        assert command(trained, settings) == f"normfree reproduce fixup/fake{device}"
    quick = Settings(scale="quick", runs=RunCache(tmp_path, tmp_path, only=()))
    assert command(trained, quick) == "normfree reproduce fixup/fake --quick"


def test_result_names_no_folder_user_or_host(result):
    text = json.dumps(to_json_values(result))
    for secret in (str(Path.cwd()), str(Path.home()), os.uname().nodename, "/tmp"):
        assert secret not in text
    assert set(result["versions"]) == {"python", "torch", "numpy", "normfree"}
    assert result["hardware"]["cores"] == os.cpu_count()
    assert result["hardware"]["cpu"]


def test_measurement_may_hold_single_numbers(fake):
    made = collect(fake, SETTINGS, Measurement(values={"one": 1.0}), 0.0)
    assert made["values"] == {"one": {"mean": 1.0, "values": [1.0]}}
    assert (made["panels"], made["tables"], made["notes"]) == ([], [], [])
