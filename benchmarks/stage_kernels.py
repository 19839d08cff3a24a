"""Times of the stage kernels on one CUDA device: python benchmarks/stage_kernels.py [--cases 128x18] [--recompute].

A case is images x blocks per stage. The time of each kernel comes from PyTorch's profiler; "graph" is the median time
of a CUDA graph of the whole step: packing, forward, backward, weight gradients, scalars.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from normfree.kernels import NEUTRAL, stage

FIXUP = ("alpha", "entry_bias", "entry_gain", "inner_gain", "a", "c", "exit_gain")  # what Fixup leaves neutral
PROTOTYPE = {(128, 18): 1.32, (64, 167): 9.8}  # ms of the first version, without scalars and biases


def inputs(channels: int, size: int, images: int, blocks: int, wide: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind = torch.float32 if wide else torch.bfloat16
    x = torch.randn(images, channels, size, size, device="cuda", dtype=kind).relu_()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    weights = torch.randn(blocks, 2, channels, channels, 3, 3, device="cuda") * (2 / (9 * channels)) ** 0.5
    weights[:, 1] *= blocks**-0.5
    scalars = torch.tensor(NEUTRAL, device="cuda").repeat(blocks, 1)
    scalars[:, 3:7:3] = 0.01
    return x, weights.requires_grad_(), scalars.requires_grad_(), torch.randn_like(x).detach()


def kernel_times(step: Callable[[], None], repeats: int) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    sums: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.name.startswith("stage_"):
            sums[event.name.removeprefix("stage_")] += event.device_time / 1e3 / repeats
    return dict(sums)


def graph_time(step: Callable[[], None], repeats: int) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:])


def time_stage(channels: int, size: int, images: int, blocks: int, args: argparse.Namespace) -> dict[str, float]:
    x, weights, scalars, gradient = inputs(channels, size, images, blocks, args.wide)
    neutral = () if args.all_scalars else FIXUP

    def step() -> None:
        x.grad = weights.grad = scalars.grad = None
        stage(x, weights, scalars, form=args.form, neutral=neutral, recompute=args.recompute).backward(gradient)

    step()
    repeats = max(3, min(args.repeats, 20000 // (images * blocks // 64)))
    return {**kernel_times(step, repeats), "graph": graph_time(step, repeats)}


def in_words(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=["128x18", "128x167", "64x167", "64x1667"])
    parser.add_argument("--stages", nargs="*", default=["16x32", "32x16", "64x8"])
    parser.add_argument("--form", default="post", choices=["post", "pre", "linear"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--wide", action="store_true", help="residual stream in float32")
    parser.add_argument("--recompute", action="store_true", help="compute the inner activations again")
    parser.add_argument("--all-scalars", action="store_true", help="no scalar is promised to be neutral")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {vars(args)}, times in ms")
    for case in args.cases:
        images, blocks = map(int, case.split("x"))
        total: dict[str, float] = defaultdict(float)
        peak = 0.0
        for name in args.stages:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            channels, size = map(int, name.split("x"))
            found = time_stage(channels, size, images, blocks, args)
            peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
            for key, value in found.items():
                total[key] += value
            print(f"  {name:>6}: {in_words(found)}", flush=True)
        rate = 1e3 * images / total["graph"]
        first = f"; prototype {PROTOTYPE[images, blocks]:.2f}" if (images, blocks) in PROTOTYPE else ""
        print(
            f"batch {images}, {blocks} blocks per stage: {in_words(total)}; {rate:,.0f} images/s; {peak:.2f} GiB{first}"
        )


if __name__ == "__main__":
    main()
