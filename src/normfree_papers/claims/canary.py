"""The canary of a run: the figures of a few training steps of small networks, stored to see whether code has changed.

A stored result is stale if today's code would compute other numbers. So every run that a claim keeps stores such
figures beside its result, and they are compared with those of today's code. This file names and compares figures
without training; `canary_training` computes them.

A *probe* is one small training run. Its name is of one of two kinds:

- "fixup resnet8": a method with the options that differ from their defaults, a small model of the same kind as the
  trained model, and the block form if one was chosen.
- "crop", "optimizer=adam": a setting, tried on one small network.

`probes_of` gives the probes of a run. The *figures* of a probe are the losses of its training steps, the test loss, and
three numbers each for all scalars, all vectors and all larger parameters: how many there are, the norm of their initial
values, and the norm of their change. The figures depend on the order of the data, augmentation, initialization, forward
and backward pass, parameter groups, update rule, schedule and evaluation. They do not depend on compilation and CUDA
graphs, which a probe does not use, nor on the depth, width and bottlenecks of the trained model.

A *record* has the figures by place, "DEVICE PRECISION", with the tolerance there:

    {"cpu float32": {"tolerance": 0.01, "figures": {"fixup resnet8": [2.302585, 2.298731, …], "crop": […]}}}

There are records in three files:

- canary.json beside this file: today's figures. `tests/support/canaries.py` writes it.
- result.json of every run that a claim keeps, under "canary": the probes of the run; for a GPU run also those on the
  GPU. Runs of `normfree train` have none.
- results/canaries.json, under "commits": the record of each commit that made stored runs, or "unknown". A probe is
  spelled as today's code spells the same computation. Figures are null where the commit could not compute them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from normfree.methods.method import options_text
from normfree.methods.method_registry import parse_spec
from normfree.train.config import TrainConfig

Figures = dict[str, list[float]]
"""The figures of each probe."""
Record = dict[str, dict[str, Any]]
"""The figures and their tolerance by place."""

COMMITTED = Path(__file__).with_suffix(".json")
SMALL_MODELS = {  # the small model for each kind of model, by how its names begin
    "resnet": "resnet8",
    "preact_resnet": "wrn-10-1",
    "wrn-": "wrn-10-1",
    "resmlp-": "resmlp-3-16-3",
    "mlp-": "mlp-3-16",
    "cnn-": "cnn-4-8",
    "dense-": "dense-7-4",
    "highway-": "highway-3-16",
    "transformer-": "transformer-1-1-16-32-2",
    "decoder-": "decoder-2-16-32-2",
}
TRIED: dict[str, dict[str, Any]] = {  # the settings of each probe that tries a setting
    "crop": {"crop": 2},
    "flip": {"flip": True},
    "cutout": {"cutout": 4},
    "mixup": {"mixup": 0.5},
    "randaugment": {"randaugment": (2, 10)},
    "accumulate": {"accumulate": 2},
    "optimizer=adam": {"optimizer": "adam", "lr": 0.005},
    "optimizer=adamw": {"optimizer": "adamw", "lr": 0.005},
    "nesterov": {"nesterov": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "clip=agc": {"clip": "agc", "clip_at": 0.05},
    "clip=norm": {"clip": "norm", "clip_at": 0.3},
    "ema": {"ema": 0.5},
    "schedule=step": {"schedule": "step"},
    "schedule=cosine": {"schedule": "cosine"},
    "schedule=inverse_sqrt": {"schedule": "inverse_sqrt", "warmup": 1},
    "schedule=linear": {"schedule": "linear"},
    "warmup": {"warmup": 1},
    "dropout": {"dropout": 0.2, "method": "layernorm", "model": SMALL_MODELS["transformer-"]},
    "inner_dropout": {"inner_dropout": 0.2, "method": "layernorm", "model": SMALL_MODELS["transformer-"]},
}


def probes_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the probes that concern a run: that of its method and model, and one per setting that it uses.

    >>> probes_of(TrainConfig(model="wrn-100-1", method="fixup:scalar_lr=10/L", crop=4))
    ('fixup:scalar_lr=10/L wrn-10-1', 'crop', 'schedule=cosine')

    Args:
        config: The configuration of the run.

    Returns:
        The probes; none if the model is not one of normfree's, or the method is not registered.
    """
    small = next((found for start, found in SMALL_MODELS.items() if config.model.startswith(start)), None)
    try:
        method = spelled(config.method)
    except ValueError:
        return ()
    if small is None:
        return ()
    words = [method, small, *([config.form] if config.form else [])]
    tried = []
    for probe in TRIED:
        setting, _, choice = probe.partition("=")
        value = getattr(config, setting)
        if value == choice if choice else value != getattr(TrainConfig, setting):
            tried.append(probe)
    return (" ".join(words), *tried)


