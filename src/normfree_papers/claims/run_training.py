"""Make the training runs of claims: train them, keep them with their canary, and estimate their time on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from normfree.comparison.compare_runs import RunTask, train_runs
from normfree.comparison.run_executor import Reports, RunExecutor, summarize_reports
from normfree.methods.method import Form
from normfree.models import build
from normfree.models.builder import is_foreign
from normfree.nn.devices import device_of
from normfree.storage.provenance import commit
from normfree.storage.writing import TEMPORARY, atomic_path, explain_os_errors, write_sealed_json, write_sealed_text
from normfree.train import RunFolder, TrainConfig
from normfree.train.config import folder_name
from normfree.train.data_sources import is_text
from normfree.train.engine.kernel_stages import count_stage_layers
from normfree_papers.claims.canary_training import record_of

# Measured on one H200: operations per second of a wide network; of a narrow one, seconds per step and layer and per
# image and layer, and seconds to set up, by the stage kernels and by torch.compile (docs/benchmarks.md: batches of 32
# to 512, and 1,000 and 10,000 layers).
_FLOPS = 4e14
_STAGE_STEP, _STAGE_IMAGE, _STAGE_SET_UP = 2.5e-6, 0.047e-6, 20.0
_COMPILED_STEP, _COMPILED_IMAGE, _COMPILED_SET_UP = 28e-6, 0.33e-6, 35.0
_TEXT_SET_UP = 80.0
_IMAGES = {"fashion14": 6_000, "mnist": 60_000}  # training images; other data sets count as CIFAR-10
_CIFAR_IMAGES = 50_000
_TOKENS = {"multi30k": 4.3e5, "europarl": 6.0e6}  # target tokens for training, by the first word of the folder's name
_TOKEN_SPEED = 3e5  # per second, of a Transformer of 6 + 6 layers; assumed
_DEEP, _STEP = 160, 18  # deeper networks are not built for an estimate: 10,000 layers take half a minute


def train_and_keep(
    wanted: Mapping[str, TrainConfig],
    work: Path,
    kept: Callable[[TrainConfig], Path],
    *,
    executor: RunExecutor,
    report: Callable[[int, int, str], None],
) -> int | None:
    """Train runs, and copy the files of each that ends.

    Args:
        wanted: The configurations by the names of the runs; two names may ask for the same run.
        work: Folder of the runs in progress.
        kept: Returns the folder in which to keep a run.
        executor: Where the runs are trained.
        report: Called with the runs done, the number of runs, and a status text.

    Returns:
        The signal that stopped the training, or None.
    """
    names = {folder_name(config): name for name, config in wanted.items()}
    tasks = [RunTask(config, work / folder) for folder, config in {folder_name(c): c for c in wanted.values()}.items()]
    done = 0

    def show(reports: Reports) -> None:
        report(done, len(tasks), summarize_reports(reports, [names[task.folder.name] for task in tasks]))

    def keep_ended(task: RunTask, _: Mapping[str, Any]) -> None:
        nonlocal done
        keep(task.folder, kept(task.config))
        done += 1
        report(done, len(tasks), names[task.folder.name])

    report(0, len(tasks), "")
    return train_runs(tasks, keep_ended, executor=executor, on_report=show)


def keep(folder: Path, kept: Path) -> None:
    """Copy config, metrics and result (they contain no local paths); result.json comes last and marks the end.

    The result gets the canary of today's code, unless other code trained the run.
    """
    run, target = RunFolder(folder), RunFolder(kept)
    here = {"data_dir": TrainConfig.data_dir}
    config = TrainConfig.from_toml(run.config_path).with_changes(**here)
    result = run.read_result()
    result["config"] |= here
    if result["commit"] == commit():
        result["canary"] = record_of(config, _device_here(config.device))
    with explain_os_errors("the run", target.path):
        target.path.mkdir(parents=True, exist_ok=True)
        for left in target.path.glob(f"{TEMPORARY}*"):  # of a process that was killed in here
            left.unlink(missing_ok=True)
        write_sealed_text(target.config_path, config.to_toml())
        with atomic_path(target.metrics_path) as temporary:  # empty if a run diverged in its first epoch
            temporary.write_bytes(run.metrics_path.read_bytes() if run.metrics_path.exists() else b"")
        write_sealed_json(target.result_path, result)


def _device_here(name: str) -> torch.device:
    """Return the device of a run; the CPU if a node of a cluster has that device, and this machine has not."""
    try:
        return device_of(name)
    except ValueError:
        return torch.device("cpu")


# Estimates


def gpu_seconds(config: TrainConfig) -> float:
    """About how long a run takes on one H200, for planning; a third-party model is not built and counts as small."""
    if is_text(config.data):
        return _TEXT_SET_UP + config.epochs * _TOKENS.get(Path(config.data).name.partition("-")[0], 0.0) / _TOKEN_SPEED
    images, batch = _IMAGES.get(config.data, _CIFAR_IMAGES) * (1 - config.validation), config.batch_size
    if is_foreign(config.model):
        return _COMPILED_SET_UP
    layers, kernel_layers, operations = _size(config.model, config.method, config.form)
    if config.precision == "float32" or config.kernels == "compiled":
        kernel_layers = 0.0
    by_kernels = kernel_layers * (_STAGE_STEP + batch * _STAGE_IMAGE)
    compiled = (layers - kernel_layers) * (_COMPILED_STEP + batch * _COMPILED_IMAGE)
    step = max(by_kernels + compiled, batch * 3 * operations / _FLOPS)
    return (_STAGE_SET_UP if kernel_layers else _COMPILED_SET_UP) + config.epochs * images / batch * step


@cache
def _size(model: str, method: str, form: Form | None) -> tuple[float, float, float]:
    """Weight layers of a model, those that run by the stage kernels, and operations of a forward pass of one image.

    The image has the shape of CIFAR-10's. All are linear in the depth, so that those of a deep network follow from two
    others of its family.
    """
    named = re.fullmatch(r"(resnet|wrn-|mlp-|resmlp-|cnn-)(\d+)(.*)", model)
    if named is not None and int(named[2]) > _DEEP:
        depth = int(named[2])
        steps = (depth - 60) // _STEP
        near, far = (_size(f"{named[1]}{depth - n * _STEP}{named[3]}", method, form) for n in (steps, steps - 1))
        layers, kernel_layers, operations = (a + steps * (c - a) for a, c in zip(near, far, strict=True))
        return layers, kernel_layers, operations
    x = torch.empty(2, 3, 32, 32, device="meta")
    network = build(model, method, form=form, example=x, device="meta")
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in network.modules())
    kernel_layers = count_stage_layers(network)
    with FlopCounterMode(display=False) as counter:
        network(x)
    return layers, kernel_layers, counter.get_total_flops() / 2
