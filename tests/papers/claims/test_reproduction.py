"""Running a claim: whole files or none, and stored results instead of new runs."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from normfree.files import write_sealed_json
from normfree_papers.claims.claim import Measurement, Settings
from normfree_papers.claims.registry import PAPERS, all_claims
from normfree_papers.claims.reproduction import draw, redraw, reproduce
from normfree_papers.claims.reproduction import run as run_claim
from normfree_papers.claims.storage import result_path

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
    [("normfree.files.secrets.token_hex", "the result"), ("normfree.report.plots.write_plot", "the picture")],
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
    """Each result of today's measurement has its picture there; one of an earlier measurement keeps its own."""
    monkeypatch.setattr("normfree.report.plots._DPI", 20)  # in a tenth of the time
    results = Path(__file__).parents[3] / "results"
    version = {claim.id: claim.version for claim in all_claims()}
    stored = {path: json.loads(path.read_text()) for paper in PAPERS for path in (results / paper).glob("*.json")}
    kept = [path for path, result in stored.items() if result["version"] == version[result["claim"]]]
    for path in kept:
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    drawn = redraw(tmp_path)
    pictured = [path for path in kept if stored[path]["panels"]]
    assert sorted(drawn) == sorted(tmp_path / path.parent.name / f"{path.stem}.png" for path in pictured)
    assert all((tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes() for path in kept)
    there = [path for paper in PAPERS for path in (results / paper).glob("*.png")]
    earlier = {path.with_suffix(".png") for path in stored.keys() - set(kept)}
    assert sorted(p.relative_to(tmp_path) for p in drawn) == sorted(
        p.relative_to(results) for p in set(there) - earlier
    )
