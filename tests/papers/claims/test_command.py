"""The command `normfree reproduce`: its output, its exit status, and what it does without results or papers."""

import json
import re
import sys
from pathlib import Path

import pytest

from normfree_papers.claims import reproduction
from normfree_papers.claims.claim import Check, Cost
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.reproduction import result_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_command_prints_checks_and_files(make, run, tmp_path):
    make()
    status, out, _ = run("fixup/fake", "--seeds", "3", "--out", str(tmp_path))
    assert status == 0
    line = next(line for line in out.splitlines() if "one is about 1" in line)
    assert " ".join(line.split()) == "✓ holds one is about 1 1 0.8 to 1.6 reading 1.10 [0.85, 1.35] 3"
    assert "holds: 2 of 2 checks hold (3 seeds" in out
    assert str(tmp_path / "fixup" / "fake.json") in out.replace("\n", "")
    assert str(tmp_path / "fixup" / "fake.png") in out.replace("\n", "")
    assert "\x1b[" not in out


def test_command_fails_with_status_1(make, run, tmp_path):
    make(checks=(Check(name="one", statement="one is large", low=5.0, why="made up", exact=True),))
    status, out, _ = run("fixup/fake", "--quick", "--out", str(tmp_path))
    assert status == 1
    assert "fails: 0 of 1 check holds, 1 fail" in out
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
        (("robust/fig2", "--list"), "--list cannot be combined with"),
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "file/results"), "expected --out to be a folder, but"),
        (("--write", "file/claims.md"), "expected the place of --write to be a folder, but"),
    ],
)
def test_place_that_cannot_be_written_is_refused_before_any_run(
    make, run, counted, arguments, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    make(measure=counted)
    status, _, err = run("fixup/fake", *arguments)
    assert (status, counted.runs) == (2, 0)
    assert says in err


def test_only_that_names_no_run_is_told(make, run, tmp_path):
    status, _, err = run("fixup/table4", "--only", "fixpu", "--out", str(tmp_path))
    assert status == 2
    assert "--only needs a part of a run's name; 'fixpu' is in none of: " in err
    make()
    status, out, err = run("fixup/fake", "--only", "fixpu", "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert "--only needs claims with training runs; fixup/fake has none; leave one of them out" in err


def test_claim_without_its_runs_is_not_run_wherever_it_is_shown(run, tmp_path):
    out = ("--out", str(tmp_path))
    status, said, _ = run("fixup/table4", "--kept", *out)
    assert status == 0
    assert re.search(r"(\d+) of \1 training runs are missing, \d+ (min|h) on one H200: Fixup, seed 0 \(\d+ min\)", said)
    assert re.search(r"not run: 0 of (\d+) checks hold, \1 not measured", said)
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
    assert "expected the result of a claim as it was written" in err
    assert run("fixup/fake", "--out", str(tmp_path), "--again")[0] == 0


def test_long_runs_show_progress_in_plain_lines(make, run, monkeypatch, tmp_path):
    monkeypatch.setattr("normfree.report.terminal.EVERY", 0.0)
    monkeypatch.setattr("normfree.report.terminal._SHARE", 0.0)
    make()
    _, _, err = run("fixup/fake", "--out", str(tmp_path))
    assert "fixup/fake: 0 of 1 done after 0 s, the only step" in err


def marks(listed: str) -> list[str]:
    """The mark beside each claim."""
    return [line.split()[1] for line in listed.splitlines() if "/" in line.partition(" ")[0]]


def test_list_prints_every_claim(run, tmp_path):
    status, out, _ = run("--list", "--out", str(tmp_path))
    assert status == 0
    firsts = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [first for first in firsts if "/" in first] == [claim.id for claim in all_claims()]
    assert all(len(line) <= 100 for line in out.splitlines())
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
    assert (fake["status"], fake["deciding"], fake["precision"]) == ("undecided", "one", "float32")
    one, two = fake["checks"]
    assert (one["measured"], one["values"], one["interval"], one["verdict"]) == (1.0, [1.0], None, "undecided")
    assert (two["source"], two["exact"], two["verdict"]) == ("derived", True, "holds")
    assert fake["result"]["command"] == "normfree reproduce fixup/fake --quick"
    assert records["robust/fig2"]["status"] == "not run"
    assert records["robust/fig2"]["result"] is None
    wanted = {"id", "where", "statement", "paper_value", "how", "cost", "status", "deciding", "checks", "result"}
    wanted |= {"stand_in", "departures", "precision", "stale", "mutants", "lacks"}
    assert all(wanted <= set(record) for record in records.values())


# Without results, or without the papers


def test_claim_without_stored_results_tells_its_cost_before_it_is_run(make, run, tmp_path, monkeypatch):
    def measure(settings):
        sys.stderr.write("measured\n")
        return claim.measure(settings)

    claim = make()
    make(id="fixup/other", measure=measure, cost=Cost(quick_seconds=5, full_seconds=7200, device="gpu"))
    monkeypatch.chdir(tmp_path)
    status, _, err = run("fixup/other", "fixup/fake")
    assert status == 0
    first, second = err.splitlines()[:2]
    assert first.startswith(
        "note: no stored results in 'results'; a new run takes about 2 h on one H200 (fixup/other), 1 s on one core "
        "(fixup/fake); for the stored results run in the repository"
    )
    assert second == "measured"
    assert run("fixup/other")[2] == ""  # there are results now


def test_listing_and_writing_without_stored_results_say_so(make, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make()
    status, out, err = run("--list")
    assert (status, marks(out)) == (0, ["–"] * len(all_claims()))
    assert err.startswith("note: no stored results in 'results'; for the stored results run in the repository")
    status, _, err = run("--write", "claims.md")
    assert (status, names(tmp_path)) == (2, [])
    assert "expected a folder of results at 'results', found none" in err
    status, _, err = run("fixup/fake", "--quick", "--write", "claims.md")
    assert status == 0
    assert err.startswith("note: no stored results in 'results'; a new run takes about 1 s on one core (fixup/fake); ")
    assert "claims.md" in names(tmp_path)


def test_missing_papers_are_one_sentence(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "normfree_papers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])  # where nothing is found
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)])
    status, out, err = run("fixup/fig3")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "expected the package normfree_papers, which holds the claims, beside normfree, found none" in err


def test_stored_result_is_judged_without_building_a_network(run, monkeypatch, stored_results):
    """Missing training runs are estimated only when a new result is stored or printed."""
    monkeypatch.setattr("normfree_papers.claims.run_training.build", None)
    read: list[Path] = []
    read_result = reproduction.read_result

    def counted_read(path: Path) -> reproduction.Result:
        read.append(path)
        return read_result(path)

    monkeypatch.setattr(reproduction, "read_result", counted_read)
    claim = next(c for c in all_claims() if c.needs_training and reproduction.stored(stored_results, c, "full"))
    read.clear()
    _, out, _ = run(claim.id, "--out", str(stored_results))
    assert "stored" in out
    assert read == [result_path(stored_results, claim, "full")]  # once
