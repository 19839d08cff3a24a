"""Train converted networks sharded by FSDP2 over two gloo processes, and on one process without it.

As a script: `sharded_steps.py OUT METHOD…` writes what both did as JSON. It imports torch once and forks, because two
imports take longer than the training.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import normfree as nf
from normfree.optim import clip_adaptively_, clip_grad_norm_

STEPS, CLIP = 4, 0.02


class Block(nn.Module):
    """A residual block with batch norm; seven channels do not divide by two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))  # type: ignore[no-any-return]


class Network(nn.Module):
    """A small residual network."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


def converted(method: str) -> nn.Module:
    """The converted network in training mode, whose classifier is not zero."""
    torch.manual_seed(0)
    model, _ = nf.convert(Network(), method, batch()[0], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.out.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    return model.train()


def train(model: nn.Module, part: slice, monitor: nf.Monitor | None = None) -> list[float]:
    """Train with momentum and adaptive clipping on a part of each batch."""
    groups = nf.param_groups(model, lr=0.5, weight_decay=0.01)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    losses = []
    x, y = (t[part] for t in batch())
    for _ in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nf.clip_grad_agc_(model, CLIP)
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(x, y)
    return losses


def numbers(diagnosis: Any) -> list[float]:
    """The measurements of a diagnosis."""
    signal = diagnosis.signal
    layers = [number for layer in signal.layers for number in (layer.weight_norm, layer.gradient_norm)]
    return [*signal.series("sum"), *signal.series("branch"), *signal.series("sum_gradient"), *layers]


def compare(method: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Both runs of a method, and both diagnoses of its first model."""
    alone, sharded = converted(method), converted(method)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    diagnoses = [numbers(nf.diagnose(m, *batch())) for m in (alone, sharded)]
    monitor = nf.Monitor(sharded, every=2)
    start = [p.detach().full_tensor() for p in sharded.parameters()]
    mine = torch.tensor(train(sharded, slice(4 * rank, 4 * rank + 4), monitor))
    dist.all_reduce(mine)
    losses = train(alone, slice(None))
    end = [p.detach().full_tensor() for p in sharded.parameters()]
    moved = max(float((after - before).abs().max()) for before, after in zip(start, end, strict=True))
    apart = max(float((p.detach() - q).abs().max()) for p, q in zip(alone.parameters(), end, strict=True))
    with torch.no_grad():
        sharded(batch()[0])  # leaves the root's parameters gathered
    again = numbers(nf.diagnose(sharded, *batch()))
    return {
        "losses": [losses, (mine / 2).tolist()],
        "diagnoses": [*diagnoses, numbers(nf.diagnose(alone, *batch())), again],
        "moved": moved,
        "apart": apart,
        "measured": [m.step for m in monitor.moments],
    }


def clipping(mesh: DeviceMesh) -> list[tuple[list[float], list[float]]]:
    """Gradients of several shapes and placements, clipped whole and sharded."""
    found = []
    for shape in ((5, 3, 2, 2), (5, 4), (1, 7), (7,), (7, 1, 1), (1,)):
        for placement in (Replicate(), *(Shard(axis) for axis in range(len(shape)))):
            draw = torch.Generator().manual_seed(3)
            weight, grad = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
            pieces = [distribute_tensor(t.clone(), mesh, [placement]) for t in (weight, grad)]
            clip_adaptively_([weight], [grad], CLIP)
            clip_adaptively_(pieces[:1], pieces[1:], CLIP)
            found.append((grad.flatten().tolist(), pieces[1].full_tensor().flatten().tolist()))
    parameter = nn.Parameter(distribute_tensor(torch.tensor([3.0, 4.0, 0.0]), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([3.0, 4.0, 0.0]), mesh, [Shard(0)])
    norm = clip_grad_norm_([parameter], 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    found.append(([5.0, 0.6, 0.8, 0.0], [float(norm), *parameter.grad.full_tensor().tolist()]))
    return found


def refusal(mesh: DeviceMesh) -> str:
    """The sentence for a sharded model without a plan."""
    model = fully_shard(Network(), mesh=mesh)
    try:
        nf.diagnose(model, *batch())
    except ValueError as error:
        return str(error)
    return ""


def main(out: str, *methods: str) -> None:
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as meeting:
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", store=dist.FileStore(meeting.name, 2), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        found = {"clipping": clipping(mesh), "refusal": refusal(mesh)}
        found |= {method: compare(method, rank, mesh) for method in methods}
        dist.destroy_process_group()
        if not child:
            os._exit(0)
        _, status = os.waitpid(child, 0)
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
