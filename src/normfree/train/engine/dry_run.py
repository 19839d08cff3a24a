"""Measure a run without training it: parameters, memory, steps and time, from a few steps on the real data.

Nothing is written or downloaded.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from normfree.nn.devices import free_memory
from normfree.train.config import TrainConfig
from normfree.train.data_sources import ImageData
from normfree.train.engine.data_interface import EvalBatches
from normfree.train.engine.process_state import StopRequestedError
from normfree.train.engine.setup import TrainSetup, open_run, sum_scores

_MOST_STEPS, _LEAST_STEPS = 22, 2  # to take; the first two are slower, and count only if there are no others
_PATIENCE = 5.0  # seconds after which the least number of steps is enough
_SCORING = 2.0  # seconds to score batches


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The expected cost of a run: its memory, its steps and its time.

    Attributes:
        parameters: The number of parameters.
        epochs: The epochs.
        steps_per_epoch: The steps per epoch.
        items_per_step: The images or target tokens per step; a mean for tokens.
        unit: What a step has: "images" or "tokens".
        device: The device, with its name.
        precision: The precision of the forward and backward pass.
        compiled: Whether the blocks are compiled.
        memory: The peak bytes of the measured steps: of the process on a CPU, of torch on a GPU; None on Windows.
        free: The bytes that were free before; None if that is not known.
        checkpoint: The bytes of a checkpoint.
        setup_seconds: From the start until the second step, which includes compiling.
        step_seconds: The median of the measured steps.
        measured: The number of these steps.
        validation_seconds: The time to score the validation data once; 0 if there are none.
        test_seconds: The same for the test data.
        translates: Whether the run would end with a translation of the test sentences, which `seconds` leaves out.
    """

    parameters: int
    epochs: int
    steps_per_epoch: int
    items_per_step: float
    unit: str
    device: str
    precision: str
    compiled: bool
    memory: int | None
    free: int | None
    checkpoint: int
    setup_seconds: float
    step_seconds: float
    measured: int
    validation_seconds: float
    test_seconds: float
    translates: bool

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def seconds(self) -> float:
        """The estimated time of the whole run."""
        training = self.steps * self.step_seconds + self.epochs * self.validation_seconds
        return self.setup_seconds + training + self.test_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {**asdict(self), "steps": self.steps, "seconds": self.seconds}


def measure_run(config: TrainConfig, progress: Callable[[int], None] | None = None) -> DryRun:
    """Take a few steps of a run and score a few batches, and estimate its memory and time from them.

    Args:
        config: All settings of the run.
        progress: Called with the number of steps taken.

    Raises:
        ValueError: If the configuration, the model and the data do not fit together, or the data is not there.
        StopRequestedError: If SIGTERM came.
    """
    began = time.perf_counter()
    with open_run(config, None, None, None, None, resume=False, overwrite=False) as setup:
        free = free_memory(setup.device)
        times = _time_steps(setup, progress)
        kept = times[2:] or times[1:]
        setup_seconds = time.perf_counter() - began - sum(times[1:])
        sizes = _split_sizes(setup)
        scoring = [
            _time_scoring(setup, part, sizes[i]) for i, part in enumerate((setup.inputs.validation, setup.inputs.test))
        ]
        chosen = setup.config
        return DryRun(
            parameters=setup.parameters,
            epochs=chosen.epochs,
            steps_per_epoch=setup.steps_per_epoch,
            items_per_step=setup.inputs.items_per_step,
            unit=setup.data.unit,
            device=_describe(setup.device),
            precision=chosen.precision,
            compiled=bool(chosen.compile),
            memory=_peak_memory(setup.device),
            free=free,
            checkpoint=sum(tensor.nbytes for tensor in setup.step.state().values()),
            setup_seconds=setup_seconds,
            step_seconds=statistics.median(kept),
            measured=len(kept),
            validation_seconds=scoring[0],
            test_seconds=scoring[1],
            translates=setup.data.translates_test,
        )


def _time_steps(setup: TrainSetup, progress: Callable[[int], None] | None) -> list[float]:
    """Train a few steps; return the seconds of each."""
    if setup.config.graph:
        setup.step.start_epoch(0, setup.lr_factors(0))
        setup.step.capture()
    began, times = time.perf_counter(), list[float]()
    while len(times) < _MOST_STEPS and (len(times) < _LEAST_STEPS or time.perf_counter() - began < _PATIENCE):
        epoch, number = divmod(len(times), setup.steps_per_epoch)
        if setup.stop.requested is not None:
            raise StopRequestedError
        if number == 0:
            setup.step.start_epoch(epoch, setup.lr_factors(0))
        start = time.perf_counter()
        setup.step()
        float(setup.step.loss_sum)  # waits for the device
        times.append(time.perf_counter() - start)
        if progress is not None:
            progress(len(times))
    return times


def _split_sizes(setup: TrainSetup) -> tuple[int | None, int | None]:
    """Return the images of validation and test in this process; None for text, whose batches are counted."""
    data, world = setup.data, setup.processes.world
    if not isinstance(data, ImageData):
        return None, None
    return round(setup.config.validation * len(data.train)) // world, len(data.test) // world


def _time_scoring(setup: TrainSetup, batches: EvalBatches | None, size: int | None) -> float:
    """Return the seconds to score a split, from its first batches if it is large."""
    if batches is None:
        return 0.0
    began, seconds, scored, seen = time.perf_counter(), 0.0, 0.0, 0
    for batch in batches():
        if setup.stop.requested is not None:
            raise StopRequestedError
        if time.perf_counter() - began < _SCORING:
            scored += float(sum_scores(setup.model, [batch], setup.inputs.sums)[2])
            seconds = time.perf_counter() - began
            timed = seen = seen + 1
        elif size is not None:
            break
        else:
            seen += 1
    if not scored:
        return 0.0
    return seconds * (seen / timed if size is None else max(1.0, size / scored))


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} of {os.cpu_count()} cores)"
    return str(device)
