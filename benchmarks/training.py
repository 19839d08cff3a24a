"""Measure the speed of a training step: the engine beside plain PyTorch, in one run on one GPU.

    python benchmarks/training.py step --json results/benchmarks/training-step.json
    python benchmarks/training.py width
    python benchmarks/training.py depth
    python benchmarks/training.py kernels
    python benchmarks/training.py batch

`step`   images/s of ResNet-110 at batch 128. The engine's rows are whole steps: gathering, cropping and flipping the
         batch, the schedule, the update. The rivals get a fixed batch and do only forward, backward and update:
         plain PyTorch in float32, the same in bf16 autocast with channels last, and a compiled model captured by
         torch.compile(mode="reduce-overhead").
`width`  TFLOP/s of WRN-40-10 at batch 128, counting three times the operations of a forward pass.
`depth`  time per step and peak memory of Fixup with 100, 1,000 and 10,000 layers, batch 64.
`kernels` whole steps by the stage kernels (docs/kernels.md) beside the compiled path, batch norm in the engine, and
         batch norm in plain loops: first ResNet-110 at batch 128, with 1,000 layers at batch 128 and 10,000 at batch
         64, then ResNets of other depths (--depths). An epoch of 50,000 images is extrapolated from the steps. "Cold"
         rows run in a process of their own with empty caches.
`batch`  the same paths for ResNet-110 at several batches (--batches).
`one`    the JSON row of one run of the engine: MODEL METHOD BATCH STEPS KERNELS (for the cold rows).

Images are random bytes in the shape of CIFAR-10. The set-up (building, compiling, capturing) is timed separately.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import normfree as nf
from normfree.data import Split, image_set
from normfree.report import Column, Table, print_table
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json
from normfree.train import RunResult

CLASSES = tuple("0123456789")


def noise(count: int) -> Any:
    """Random bytes in the shape of CIFAR-10."""
    g = torch.Generator().manual_seed(0)
    few = torch.randint(0, 256, (min(count, 5_000), 3, 32, 32), dtype=torch.uint8, generator=g)
    images = few.repeat(-(-count // len(few)), 1, 1, 1)[:count]
    train = Split(images, torch.randint(0, 10, (count,), generator=g))
    return image_set("noise", CLASSES, train, Split(images[:10], torch.arange(10)))


def engine(model: str, method: str, batch: int, steps: int, **settings: Any) -> RunResult:
    """A run of the engine over `steps` batches of noise, with the augmentation of CIFAR-10."""
    _clear()
    base = {"validation": 0.0, "crop": 4, "flip": True, "epochs": 1, "schedule": "constant", "lr": 0.01}
    config = nf.TrainConfig(model=model, method=method, batch_size=batch, **(base | settings))
    return nf.fit(config, data=noise(steps * batch))


def rival(
    model: str, method: str, batch: int, steps: int, device: str, *, short: bool = True, mode: str | None = None
) -> dict[str, Any]:
    """Images/s, seconds to set up and memory of plain PyTorch on one batch that is there already.

    `short` is bf16 autocast with channels last; `mode` is that of `torch.compile`, or None for eager PyTorch.
    """
    began = time.perf_counter()
    _clear()
    network = nf.build(model, method, generator=torch.Generator().manual_seed(0)).to(device)
    x = torch.randn(batch, 3, 32, 32, device=device)
    if short:
        network, x = network.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=device)
    groups = nf.param_groups(network, lr=0.01, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=device == "cuda")
    run: Callable[..., Any] = torch.compile(network, mode=mode) if mode else network

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=short):
            loss = F.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    torch._dynamo.reset()
    return {
        "images_per_second": batch * steps / seconds,
        "milliseconds": 1e3 * seconds / steps,
        "steps": steps,
        "precision": "bf16 autocast" if short else "float32",
        "peak_gib": peak,
        "setup_seconds": start - began,
    }


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_step(device: str, steps: int, rivals: str) -> list[dict[str, Any]]:
    rows = []
    for method in ("fixup", "batchnorm"):
        trained = engine("resnet110", method, 128, steps, device=device)
        rows.append({"what": f"engine, {method}, whole step", **_numbers(trained, 128)})
    for method in ("fixup", "batchnorm") if rivals != "none" else ():
        for name, short, compiled in (
            ("PyTorch, float32", False, False),
            ("PyTorch, bf16 autocast, channels last", True, False),
            ("PyTorch, the same in torch.compile(mode='reduce-overhead')", True, True),
        )[: 3 if rivals == "all" else 2]:
            try:
                mode = "reduce-overhead" if compiled else None
                found = rival("resnet110", method, 128, max(5, steps // 10), device, short=short, mode=mode)
            except Exception as error:  # a rival that fails is a result, too
                print(f"{name}, {method}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            rows.append({"what": f"{name}, {method}, no data", **found})
    speeds = {row["what"]: row["images_per_second"] for row in rows}
    fixup, batchnorm = (speeds[f"engine, {m}, whole step"] for m in ("fixup", "batchnorm"))
    rows.append({"what": "norm-free / batch norm in the engine", "ratio": fixup / batchnorm})
    return rows


def _numbers(found: RunResult, batch: int) -> dict[str, Any]:
    return {
        "images_per_second": found.throughput,
        "milliseconds": 1e3 * batch / found.throughput,
        "epoch_seconds": 50_000 / found.throughput,
        "steps": found.steps,
        "precision": found.config.precision,
        "peak_gib": found.peak_gib,
        "setup_seconds": found.setup_seconds,
    }


def measure_width(device: str, steps: int, model: str = "wrn-40-10", batch: int = 128) -> list[dict[str, Any]]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        nf.build(model, "fixup", device="meta")(torch.empty(1, 3, 32, 32, device="meta"))
    forward = counter.get_total_flops()
    rows = []
    for method in ("fixup", "batchnorm"):
        found = engine(model, method, batch, steps, device=device)
        speed = found.throughput
        rows.append(
            {
                "what": f"{model}, {method}, batch {batch}",
                "images_per_second": speed,
                "forward_gflop": forward / 1e9,
                "tflop_per_second": 3 * forward * speed / 1e12,
                "setup_seconds": found.setup_seconds,
            }
        )
    return rows


def measure_depth(device: str, steps: int, depths: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for depth in depths:
        found = engine(f"wrn-{depth}-1", "fixup:scalar_lr=10/L", 64, max(10, steps * 100 // depth), device=device)
        seconds = 64 / found.throughput
        rows.append(
            {
                "what": f"wrn-{depth}-1",
                "layers": depth,
                "step_seconds": seconds,
                "epoch_seconds": seconds * 782,
                "peak_gib": found.peak_gib,
                "setup_seconds": found.setup_seconds,
                "seconds_a_layer": seconds / depth,
                "mib_a_layer": None if found.peak_gib is None else 1024 * found.peak_gib / depth,
            }
        )
    return rows


STAGE, COMPILED, NORMED = "fixup, stage kernels", "fixup, compiled", "batchnorm, compiled"
PLAIN = "batchnorm, plain loop"
Task = tuple[str, str, int, int, bool]
"""Model, path, batch, number of steps, and whether the row is cold."""
METHODS = {"wrn-1000-1": "fixup:scalar_lr=10/L", "wrn-10000-1": "fixup:scalar_lr=10/L"}


def kernel_tasks(steps: int, depths: list[int]) -> Iterator[Task]:
    """Iterate over the rows of `kernels`; those of the table come first."""
    yield "resnet110", STAGE, 128, 5 * steps, True
    yield "wrn-10000-1", STAGE, 64, steps // 8, True
    yield "wrn-1000-1", STAGE, 128, steps // 2, False
    yield "resnet110", "nf, stage kernels", 128, 5 * steps, False
    for path in (COMPILED, NORMED, PLAIN):
        yield "resnet110", path, 128, steps, False
    for mode in ("reduce-overhead", "max-autotune"):
        yield "resnet110", f"batchnorm, torch.compile(mode='{mode}')", 128, steps, False
    for depth in depths:
        yield from _tasks_at(depth, 128, steps)


def batch_tasks(steps: int, batches: list[int]) -> Iterator[Task]:
    """Iterate over the rows of `batch`."""
    for batch in batches:
        yield from _tasks_at(110, batch, steps)


def _tasks_at(depth: int, batch: int, steps: int) -> Iterator[Task]:
    size = depth * batch / (110 * 128)
    for path in (STAGE, COMPILED, NORMED, PLAIN):
        yield f"resnet{depth}", path, batch, min(steps, 40 + int(steps / 4 / size)), False


def measure_tasks(device: str, tasks: Iterator[Task], rivals: str) -> Iterator[list[dict[str, Any]]]:
    """The rows after each measurement; a long one that fails does not lose those before it."""
    rows: list[dict[str, Any]] = []
    for model, path, batch, count, cold in tasks:
        method, _, how = path.partition(", ")
        method, kernels = METHODS.get(model, method), "stage" if how == "stage kernels" else "compiled"
        row = {"what": f"{model}, {path}", "model": model, "path": path, "batch": batch, "cold": cold}
        if cold:
            row |= cold_row([model, method, str(batch), str(count), kernels], device)
        elif how in ("stage kernels", "compiled"):
            row |= _numbers(engine(model, method, batch, count, device=device, kernels=kernels), batch)
        elif rivals == "all" or (rivals == "eager" and path == PLAIN):
            mode = None if path == PLAIN else how.split("'")[1]
            row |= rival(model, method, batch, 5 if mode is None else max(5, count // 10), device, mode=mode)
        else:
            continue
        rows.append(row)
        yield [*rows, *_kernel_ratio(rows)]


def cold_row(words: list[str], device: str) -> dict[str, Any]:
    """The numbers of one run of the engine, in a process of its own with empty caches of compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NORMFREE_CACHE")
        environment = {**os.environ, **{name: str(Path(folder) / name) for name in caches}}
        command = [sys.executable, __file__, "one", *words, "--device", device]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_one(words: list[str], device: str) -> dict[str, Any]:
    model, method, batch, steps, kernels = words
    return _numbers(engine(model, method, int(batch), int(steps), device=device, kernels=kernels), int(batch))


