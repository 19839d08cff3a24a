"""FSDP2 on two gloo processes gives the numbers of one process: training, clipping, diagnosis and monitor."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import normfree
import sharded_steps
from normfree.methods import names


def run(out: Path, *methods: str) -> dict[str, Any]:
    """What both processes found."""
    script = Path(sharded_steps.__file__)
    paths = os.pathsep.join((str(Path(normfree.__file__).parents[1]), str(script.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(out), *methods],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def check(found: dict[str, Any]) -> None:
    """Whether the sharded run did what the other did."""
    alone, sharded = found["losses"]
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert alone[-1] != pytest.approx(alone[0], rel=1e-4)
    assert found["apart"] < 1e-6
    assert found["moved"] > 1e-3  # the weights learn, so that being near each other means something
    assert found["measured"] == [0, 2]
    first, same_first, last, same_last = found["diagnoses"]
    assert same_first == pytest.approx(first, rel=1e-4, abs=1e-7)
    assert same_last == pytest.approx(last, rel=1e-4, abs=1e-7)
    assert last != pytest.approx(first, rel=1e-4, abs=1e-7)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    found = run(tmp_path / "found.json", "fixup")
    check(found["fixup"])
    for whole, sharded in found["clipping"]:
        assert sharded == pytest.approx(whole, rel=1e-5, abs=1e-8)
    assert all(max(map(abs, whole)) < 0.2 for whole, _ in found["clipping"][:-1])  # normal numbers, clipped 50-fold
    assert "pass plan=, from normfree.discover before fully_shard" in found["refusal"]


def convertible() -> list[str]:
    """The methods that the network can be converted to."""
    found = []
    for method in names():
        try:
            sharded_steps.converted(method)
        except ValueError:
            continue
        found.append(method)
    return found


@pytest.mark.slow
def test_every_method_trains_sharded(tmp_path: Path) -> None:
    methods = convertible()
    assert {"fixup", "nf", "skipinit", "rezero", "wn"} <= set(methods)
    found = run(tmp_path / "found.json", *methods)
    for method in methods:
        check(found[method])
