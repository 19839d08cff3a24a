"""The training runs of claims on a cluster: kept as those of this machine are."""

from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401  so that this file is left out where ray is not installed

from normfree.train import TrainConfig
from normfree_papers.claims.run_cache import RunCache
from ray_nodes import started_nodes

WANTED = {
    name: TrainConfig(model="resmlp-1-8", method=name, epochs=1, batch_size=1000, validation=0.5)
    for name in ("fixup", "he_in")
}
# What may differ between two makings; a run on a cluster has the threads of its CPUs.
MAY_DIFFER = ("seconds", "setup_seconds", "images_per_second", "date", "files", "sha256", "hardware")


def _kept(folder: Path, **options: Any) -> dict[str, Any]:
    found = RunCache(folder / "kept", folder / "work", **options)(WANTED)
    plain = {name: dict(run.result) for name, run in found.items() if run is not None}
    return {name: {key: run[key] for key in run if key not in MAY_DIFFER} for name, run in plain.items()}


@pytest.mark.slow
def test_runs_of_a_cluster_are_kept_like_others(tmp_path: Path) -> None:
    one = _kept(tmp_path / "one")
    with started_nodes():
        two = _kept(tmp_path / "two", jobs=None, on="ray", resources={"cpus_per_run": 1.0})
    assert two == one
    assert set(two) == {"fixup", "he_in"}
    assert all("canary" in run for run in two.values())
    names = [sorted(path.name for path in (tmp_path / place / "kept").iterdir()) for place in ("one", "two")]
    assert names[0] == names[1]
