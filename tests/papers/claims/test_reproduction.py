"""Running a claim: whole files or none, and stored results instead of new runs."""

import errno
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from made_up_runs import reproduce
from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Column, Table
from normfree.storage.writing import to_json_values, write_json, write_sealed_json
from normfree_papers.claims.claim import Measurement, Settings
from normfree_papers.claims.registry import PAPERS
from normfree_papers.claims.reproduction import (
    collect,
    command,
    draw,
    panels_of,
    read_result,
    redraw,
    result_path,
    stored,
    summarize,
    tables_of,
)
from normfree_papers.claims.reproduction import run as run_claim
from normfree_papers.claims.run_cache import RunCache

FULL = Settings(seeds=(0, 1, 2))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_reproduce_writes_result_and_picture(make, tmp_path):
    make()
    result, judgement = reproduce("fixup/fake", FULL, tmp_path)
    assert judgement.status == "holds"
    assert result["values"]["one"]["values"] == [1.0, 1.1, 1.2]
    assert names(tmp_path) == ["fixup/fake.json", "fixup/fake.png"]


@pytest.mark.parametrize(("scale", "end"), [("full", "measured here"), ("quick", "measured here (quick)")])
def test_picture_is_titled_by_the_claim_and_its_place(make, tmp_path, monkeypatch, scale, end):
    titles = []
    monkeypatch.setattr("normfree.report.plots.write_plot", lambda panels, path, title: titles.append(title))
    claim = make()
    draw(claim, run_claim(claim, Settings(scale=scale)), tmp_path)
    assert titles == [f"fixup/fake: {claim.where}, {end}"]


