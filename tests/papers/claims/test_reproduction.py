"""Running a claim: files at the end or none, stored results taken, and the command line around it."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normfree.cli import main
from normfree_papers.claims.claim import Check, Measurement, Settings
from normfree_papers.claims.registry import PAPERS, all_claims
from normfree_papers.claims.reproduction import draw, redraw, reproduce
from normfree_papers.claims.reproduction import run as run_claim
from normfree_papers.claims.storage import result_path

Run = Callable[..., tuple[int, str, str]]
FULL = Settings(seeds=(0, 1, 2))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["reproduce", *arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def counted(fake):
    """A measurement that counts its runs."""

    def once(settings: Settings) -> Measurement:
        once.runs += 1
        return fake.measure(settings)

    once.runs = 0
    return once


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# The library


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
def test_interrupted_run_leaves_no_file(make, error, tmp_path):
    def stop(settings: Settings) -> Measurement:
        raise error

    make(measure=stop)
    with pytest.raises(error):
        reproduce("fixup/fake", FULL, tmp_path)
    assert names(tmp_path) == []


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
    [("normfree.files.tempfile.mkstemp", "the result"), ("normfree.report.plots.write_plot", "the picture")],
)
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


def test_pictures_are_drawn_anew_without_a_measurement(make, counted, run, tmp_path):
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
    path.write_text(json.dumps({**json.loads(path.read_text()), "panels": []}))
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
    """Each has its picture there, and no other has."""
    monkeypatch.setattr("normfree.report.plots._DPI", 20)  # in a tenth of the time
    results = Path(__file__).parents[3] / "results"
    kept = [path for paper in PAPERS for path in (results / paper).glob("*.json")]
    for path in kept:
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    drawn = redraw(tmp_path)
    pictured = [path for path in kept if json.loads(path.read_text())["panels"]]
    assert sorted(drawn) == sorted(tmp_path / path.parent.name / f"{path.stem}.png" for path in pictured)
    assert all((tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes() for path in kept)
    there = [path for paper in PAPERS for path in (results / paper).glob("*.png")]
    assert sorted(p.relative_to(tmp_path) for p in drawn) == sorted(p.relative_to(results) for p in there)


# The command line


def test_command_prints_checks_and_files(make, run, tmp_path):
    make()
    status, out, _ = run("fixup/fake", "--seeds", "2", "--out", str(tmp_path))
    assert status == 0
    line = next(line for line in out.splitlines() if "one is about 1" in line)
    assert " ".join(line.split()) == "✓ holds one is about 1 1 0.8 to 1.2 1.05 ± 0.071"
    assert "holds: 2 of 2 checks hold (2 seeds" in out
    assert str(tmp_path / "fixup" / "fake.json") in out.replace("\n", "")
    assert str(tmp_path / "fixup" / "fake.png") in out.replace("\n", "")
    assert "\x1b[" not in out


def test_command_fails_with_status_1(make, run, tmp_path):
    make(checks=(Check(name="one", statement="one is large", low=5.0, why="made up"),))
    status, out, _ = run("fixup/fake", "--quick", "--out", str(tmp_path))
    assert status == 1
    assert "fails: 0 of 1 checks hold, 1 fail" in out
    assert names(tmp_path) == ["fixup/fake.quick.json", "fixup/fake.quick.png"]


def test_command_judges_stored_results_of_any_seeds(make, run, counted, tmp_path):
    make(measure=counted)
    run("fixup/fake", "--seeds", "2", "--out", str(tmp_path))
    status, out, _ = run("fixup/fake", "--out", str(tmp_path), "--json")
    assert (status, counted.runs) == (0, 1)
    assert json.loads(out)[0]["result"]["seeds"] == [0, 1]
    run("fixup/fake", "--out", str(tmp_path), "--again")
    assert counted.runs == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("robust/fig22",), "unknown claim 'robust/fig22'; did you mean 'robust/fig2'"),
        (("robust/fig2", "--list"), "expected --list alone"),
        (("robust/table1", "--device", "abacus"), "expected a device such as cpu or cuda, got 'abacus'"),
        (("wninit/table2", "--quick", "--data", "nowhere"), "expected CIFAR-10 in the folder 'nowhere'"),
    ],
)
def test_usage_errors_are_one_line(run, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "unknown" not in says or err.count("\n") == 1  # a name that is not known says all
    assert "Traceback" not in err
    assert names(tmp_path) == []


def test_unknown_claim_is_refused_before_any_is_run(make, run, counted, tmp_path):
    make(measure=counted)
    assert run("fixup/fake", "fixup/fkae", "--out", str(tmp_path))[0] == 2
    assert counted.runs == 0


def test_only_that_names_no_run_is_told(make, run, tmp_path):
    status, _, err = run("fixup/table4", "--only", "fixpu", "--out", str(tmp_path))
    assert status == 2
    assert "expected a part of a run's name in --only, got 'fixpu'; there are: " in err
    make()
    status, out, err = run("fixup/fake", "--only", "fixpu", "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert "expected claims that train with --only, got fixup/fake; leave one of them out" in err


def test_claim_without_its_runs_is_not_run_wherever_it_is_shown(run, tmp_path):
    out = ("--out", str(tmp_path))
    status, said, _ = run("fixup/table4", "--kept", *out)
    assert status == 0
    assert "2 of 2 training runs are missing, 42 min on one H200: Fixup, seed 0 (21 min)" in said
    assert "not run: 0 of 4 checks hold, 4 not measured" in said
    assert names(tmp_path) == []  # a file would only hide that there is nothing
    assert json.loads(run("fixup/table4", "--kept", "--json", *out)[1])[0]["status"] == "not run"
    records = {record["id"]: record for record in json.loads(run("--list", "--json", *out)[1])}
    assert records["fixup/table4"]["status"] == "not run"
    assert marks(run("--list", *out)[1]) == ["–"] * len(all_claims())


def test_damaged_result_is_one_line_and_again_mends_it(make, run, tmp_path):
    claim = make()
    path = result_path(tmp_path, claim, "full")
    path.parent.mkdir()
    path.write_text("{")
    status, _, err = run("fixup/fake", "--out", str(tmp_path))
    assert status == 2
    assert "expected the JSON of a result" in err
    assert run("fixup/fake", "--out", str(tmp_path), "--again")[0] == 0


def test_long_runs_show_progress_in_plain_lines(make, run, monkeypatch, tmp_path):
    monkeypatch.setattr("normfree.report.progress.EVERY", 0.0)
    monkeypatch.setattr("normfree.report.progress._SHARE", 0.0)
    make()
    _, _, err = run("fixup/fake", "--out", str(tmp_path))
    assert "fixup/fake: 0 of 1 done after 0 s, the only step" in err


def marks(listed: str) -> list[str]:
    """What stands beside each claim."""
    return [line.split()[1] for line in listed.splitlines() if "/" in line.partition(" ")[0]]


def test_list_prints_every_claim(run, tmp_path):
    status, out, _ = run("--list", "--out", str(tmp_path))
    assert status == 0
    firsts = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [first for first in firsts if "/" in first] == [claim.id for claim in all_claims()]
    assert all(claim.statement in out for claim in all_claims())
    assert marks(out) == ["–"] * len(all_claims())
    assert run("--out", str(tmp_path))[:2] == (2, out)  # without a claim, those there are


def test_list_as_json_tells_what_was_measured(make, run, tmp_path):
    make()
    run("fixup/fake", "--quick", "--out", str(tmp_path))
    status, out, _ = run("--list", "--json", "--out", str(tmp_path))
    assert status == 0
    records = {record["id"]: record for record in json.loads(out)}
    assert list(records) == [claim.id for claim in all_claims()]
    fake = records["fixup/fake"]
    assert (fake["status"], fake["checks"][0]["measured"], fake["checks"][0]["verdict"]) == ("holds", 1.0, "holds")
    assert fake["result"]["command"] == "normfree reproduce fixup/fake --quick"
    assert records["robust/fig2"]["status"] == "not run"
    assert records["robust/fig2"]["result"] is None
    wanted = {"id", "where", "statement", "paper_value", "how", "cost", "status", "checks", "result"}
    assert all(wanted <= set(record) for record in records.values())
