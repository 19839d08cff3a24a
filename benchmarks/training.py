"""Measure the speed of a training step: the engine beside plain PyTorch, in one run on one GPU.

    python benchmarks/training.py step --json results/benchmarks/training-step.json
    python benchmarks/training.py width
    python benchmarks/training.py depth
    python benchmarks/training.py kernels

`step`   images/s of ResNet-110 at batch 128. The engine's rows are whole steps: gathering, cropping and flipping the
         batch, the schedule, the update. The rivals get a fixed batch and do only forward, backward and update:
         plain PyTorch in float32, the same in bf16 autocast with channels last, and a compiled model captured by
         torch.compile(mode="reduce-overhead").
`width`  TFLOP/s of WRN-40-10 at batch 128, counting three times the operations of a forward pass.
`depth`  time per step and peak memory of Fixup with 100, 1,000 and 10,000 layers, batch 64.
`kernels` whole steps by the stage kernels (docs/kernels.md): ResNet-110 beside the compiled path and batch norm, then
         1,000 layers at batch 128 and 10,000 at batch 64. The epoch of 50,000 images is extrapolated from the steps.

Images are random bytes in the shape of CIFAR-10. The set-up (building, compiling, capturing) is timed separately.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import normfree as nf
from normfree.data import Split, image_set
from normfree.files import write_json
from normfree.provenance import commit, hardware, versions
from normfree.report import Column, Table, print_table
from normfree.train import RunResult

CLASSES = tuple("0123456789")


def noise(count: int) -> Any:
    """Random bytes in the shape of CIFAR-10."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=g)
    train = Split(images, torch.randint(0, 10, (count,), generator=g))
    return image_set("noise", CLASSES, train, Split(images[:10], torch.arange(10)))


def engine(model: str, method: str, batch: int, steps: int, **settings: Any) -> RunResult:
    """A run of the engine over `steps` batches of noise, with the augmentation of CIFAR-10."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    base = {"validation": 0.0, "crop": 4, "flip": True, "epochs": 1, "schedule": "constant", "lr": 0.01}
    config = nf.TrainConfig(model=model, method=method, batch_size=batch, **(base | settings))
    return nf.fit(config, data=noise(steps * batch))


def rival(method: str, batch: int, steps: int, device: str, *, short: bool, compiled: bool) -> tuple[float, float]:
    """Images/s and seconds to set up of plain PyTorch with the same network, on one batch that is there already."""
    began = time.perf_counter()
    model = nf.build("resnet110", method, generator=torch.Generator().manual_seed(0)).to(device)
    x = torch.randn(batch, 3, 32, 32, device=device)
    if short:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=device)
    groups = nf.param_groups(model, lr=0.01, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=device == "cuda")
    run: Callable[..., Any] = torch.compile(model, mode="reduce-overhead") if compiled else model

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
    torch._dynamo.reset()
    return batch * steps / (time.perf_counter() - start), start - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_step(device: str, steps: int, rivals: str) -> list[dict[str, Any]]:
    rows = []
    for method in ("fixup", "batchnorm"):
        found = engine("resnet110", method, 128, steps, device=device)
        rows.append(_row(f"engine, {method}, whole step", found.throughput, found.setup_seconds))
    for method in ("fixup", "batchnorm") if rivals != "none" else ():
        for name, short, compiled in (
            ("PyTorch, float32", False, False),
            ("PyTorch, bf16 autocast, channels last", True, False),
            ("PyTorch, the same in torch.compile(mode='reduce-overhead')", True, True),
        )[: 3 if rivals == "all" else 2]:
            try:
                speed, setup = rival(method, 128, max(5, steps // 10), device, short=short, compiled=compiled)
            except Exception as error:  # a rival that fails is a result, too
                print(f"{name}, {method}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            rows.append(_row(f"{name}, {method}, no data", speed, setup))
    speeds = {row["what"]: row["images_per_second"] for row in rows}
    fixup, batchnorm = (speeds[f"engine, {m}, whole step"] for m in ("fixup", "batchnorm"))
    rows.append({"what": "norm-free / batch norm in the engine", "ratio": fixup / batchnorm})
    return rows


def _row(what: str, speed: float, setup: float) -> dict[str, Any]:
    return {"what": what, "images_per_second": speed, "milliseconds": 1e3 * 128 / speed, "setup_seconds": setup}


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


def measure_kernels(device: str, steps: int, rivals: str) -> Iterator[list[dict[str, Any]]]:
    """The rows after each measurement; a long one that fails does not lose those before it."""
    rows: list[dict[str, Any]] = []
    for what, model, method, batch, count, settings in (
        ("fixup, stage kernels", "resnet110", "fixup", 128, 5 * steps, {"kernels": "stage"}),
        ("nf, stage kernels", "resnet110", "nf", 128, 5 * steps, {"kernels": "stage"}),
        ("fixup, compiled", "resnet110", "fixup", 128, steps, {"kernels": "compiled"}),
        ("batchnorm, compiled", "resnet110", "batchnorm", 128, steps, {}),
        ("fixup, stage kernels", "wrn-1000-1", "fixup:scalar_lr=10/L", 128, steps // 2, {"kernels": "stage"}),
        ("fixup, stage kernels", "wrn-10000-1", "fixup:scalar_lr=10/L", 64, steps // 8, {"kernels": "stage"}),
    ):
        found = engine(model, method, batch, count, device=device, **settings)
        rows.append(
            {
                "what": f"{model}, {what}",
                "batch": batch,
                "images_per_second": found.throughput,
                "milliseconds": 1e3 * batch / found.throughput,
                "epoch_seconds": 50_000 / found.throughput,
                "steps": count,
                "precision": found.config.precision,
                "peak_gib": found.peak_gib,
                "setup_seconds": found.setup_seconds,
            }
        )
        yield [*rows, *_kernel_ratio(rows)]
    if rivals == "all":
        speed, setup = rival("batchnorm", 128, max(5, steps // 10), device, short=True, compiled=True)
        what = "resnet110, batchnorm, torch.compile(mode='reduce-overhead'), no data"
        rows.append({**_row(what, speed, setup), "batch": 128, "precision": "bf16 autocast"})
        yield [*rows, *_kernel_ratio(rows)]


def _kernel_ratio(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds = {row["what"]: row["images_per_second"] for row in rows}
    rivals = [speed for what, speed in speeds.items() if "batchnorm" in what]
    if not rivals:
        return []
    ratio = speeds["resnet110, fixup, stage kernels"] / max(rivals)
    return [{"what": "fixup by stage kernels / the fastest batch norm, ResNet-110", "ratio": ratio}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "width", "depth", "kernels"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rivals", choices=["all", "eager", "none"], default="all", help="eager: no compiled ones")
    parser.add_argument("--depths", default="100,1000,10000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.what == "step":
        rows = measure_step(given.device, given.steps, given.rivals)
    elif given.what == "width":
        rows = measure_width(given.device, given.steps // 4)
    elif given.what == "kernels":
        for rows in measure_kernels(given.device, given.steps, given.rivals):
            print(rows[-1], file=sys.stderr)
            _store(given, rows)
    else:
        rows = measure_depth(given.device, given.steps, [int(depth) for depth in given.depths.split(",")])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = tuple(tuple(_cell(row.get(column)) for column in columns) for row in rows)
    heads = tuple(Column(name.replace("_", " "), "left" if name == "what" else "right") for name in columns)
    print_table(Table(f"training: {given.what}", heads, cells))
    _store(given, rows)


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