def differing(stored: Mapping[str, Sequence[float]], today: Mapping[str, Sequence[float]], within: float) -> list[str]:
    """Return the probes of `stored` whose figures differ from today's by more than a relative tolerance."""
    return [probe for probe, figures in stored.items() if not _close(figures, today.get(probe, ()), within)]


def stale_probes(config: TrainConfig, record: Record | str) -> list[str] | None:
    """Compare the canary of a stored run with today's code.

    Places and probes without committed figures are left out. A GPU run also has figures on the CPU.

    Args:
        config: The configuration of the run, with its method as today's code spells it.
        record: The canary that the run or its commit stored, or "unknown".

    Returns:
        The probes for which today's code computes other figures; None if figures are missing.
    """
    probes = probes_of(config)
    if isinstance(record, str) or not record or not probes:
        return None
    stale: list[str] = []
    for place, found in record.items():
        stored = {probe: found["figures"].get(probe) for probe in probes}
        if not all(stored.values()):
            return None
        today = todays(place, probes)
        known = {probe: figures for probe, figures in stored.items() if probe in today}
        stale += [probe for probe in differing(known, today, found["tolerance"]) if probe not in stale]
    return stale


def todays(place: str, probes: Iterable[str]) -> Figures:
    """Return today's figures of probes in a place: the committed ones; on the CPU, others are computed."""
    committed: Figures = committed_record().get(place, {}).get("figures", {})
    wanted = tuple(probes)
    found = {probe: committed[probe] for probe in wanted if probe in committed}
    device, precision = place.split()
    if device == "cpu" and len(found) < len(wanted):
        from normfree_papers.claims.canary_training import cached_figures  # trains

        found |= {probe: list(cached_figures(probe, device, precision)) for probe in wanted if probe not in found}
    return found


@cache
def committed_record() -> Record:
    """Read the committed record of today's code."""
    record: Record = json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else {}
    return record


def tolerance(place: str) -> float:
    """Return the relative difference of figures up to which two canaries of a place, such as "cpu float32", agree.

    It is at least four times what rounding was measured to change. In float32 on a CPU that is 2e-3: torch 2.11 and
    2.13 give equal figures; two threads change them by 1e-6, initial weights that differ by 1e-7 by 6e-5, and
    instructions without AVX by 2e-3, where a ReLU switches. In bf16 and mixed precision such initial weights change
    them by 2e-3, on a CPU.

    On an H200 two processes differ by at most 2e-3 in bf16 and 4e-3 in mixed precision. In float32 they differ by at
    most 5e-3, except in three probes (learnscalar_brock on images, and wn_default:directions=he in pre-activation
    form), which amplify rounding to 8e-2 and have no figures there. Half of all probes agree with the CPU to 7e-7 in
    float32; of those with figures, only dropout, which draws other numbers on a GPU, differs by more than 1.3e-2.
    """
    return 1e-2 if place == "cpu float32" else 2e-2


def spelled(method: str) -> str:
    """Return the name of a method with the options that differ from their defaults."""
    name, options = parse_spec(method)
    _, defaults = parse_spec(name)
    changed = {option: value for option, value in options.items() if value != defaults[option]}
    return f"{name}:{options_text(changed, ',')}" if changed else name


def _close(figures: Sequence[float], others: Sequence[float], within: float) -> bool:
    if len(figures) != len(others):
        return False
    return all(
        a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= within * max(abs(a), abs(b))
        for a, b in zip(figures, others, strict=True)
    )