def _kernel_ratio(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds = {
        row["path"]: row["images_per_second"] for row in rows if (row["model"], row["batch"]) == ("resnet110", 128)
    }
    rivals = [speed for path, speed in speeds.items() if path.startswith("batchnorm")]
    if not rivals or STAGE not in speeds:
        return []
    ratio = speeds[STAGE] / max(rivals)
    return [{"what": "fixup by stage kernels / the fastest batch norm, ResNet-110", "ratio": ratio}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "width", "depth", "kernels", "batch", "one"])
    parser.add_argument("words", nargs="*", metavar="MODEL METHOD BATCH STEPS KERNELS", help="of the row `one`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rivals", choices=["all", "eager", "none"], default="all", help="eager: no compiled ones")
    parser.add_argument("--depths", type=_integers, help="default: 100,1000,10000 for depth, 20,56,998 for kernels")
    parser.add_argument("--batches", type=_integers, default=[128, 32, 512, 1024], help="of batch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.what == "step":
        rows = measure_step(given.device, given.steps, given.rivals)
    elif given.what == "width":
        rows = measure_width(given.device, given.steps // 4)
    elif given.what in ("kernels", "batch"):
        deeper = kernel_tasks(given.steps, [20, 56, 998] if given.depths is None else given.depths)
        tasks = deeper if given.what == "kernels" else batch_tasks(given.steps, given.batches)
        for rows in measure_tasks(given.device, tasks, given.rivals):
            print(next(row for row in reversed(rows) if "path" in row), file=sys.stderr, flush=True)
            _store(given, rows)
    elif given.what == "one":
        print(json.dumps(measure_one(given.words, given.device)))
        return
    else:
        rows = measure_depth(given.device, given.steps, given.depths or [100, 1000, 10000])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = tuple(tuple(_cell(row.get(column)) for column in columns) for row in rows)
    heads = tuple(Column(name.replace("_", " "), "left" if name == "what" else "right") for name in columns)
    print_table(Table(f"training: {given.what}", heads, cells))
    _store(given, rows)


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _store(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if given.json is not None:
        origin = {"command": "python " + shlex.join(["benchmarks/training.py", *_command(sys.argv[1:])])}
        origin |= {"commit": commit(), "versions": versions(), "hardware": hardware(given.device)}
        write_json(given.json, {**origin, "rows": rows})


def _command(words: list[str]) -> list[str]:
    """The command without the folder that the result went to."""
    return [Path(word).name if word.endswith(".json") else word for word in words]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
