"""The demo: three short experiments on data of the package; `demo_page` shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from normfree.comparison.compare_runs import compare, network_depth
from normfree.comparison.comparison_result import Comparison
from normfree.comparison.run_executor import run_tasks
from normfree.diagnostics.propagation import propagate
from normfree.models import build
from normfree.report.terminal import ProgressCallback
from normfree.storage.reading import from_json_values, read_sealed_json
from normfree.storage.writing import explain_os_errors, write_sealed_json
from normfree.train import TrainConfig, recipe
from normfree.train.engine.process_state import Stop

DESCRIPTIONS = {
    "fixup": "no normalization, Fixup",
    "batchnorm": "batch normalization",
    "sqrt_half": "no normalization, sums scaled by √½",
    "he_in": "no normalization, plain He",
}
_NO_LIMIT = 1e30  # only a loss that is not finite ends a run, however large it is
SAMPLES = 6_000  # to train on, of the spirals and of the images
# For the progress bar: a signal takes as long as a training step through this many layers, and a method that diverges
# does only a share of its steps.
_SIGNAL_COST = 16_000.0
_SHARE_OF_STEPS, _SHARE_AT_BATCH_TWO = {"he_in": 0.05}, {"batchnorm": 0.2}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The experiments of the demo; the defaults take less than two minutes on two idle CPU cores."""

    rates: Mapping[str, float] = field(  # the learning rate of each method: the best of 0.01 to 0.07 at 100 layers
        default_factory=lambda: {"fixup": 0.07, "batchnorm": 0.02, "sqrt_half": 0.01, "he_in": 0.01}
    )
    signal_model: str = "wrn-1000-1"
    models: tuple[str, ...] = ("resmlp-1-64", "resmlp-4-64", "resmlp-49-64")
    epochs: int = 7
    seeds: tuple[int, ...] = (0, 1, 2)
    twins: tuple[str, str] = ("batchnorm", "fixup")
    batch_model: str = "resmlp-149-64"
    batch_sizes: tuple[int, ...] = (2, 8, 32)
    batch_rates: tuple[float, ...] = (0.3, 0.1)  # at a batch of 128; in proportion at other sizes
    batch_held_out: float = 0.9  # training on a tenth of the images is enough, and ten times as fast
    seed: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in the order of the page."""
        return tuple(self.rates)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The measurements of the demo."""

    settings: DemoSettings
    forward: dict[str, list[float]]
    backward: dict[str, list[float]]
    depth: Comparison
    batches: dict[int, Comparison]


def run_demo(
    out: str | Path, settings: DemoSettings | None = None, *, jobs: int = 1, progress: ProgressCallback | None = None
) -> Demo | int:
    """Run the three experiments; finished ones are read from `out`.

    Args:
        out: Folder of the runs.
        settings: The experiments.
        jobs: Number of processes.
        progress: Called with the percentage of the work that is done, 100, and a string. It counts work, not runs.

    Returns:
        The measurements, or the number of the Unix signal that stopped them; finished runs are kept.

    Raises:
        ValueError: if a run cannot be trained.
        OSError: if a folder cannot be written.
    """
    settings = settings or DemoSettings()
    out = Path(out)
    short: dict[str, Any] = {"loss_limit": _NO_LIMIT, "checkpoint_epochs": 0}  # runs take seconds
    base = recipe("spirals", epochs=settings.epochs, clip="none", warmup=1.0, **short)
    quick = TrainConfig(epochs=1, validation=settings.batch_held_out, **short)
    each = len(settings.twins) * len(settings.batch_rates)
    costs = _costs(settings, base, quick)

    reached = 0

    def show(done: int, text: str) -> None:
        nonlocal reached
        running = [int(share) / 100 for share in re.findall(r"lr [\d.]+: (\d+)%", text)]
        part = sum(share * cost for share, cost in zip(running, costs[done:], strict=False))
        reached = max(reached, int(100 * (sum(costs[:done]) + part) / sum(costs)))
        if progress is not None:
            progress(reached, 100, text)

    show(0, f"signal through {settings.signal_model}")
    signals = _signals(settings, out / "signal.json", jobs)
    if isinstance(signals, int):
        return signals
    before = len(settings.methods)

    def show_runs(done: int, _: int, text: str) -> None:
        show(before + done, re.sub(r"^about [^,]* left(, )?", "", text))  # its own estimate is of one comparison

    common: dict[str, Any] = {"out": out / "runs", "jobs": jobs, "progress": show_runs}
    parts = []
    for method, rate in settings.rates.items():
        grid: dict[str, Any] = {"methods": [method], "models": settings.models, "lrs": [rate]}
        parts.append(compare(base, seeds=settings.seeds, **grid, **common))
        if (stopped := parts[-1].signal) is not None:
            return stopped
        before += len(settings.models) * len(settings.seeds)
    ended = sorted((run for part in parts for run in part.runs), key=lambda run: run.depth)
    depth = replace(
        parts[0], runs=tuple(ended), methods=settings.methods, lrs=tuple(dict.fromkeys(settings.rates.values()))
    )
    batches = {}
    for size in settings.batch_sizes:
        scaled = [rate * size / 128 for rate in settings.batch_rates]
        sized = quick.with_changes(batch_size=size)
        twins: dict[str, Any] = {"methods": settings.twins, "models": [settings.batch_model], "lrs": scaled}
        batches[size] = compare(sized, seeds=(settings.seed,), **twins, **common)
        if (stopped := batches[size].signal) is not None:
            return stopped
        before += each
    return Demo(
        settings=settings, forward=signals["forward"], backward=signals["backward"], depth=depth, batches=batches
    )


