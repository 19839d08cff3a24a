"""Measure the cost of a diagnosis: `propagate` and `diagnose` beside one plain forward and backward pass.

    python benchmarks/propagation.py --batch 4 --batch 16 --size 224
    python benchmarks/propagation.py --device cuda --batch 8 --batch 32 --batch 128 --batch 256 --json propagation.json
    python benchmarks/propagation.py --model torchvision:resnet50 --device cuda --deep

All use the same model and batch, in training mode, with a random gradient at the output, and are timed to the end of
the last kernel. They take turns, and ratios are those of medians. `propagation` is a plain call, which finds the plan
of the model each time. `plan kept` gets the plan, as in `Monitor`. `diagnosis` adds the checks and the verdict; from 12
samples on it makes two forward passes of two samples. `first` is the first call of `propagate` for a model, with all
one-time costs. On a GPU a last row with a few tiny images, where the GPU waits for Python, shows the time of the host
alone. `--deep` compares the peak memory with 10,000 layers: allocated on the GPU, or of a separate process on the
CPU. `--clock cpu` counts the time that the processor works for this process, where others share the machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.diagnostics import diagnose, propagate
from normfree.models import build
from normfree.models.third_party import create_model
from normfree.report import Column, Table, print_table
from normfree.storage.provenance import commit, hardware, versions

LIMIT = 1.3
MIB = 2**20
TINY = (2, 64)  # images and their size, where a GPU has next to nothing to do


def make(spec: str, batch: int, size: int, device: str) -> tuple[nn.Module, Tensor]:
    """A model by 'name:method', or 'torchvision:name' or 'timm:name', and a batch of noise."""
    name, _, method = spec.partition(":")
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    if name in ("torchvision", "timm"):
        return create_model(spec).to(device), x.to(device)
    model = build(name, method or "fixup", example=x, generator=torch.Generator().manual_seed(0))
    return model.to(device), x.to(device)


def plain_pass(model: nn.Module, x: Tensor) -> None:
    """One forward and one backward pass from a random gradient; the gradients are dropped."""
    output = model(x)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    output.backward(gradient)
    for p in model.parameters():
        p.grad = None


def measured_pass(model: nn.Module, x: Tensor) -> None:
    """The same with every number of the signal."""
    propagate(model, x)


PASSES: dict[str, Callable[[nn.Module, Tensor], None]] = {"plain": plain_pass, "propagation": measured_pass}


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(run: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor, clock: str = "wall") -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = CLOCKS[clock]()
    run(model, x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return CLOCKS[clock]() - start


def cuda_peak(run: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor) -> float:
    """Peak MiB of one pass on the GPU, model and batch included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(model, x)
    return torch.cuda.max_memory_allocated() / MIB


def compare(spec: str, batch: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times of all passes, taking turns."""
    model, x = make(spec, batch, size, options.device)
    plain_pass(model, x)  # what torch does once is no cost of ours
    first = seconds(measured_pass, model, x, options.clock)
    plan = propagate(model, x).plan
    passes = {
        **PASSES,
        "plan kept": lambda m, images: propagate(m, images, plan=plan),
        "diagnosis": lambda m, images: diagnose(m, images),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(options.warmup + options.repeats):
        order = list(passes.items())
        for name, run in order if turn % 2 == 0 else order[::-1]:
            took = seconds(run, model, x, options.clock)
            if turn >= options.warmup:
                times[name].append(took)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    record = {
        "model": spec,
        "batch": batch,
        "size": size,
        "seconds": times,
        "first": first,
        "median": median,
        "more": median["propagation"] - median["plain"],
        "ratio": median["propagation"] / median["plain"],
        "ratio_of_fastest": min(times["propagation"]) / min(times["plain"]),
        "ratio_with_plan": median["plan kept"] / median["plain"],
        "ratio_of_diagnosis": median["diagnosis"] / median["plain"],
    }
    if x.is_cuda:
        record["peak_mib"] = {name: cuda_peak(run, model, x) for name, run in PASSES.items()}
    return record


def deep(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of both passes in a network of 10,000 layers."""
    peaks: dict[str, float] = {}
    took: dict[str, float] = {}
    if options.device.startswith("cuda"):
        model, x = make(options.deep_model, options.deep_batch, options.deep_size, options.device)
        plain_pass(model, x)
        for name, run in PASSES.items():
            took[name] = seconds(run, model, x)
            peaks[name] = cuda_peak(run, model, x)
    else:
        for name in PASSES:
            command = [sys.executable, __file__, "--deep-child", name, "--deep-model", options.deep_model]
            command += ["--deep-batch", str(options.deep_batch), "--deep-size", str(options.deep_size)]
            child = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            peaks[name], took[name] = child["peak_mib"], child["seconds"]
    return {
        "model": options.deep_model,
        "batch": options.deep_batch,
        "size": options.deep_size,
        "peak_mib": peaks,
        "ratio": peaks["propagation"] / peaks["plain"],
        "seconds": took,
    }


def deep_child(options: argparse.Namespace) -> None:
    """One pass in this process; prints its peak memory."""
    model, x = make(options.deep_model, options.deep_batch, options.deep_size, "cpu")
    took = seconds(PASSES[options.deep_child], model, x)
    print(json.dumps({"peak_mib": process_peak(), "seconds": took}))


def process_peak() -> float:
    """Peak MiB of this process; `ru_maxrss` alone would begin with the memory of the process that started it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def surroundings(device: str) -> dict[str, Any]:
    """What the numbers depend on; the command names no folder."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *words]),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(device),
    }