def test_reproduce_takes_a_stored_result(make, counted, tmp_path):
    claim = make(measure=counted)
    first, _ = reproduce("fixup/fake", FULL, tmp_path)
    second, judgement = reproduce("fixup/fake", FULL, tmp_path)
    assert (counted.runs, judgement.status, second["date"]) == (1, "holds", first["date"])
    reproduce("fixup/fake", FULL, tmp_path, again=True)
    reproduce("fixup/fake", Settings(seeds=(0,)), tmp_path)  # other seeds
    reproduce("fixup/fake", Settings(scale="quick"), tmp_path)
    assert counted.runs == 4
    result_path(tmp_path, claim, "full", ".png").unlink()
    reproduce("fixup/fake", Settings(seeds=(0,)), tmp_path)
    assert counted.runs == 4
    assert result_path(tmp_path, claim, "full", ".png").exists()  # drawn from the stored numbers


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.faults
def test_interrupted_run_leaves_no_file(make, error, tmp_path):
    def stop(settings: Settings) -> Measurement:
        raise error

    make(measure=stop)
    with pytest.raises(error):
        reproduce("fixup/fake", FULL, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.faults
def test_interrupted_run_leaves_the_stored_result_and_the_next_one_ends_alike(make, monkeypatch, tmp_path):
    make()
    reproduce("fixup/fake", FULL, tmp_path)
    before = (tmp_path / "fixup" / "fake.json").read_bytes()

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            reproduce("fixup/fake", FULL, tmp_path, again=True)
    assert (tmp_path / "fixup" / "fake.json").read_bytes() == before
    assert names(tmp_path) == ["fixup/fake.json"]  # whose picture is drawn again
    assert reproduce("fixup/fake", FULL, tmp_path)[1].status == "holds"
    assert names(tmp_path) == ["fixup/fake.json", "fixup/fake.png"]


@pytest.mark.parametrize(
    ("where", "says"),
    [("normfree.storage.writing.secrets.token_hex", "the result"), ("normfree.report.plots.write_plot", "the picture")],
)
@pytest.mark.faults
def test_full_disk_is_one_sentence(make, monkeypatch, tmp_path, where, says):
    make()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(where, full)
    with pytest.raises(OSError, match=rf"could not write {says} '.*': No space left on device; free some room"):
        reproduce("fixup/fake", FULL, tmp_path)
    assert names(tmp_path) == (["fixup/fake.json"] if says == "the picture" else [])
    monkeypatch.undo()
    assert reproduce("fixup/fake", FULL, tmp_path)[1].status == "holds"


def test_picture_is_never_that_of_other_numbers(make, monkeypatch, tmp_path):
    claim = make()
    reproduce("fixup/fake", FULL, tmp_path)
    picture = result_path(tmp_path, claim, "full", ".png")
    old = picture.read_bytes()

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("normfree_papers.claims.reproduction.draw", stop)
        with pytest.raises(KeyboardInterrupt):
            reproduce("fixup/fake", Settings(seeds=(0, 1)), tmp_path)
    reproduce("fixup/fake", Settings(seeds=(0, 1)), tmp_path)
    stopped = picture.read_bytes()
    picture.unlink()
    reproduce("fixup/fake", Settings(seeds=(0, 1)), tmp_path, again=True)
    assert stopped == picture.read_bytes() != old


def test_reproduce_without_matplotlib_keeps_the_numbers(make, monkeypatch, tmp_path):
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError

    make()
    monkeypatch.setattr("normfree.report.plots.write_plot", missing)
    assert reproduce("fixup/fake", FULL, tmp_path)[1].status == "holds"
    assert names(tmp_path) == ["fixup/fake.json"]


def test_pictures_are_drawn_again_without_a_measurement(make, counted, run, tmp_path):
    claims = [make(measure=counted), make(id="fixup/other", measure=counted)]
    for claim in claims:
        reproduce(claim.id, FULL, tmp_path)
    files = {path: path.read_bytes() for path in (tmp_path / "fixup").iterdir()}
    pictures = [result_path(tmp_path, claim, "full", ".png") for claim in claims]
    for picture in pictures:
        picture.write_bytes(b"an older drawing")
    status, out, err = run("fixup/fake", "--draw", "--out", str(tmp_path))
    assert (status, out, err) == (0, "", f"drew 1 picture in {tmp_path}\n")
    assert [picture.read_bytes() == files[picture] for picture in pictures] == [True, False]
    assert redraw(tmp_path) == pictures
    assert {path: path.read_bytes() for path in (tmp_path / "fixup").iterdir()} == files
    assert counted.runs == 2


def test_picture_that_a_result_no_longer_has_is_removed(make, tmp_path):
    claim = make()
    reproduce("fixup/fake", FULL, tmp_path)
    path = result_path(tmp_path, claim, "full")
    write_sealed_json(path, {**json.loads(path.read_text()), "panels": []})
    assert redraw(tmp_path, [claim]) == []
    assert names(tmp_path) == ["fixup/fake.json"]


def test_drawing_without_matplotlib_is_one_line(make, run, monkeypatch, tmp_path):
    make()
    reproduce("fixup/fake", FULL, tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("--draw", "--out", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "a plot needs matplotlib" in err


def test_every_stored_result_of_this_repository_can_be_drawn(monkeypatch, tmp_path):
    """Each result has its picture there, also one of an earlier measurement."""
    monkeypatch.setattr("normfree.report.plots._DPI", 20)  # in a tenth of the time
    results = Path(__file__).parents[3] / "results"
    stored = {path: json.loads(path.read_text()) for paper in PAPERS for path in (results / paper).glob("*.json")}
    for path in stored:
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    drawn = redraw(tmp_path)
    pictured = [path for path in stored if stored[path]["panels"]]
    assert sorted(drawn) == sorted(tmp_path / path.parent.name / f"{path.stem}.png" for path in pictured)
    assert all((tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes() for path in stored)
    there = [path for paper in PAPERS for path in (results / paper).glob("*.png")]
    assert sorted(p.relative_to(tmp_path) for p in drawn) == sorted(p.relative_to(results) for p in there)


# A result's way to a file and back: whole or not at all, and nothing in it of the machine but its hardware.


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