def _costs(settings: DemoSettings, base: TrainConfig, quick: TrainConfig) -> list[float]:
    """Estimate the cost of each signal and run, in the order of `compare`, which begins with the deepest.

    The time of networks this narrow depends on the number of layers, and not on the batch size.
    """

    def cost(model: str, config: TrainConfig) -> float:
        steps = config.epochs * math.ceil(SAMPLES * (1 - config.validation) / config.batch_size)
        return float(network_depth(build(model, "he_in", device="meta").plan) * steps)

    shares = [_SHARE_OF_STEPS.get(method, 1.0) for method in settings.methods]
    depths = sorted((cost(model, base) for model in settings.models), reverse=True)
    sizes = {size: cost(settings.batch_model, quick.with_changes(batch_size=size)) for size in settings.batch_sizes}
    first = [_SHARE_AT_BATCH_TWO.get(method, 1.0) for method in settings.twins for _ in settings.batch_rates]
    return [
        *[_SIGNAL_COST] * len(settings.methods),
        *(one * share for share in shares for one in depths for _ in settings.seeds),
        *(one * (share if size == 2 else 1.0) for size, one in sizes.items() for share in first),
    ]


def _signals(settings: DemoSettings, path: Path, jobs: int) -> dict[str, Any] | int:
    """Measure the variance after every residual sum, and of its gradient, by method; after a signal, its number."""
    wanted = {"model": settings.signal_model, "methods": list(settings.methods), "seed": settings.seed, "format": 2}
    if path.exists():
        try:
            stored = read_sealed_json(path, "the signals", "measure them again")
        except ValueError:
            stored = {}
        if stored.get("settings") == wanted:
            read: dict[str, Any] = from_json_values(stored)
            return read
    tasks = [(settings.signal_model, method, settings.seed) for method in settings.methods]
    found: dict[str, Any] = {"settings": wanted, "forward": {}, "backward": {}}
    with Stop() as stop:
        measured = dict(run_tasks(measure_signal, tasks, jobs=jobs, stop=stop))
        if stop.requested:
            return int(stop.requested)
    for number, method in enumerate(settings.methods):
        found["forward"][method], found["backward"][method] = measured[number]
    with explain_os_errors("the signals", path):
        write_sealed_json(path, found)
    return found


def measure_signal(task: tuple[str, str, int]) -> tuple[list[float], list[float]]:
    """Measure one forward and one backward pass of noise at initialization; NaN where no gradient can be measured."""
    model, method, seed = task
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    network = build(model, method, example=images, generator=torch.Generator().manual_seed(seed))
    signal = propagate(network, images, generator=torch.Generator().manual_seed(seed))
    return signal.series("sum"), signal.series("sum_gradient")
