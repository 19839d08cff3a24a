"""Where runs are trained: which engine a name chooses, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from normfree.comparison.run_executor import LocalProcesses, choose_executor


def test_this_machine_is_the_default_engine() -> None:
    assert choose_executor("local", shared=Path("runs")) == LocalProcesses(1)
    assert choose_executor("local", shared=Path("runs"), jobs=3) == LocalProcesses(3)


@pytest.mark.parametrize(
    ("on", "options", "address", "cpus", "gpus"),
    [
        ("ray", {}, "", 1, 0),
        ("ray", {"device": "cuda"}, "", 1, 1),
        ("ray", {"device": "cuda:0", "gpus_per_run": 0.25}, "", 1, 0.25),
        ("ray://head:10001", {"cpus_per_run": 4, "gpus_per_run": 2}, "ray://head:10001", 4, 2),
    ],
)
def test_cluster_gets_the_resources_of_a_run(
    on: str, options: dict[str, Any], address: str, cpus: float, gpus: float
) -> None:
    pytest.importorskip("ray")
    engine: Any = choose_executor(on, shared=Path("runs"), **options)
    assert (engine.address, engine.cpus, engine.gpus) == (address, cpus, gpus)
    assert engine.shared == Path("runs").absolute()


@pytest.mark.parametrize(
    ("on", "options", "says"),
    [
        ("slurm", {}, "expected 'local', 'ray' or 'ray://HOST:PORT' as the place of the runs, got 'slurm'"),
        ("raylet", {}, "got 'raylet'"),
        (
            "local",
            {"gpus_per_run": 1},
            "expected no GPUs per run on this machine, got 1; leave the number out, or run on a cluster",
        ),
        ("local", {"jobs": 0}, "expected at least 1 job, got 0"),
        ("ray", {"jobs": 4}, "a cluster runs as many runs as its resources allow, got 4 jobs"),
        ("ray", {"cpus_per_run": 0}, "expected CPUs per run above 0, got 0"),
        ("ray", {"cpus_per_run": float("nan")}, "expected CPUs per run above 0"),
        ("ray", {"gpus_per_run": -1}, "expected GPUs per run as a share from 0 to 1 or as a whole number, got -1"),
        ("ray", {"gpus_per_run": 1.5}, "got 1.5"),
    ],
)
def test_wrong_places_and_resources_are_refused(on: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_executor(on, shared=Path("runs"), **options)


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.errors.find_spec", lambda name: None)
    says = r"^a run on a cluster needs ray, which is not installed; .*, run: pip install '.\[cluster\]'$"
    with pytest.raises(ValueError, match=says):
        choose_executor("ray", shared=Path("runs"))
