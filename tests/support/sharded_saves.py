"""Save and load a model that FSDP2 shards over two gloo processes.

As a script: `sharded_saves.py FOLDER` writes what both saw as FOLDER/said-RANK.json. It imports torch once and forks.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from normfree.train.run.sharded_checkpoint import load_sharded_, save_sharded


def made(seed: int, mesh: DeviceMesh, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, list[float]]:
    tensors: dict[str, Tensor] = model.state_dict()
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).flatten().tolist() for n, t in tensors.items()}


def refusal(work: Any) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "accepted"


def live(folder: Path, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    run = folder / "run"
    model, optimizer = made(0, mesh)
    train(model, optimizer, 0, 2)
    save_sharded(run, model, {"step": 2}, optimizer=optimizer)
    said: dict[str, Any] = {"after two steps": whole(model)}
    train(model, optimizer, 2, 4)
    said |= {"saved": save_sharded(run, model, {"step": 4, "note": "four"}, optimizer=optimizer).name}
    train(model, optimizer, 4, 6)
    said["uninterrupted"] = whole(model)

    model, optimizer = made(1, mesh)
    said["state"] = load_sharded_(run, model, optimizer=optimizer)
    said["rate"] = optimizer.param_groups[0]["lr"]
    train(model, optimizer, 4, 6)
    said["resumed"] = whole(model)
    said["other model"] = refusal(lambda: load_sharded_(run, made(0, mesh, width=6)[0]))
    said["no folder"] = refusal(lambda: save_sharded(folder / "none", model, {"step": 1}))
    said["no step"] = refusal(lambda: save_sharded(run, model, {}))
    said["nothing"] = refusal(lambda: load_sharded_(folder / "none", model))
    said["files"] = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())

    dist.barrier()
    if rank == 0:
        shard = sorted((run / "checkpoint-4").glob("*.safetensors"))[-1]
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
    model, optimizer = made(2, mesh)
    said["after damage"] = load_sharded_(run, model, optimizer=optimizer)
    train(model, optimizer, 2, 6)
    said["from the one before"] = whole(model)
    return said


def main(out: str) -> None:
    torch.set_num_threads(1)
    folder = Path(out)
    (folder / "run").mkdir()
    with tempfile.NamedTemporaryFile() as meeting:
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", store=dist.FileStore(meeting.name, 2), rank=rank, world_size=2)
        said = live(folder, rank, init_device_mesh("cpu", (2,)))
        dist.destroy_process_group()
        (folder / f"said-{rank}.json").write_text(json.dumps(said), encoding="utf-8")
        if not child:
            os._exit(0)
        _, status = os.waitpid(child, 0)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