def milliseconds(taken: float) -> str:
    return f"{1000 * taken:.1f} ms"


def memory(record: dict[str, Any]) -> str:
    """The peaks of both passes, where they were taken."""
    peaks = record.get("peak_mib")
    return f"{peaks['plain']:.0f} → {peaks['propagation']:.0f} MiB" if peaks else "–"


def show(records: list[dict[str, Any]], deepest: dict[str, Any] | None, device: str) -> None:
    names = ("plain", "propagation", "more", "ratio", "plan kept", "ratio", "diagnosis", "ratio", "first", "memory")
    rows = []
    for record in records:
        label = f"{record['model']} {record['batch']}×3×{record['size']}²"
        median = record["median"]
        times = [milliseconds(taken) for taken in (median["plain"], median["propagation"], record["more"])]
        kept = [milliseconds(median["plan kept"]), f"{record['ratio_with_plan']:.3f}"]
        kept += [milliseconds(median["diagnosis"]), f"{record['ratio_of_diagnosis']:.3f}"]
        rows.append((label, *times, f"{record['ratio']:.3f}", *kept, milliseconds(record["first"]), memory(record)))
    if deepest:
        label = f"{deepest['model']} {deepest['batch']}×3×{deepest['size']}²"
        rows.append((label, *["–"] * (len(names) - 1), memory(deepest)))
    caption = f"on {device}: median times of one pass, and peak memory; expected at most {LIMIT} × the plain time"
    columns = (Column("model"), *(Column(name, "right") for name in names))
    print_table(Table("propagation beside a plain forward and backward pass", columns, tuple(rows), caption))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", help="name:method or torchvision:name, may be repeated (resnet50, two methods)"
    )
    parser.add_argument("--batch", type=int, action="append", help="may be repeated (4; on a GPU 128 and 256)")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="time on the wall, or of the processor")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--deep", action="store_true", help="also the memory at 10,000 layers")
    parser.add_argument("--deep-model", default="wrn-10000-1:fixup")
    parser.add_argument("--deep-batch", type=int, default=2)
    parser.add_argument("--deep-size", type=int, default=32)
    parser.add_argument("--deep-child", choices=list(PASSES), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and where they come from")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.deep_child:
        deep_child(options)
        return
    on_gpu = options.device.startswith("cuda")
    shapes = [(batch, options.size) for batch in options.batch or ([128, 256] if on_gpu else [4])]
    shapes += [TINY] if on_gpu else []
    specs = options.model or ["resnet50:batchnorm", "resnet50:fixup"]
    records = [compare(spec, *shape, options) for spec in specs for shape in shapes]
    deepest = deep(options) if options.deep else None
    show(records, deepest, options.device)
    if options.json:
        result = {**surroundings(options.device), "times": records, "deep": deepest}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
