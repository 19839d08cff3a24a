"""Claims: what their records refuse, and the registry in which each is found by its id."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import normfree
from normfree_papers.claims.claim import Check, Settings, near
from normfree_papers.claims.judgement import admits
from normfree_papers.claims.registry import MODULES, PAPERS, all_claims, get, register


def test_check_wants_a_range_and_a_reason():
    for wrong in ({"low": 1.0, "high": 0.0, "why": "x"}, {"why": "x"}, {"low": 1.0, "why": ""}):
        with pytest.raises(ValueError, match="expected a range"):
            Check(name="x", statement="x", **wrong)


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValueError, match="unknown scale 'ful'; did you mean 'full'"):
        Settings(scale="ful")  # type: ignore[arg-type]
    for seeds in ((), (1, 1)):
        with pytest.raises(ValueError, match="expected one or more different seeds"):
            Settings(seeds=seeds)


def test_near_expects_an_error_or_a_share_around_a_value():
    absolute, relative = near("x", 2.0, 0.5, paper="two"), near("x", 2.0, share=0.5)
    assert (absolute.low, absolute.high, absolute.paper, absolute.main) == (1.5, 2.5, "two", True)
    assert (relative.low, relative.high) == (1.0, 3.0)
    check = absolute.derived("x is about two", why="the text")
    assert admits(check, 2.5)
    assert not admits(check, 2.6)


# The registry: claims in one order, found by their ids, each from its own module.


def fresh(code: str) -> str:
    """The output of code in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def test_get_names_the_closest_claim():
    with pytest.raises(ValueError, match=r"unknown claim 'robust/fig22'; did you mean 'robust/fig2'"):
        get("robust/fig22")


def test_register_refuses_a_taken_id_and_an_unknown_paper():
    taken = all_claims()[0]
    with pytest.raises(ValueError, match="expected a new claim"):
        register(taken)
    with pytest.raises(ValueError, match="unknown paper of a claim 'fixpu'; did you mean 'fixup'"):
        register(replace(taken, id="fixpu/fig3"))


def test_claims_stand_in_the_order_of_the_papers():
    papers = [one.paper for one in all_claims()]
    assert list(dict.fromkeys(papers)) == list(PAPERS)
    assert papers == sorted(papers, key=list(PAPERS).index)


def test_claims_stand_in_one_order_whatever_is_imported_first():
    code = "import normfree_papers.{}, normfree_papers.claims.registry as e; print([one.id for one in e.all_claims()])"
    printed = [fresh(code.format(name)) for name in ("fixup.image_tables", "normdead.batchnorm_parts")]
    assert printed == [f"{[one.id for one in all_claims()]}\n"] * 2


def test_table_names_the_claims_of_every_module():
    code = """
import json
from importlib import import_module
from normfree_papers.claims import registry
found = {}
for module in registry.MODULES:
    before = set(registry._CLAIMS)
    import_module(f"normfree_papers.{module}")
    found[module] = [name.partition("/")[2] for name in registry._CLAIMS if name not in before]
print(json.dumps(found))
"""
    assert json.loads(fresh(code)) == {module: list(names) for module, names in MODULES.items()}


TRAINING = {"normfree.train.engine", "normfree.data", "normfree.kernels", "normfree.conversion", "normfree.models"}


@pytest.mark.parametrize(
    ("claim_id", "unused"),
    [("fixup/fig3", TRAINING), ("robust/fig7", set())],  # fig7 has no stored result, and its missing runs are estimated
)
def test_judging_imports_no_other_paper_and_stored_runs_nothing_that_trains(claim_id, unused, stored_results):
    code = f"""
import json, sys
from normfree.cli import main
try:
    main(["reproduce", {claim_id!r}, "--kept", "--json", "--out", {str(stored_results)!r}])
except SystemExit:
    print(json.dumps([name for name in sys.modules if name.startswith("normfree")]))
"""
    records, modules = fresh(code).rsplit("\n", 2)[:2]
    assert [record["id"] for record in json.loads(records)] == [claim_id]
    papers = {name.split(".")[1] for name in json.loads(modules) if name.startswith("normfree_papers.")}
    assert papers - {"claims"} == {claim_id.partition("/")[0]}
    assert not unused & set(json.loads(modules))
