"""A sharded model is saved in parts without a pickle, and continues bit for bit, also from the checkpoint before."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import normfree
import normfree as nf
import sharded_saves
from normfree.train.run import checkpoint
from normfree.train.run.folder_check import verify_folder

pytestmark = pytest.mark.slow  # two processes take seconds to start


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, sharded_saves.__file__, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return folder / "run", [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


def test_resumed_model_equals_the_uninterrupted_one(job: Any) -> None:
    for said in job[1]:
        assert said["saved"] == "checkpoint-4"
        assert said["state"] == {"step": 4, "note": "four"}
        assert said["rate"] == 0.1  # of the optimizer that was saved
        assert said["resumed"] == said["uninterrupted"]


def test_damaged_shard_costs_the_steps_since_the_checkpoint_before(job: Any) -> None:
    for said in job[1]:
        assert said["after damage"] == {"step": 2}
        assert said["from the one before"] == said["uninterrupted"]


def test_every_process_writes_its_part_and_nothing_is_pickled(job: Any) -> None:
    names = job[1][0]["files"]
    assert len([name for name in names if name.startswith("checkpoint-4/shard-")]) == 2
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}


def test_refusals_are_raised_in_all_processes(job: Any) -> None:
    for said in job[1]:
        assert "expected the model that was saved in" in said["other model"]
        assert "could not write the checkpoint in" in said["no folder"]
        assert "expected the number of the step under 'step'" in said["no step"]
        assert "expected a checkpoint in" in said["nothing"]


def test_single_process_reads_and_checks_the_shards(job: Any, tmp_path: Path) -> None:
    run, (said, _) = job
    assert {file.name: file.state for file in verify_folder(run)[1]} == {
        "checkpoint-2/": "whole",
        "checkpoint-4/": "damaged",  # the control: a byte was flipped there
    }
    with pytest.raises(ValueError, match=r"expected an intact checkpoint, but .*checkpoint-4"):
        checkpoint.load(run)
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="or pass model= for sharded checkpoints"):
        nf.load(tmp_path)
    loaded = nf.load(tmp_path, model=model)
    assert {name: tensor.flatten().tolist() for name, tensor in loaded.state_dict().items()} == said["after two steps"]
    with pytest.raises(ValueError, match=r"which differs in '0\.weight'"):
        nf.load(tmp_path, model=nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))
