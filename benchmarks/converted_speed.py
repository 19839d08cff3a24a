"""Measure the speed and memory of a converted model beside the original, in one run on one GPU.

    python benchmarks/converted_speed.py --json results/benchmarks/converted-speed.json

torchvision's ResNet-50 at 224 pixels with batches of 256, as built (batch norm), and converted by each method:

`torch.compile`  a plain training loop: bf16 autocast, channels last, SGD, on one batch that is on the GPU already.
`nf.fit`         the engine, whole steps: gathering, cropping and flipping the batch, the schedule, the update.

Images are random bytes. Every run is a process of its own. Those of one kind of loop compile at the same time, and are
then measured one after the other, while the others wait. Memory is the peak that PyTorch allocates: of a step in the
loop, of the whole run in the engine, whose CUDA graph keeps its memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import normfree as nf
from normfree.data import Split, image_set
from normfree.plan import ResidualPlan
from normfree.report import Column, Table, print_table
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json

AS_BUILT = "as built"
LOOPS = ("torch.compile", "nf.fit")
EPOCH = 45  # steps; the engine reports its progress after half a second of an epoch


def build(method: str) -> tuple[nn.Module, ResidualPlan | None]:
    """Build ResNet-50 by torchvision, and convert it unless it stays as built."""
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50()
    return (model, None) if method == AS_BUILT else nf.convert(model, method, torch.randn(2, 3, 64, 64))


def plain_loop(method: str, given: argparse.Namespace, turn: Callable[[], None]) -> dict[str, Any]:
    """Time a plain compiled training loop."""
    cuda, began = given.device == "cuda", time.perf_counter()
    model, plan = build(method)
    model = model.to(given.device, memory_format=torch.channels_last).train()
    x = torch.randn(given.batch, 3, given.size, given.size, device=given.device)
    x, labels = x.to(memory_format=torch.channels_last), torch.randint(0, 1000, (given.batch,), device=given.device)
    rates = {"lr": 1e-4, "weight_decay": 1e-4}
    groups = list(model.parameters()) if plan is None else nf.param_groups(model, method=method, plan=plan, **rates)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=cuda, **rates)
    run = torch.compile(model, dynamic=False, backend=given.backend)

    def step() -> None:
        with torch.autocast(given.device, torch.bfloat16):
            loss = F.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    setup = time.perf_counter() - began
    turn()
    for _ in range(5):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(given.rounds):
        synchronize(cuda)
        start = time.perf_counter()
        for _ in range(given.steps):
            step()
        synchronize(cuda)
        times.append((time.perf_counter() - start) / given.steps)
    found = {"seconds": median(times), "peak_gib": peak_gib(cuda), "setup_seconds": setup}
    if given.profile is not None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA] if cuda else None) as profile:
            step()
            synchronize(cuda)
        key = "cuda_time_total" if cuda else "cpu_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=-1, max_name_column_width=120)
        (given.profile / f"kernels-{method.replace(' ', '-')}.txt").write_text(table, encoding="utf-8")
    return found


def engine(method: str, given: argparse.Namespace, turn: Callable[[], None]) -> dict[str, Any]:
    """Time a run of the engine, between the first and the last report of its progress."""
    model, plan = build(method)
    g = torch.Generator().manual_seed(0)
    count = EPOCH * given.batch
    images = torch.randint(0, 256, (count, 3, given.size, given.size), dtype=torch.uint8, generator=g)
    train = Split(images, torch.randint(0, 1000, (count,), generator=g))
    data = image_set("noise", tuple(map(str, range(1000))), train, Split(images[:10], torch.arange(10)))
    config = nf.TrainConfig(
        batch_size=given.batch, epochs=-(-given.rounds * given.steps // EPOCH), lr=1e-4, schedule="constant",
        validation=0.0, crop=4, flip=True, checkpoint_epochs=0, precision="bf16", device=given.device,
    )  # fmt: skip
    seen: list[tuple[int, float]] = []

    def progress(snapshot: Any) -> None:
        if not seen:
            turn()
        seen.append((snapshot.done, time.perf_counter()))

    found = nf.fit(config, model=model, data=data, plan=plan, progress=progress)
    if found.status != "finished" or len(seen) < 2:
        raise ValueError(f"expected a run with two reports of its progress, got {found.status} and {len(seen)}")
    (first, start), (last, end) = seen[0], seen[-1]
    seconds = (end - start) / (last - first)
    return {"seconds": seconds, "peak_gib": found.peak_gib, "setup_seconds": found.setup_seconds}


def synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def peak_gib(cuda: bool) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def work(loop: str, method: str, given: argparse.Namespace, pipe: Connection) -> None:
    """Measure one row in a process of its own: say when it is ready, wait for the turn, send the row."""

    def turn() -> None:
        pipe.send("ready")
        pipe.recv()

    try:
        found = (plain_loop if loop == "torch.compile" else engine)(method, given, turn)
    except Exception as error:  # the other rows are worth having
        pipe.send({"loop": loop, "method": method, "failed": f"{type(error).__name__}: {error}"})
        return
    speed = {"images_per_second": given.batch / found["seconds"], "milliseconds": 1e3 * found.pop("seconds")}
    pipe.send({"loop": loop, "method": method, **speed, **found})


def receive(pipe: Connection) -> Any:
    """Return the next message of a process, or a row that says that it ended."""
    try:
        return pipe.recv()
    except EOFError:
        return {"loop": "", "method": "", "failed": "the process ended"}


def measure(loop: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all rows of a loop, and give each its turn once all are ready."""
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for method in (AS_BUILT, *given.methods.split(",")):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(loop, method, given, theirs)).start()
        theirs.close()
        pipes.append(ours)
    first = [receive(pipe) for pipe in pipes]  # "ready", or the row of a run that failed
    rows: list[dict[str, Any]] = []
    for pipe, message in zip(pipes, first, strict=True):
        if message == "ready":
            pipe.send("go")
            message = receive(pipe)
        rows.append(message)
        print(message, file=sys.stderr, flush=True)
    original = rows[0]
    for row in rows:
        if "failed" not in row and "failed" not in original:
            row["speed_ratio"] = row["images_per_second"] / original["images_per_second"]
            row["memory_ratio"] = row["peak_gib"] / original["peak_gib"] if row["peak_gib"] else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="nf,fixup")
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="pixels a side")
    parser.add_argument("--steps", type=int, default=25, help="steps per timing")
    parser.add_argument("--rounds", type=int, default=5, help="timings, whose median counts")
    parser.add_argument("--backend", default="inductor", help="the backend of torch.compile in the plain loop")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write the kernels of a step of the plain loop")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for loop in given.loops.split(","):
        rows += measure(loop, given)
        _store(given, rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = tuple(Column(name.replace("_", " "), "left" if i < 2 else "right") for i, name in enumerate(columns))
    print_table(Table("converted ResNet-50", heads, tuple(tuple(_cell(row.get(c)) for c in columns) for row in rows)))


def _store(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if given.json is not None:
        words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        origin = {"command": "python " + shlex.join(["benchmarks/converted_speed.py", *words])}
        origin |= {"commit": commit(), "versions": versions(), "hardware": hardware(given.device)}
        settings = {"model": "torchvision:resnet50", "batch": given.batch, "size": given.size}
        write_json(given.json, {**origin, **settings, "rows": rows})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
