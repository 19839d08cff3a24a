"""The canary of a run: a few steps of small networks, whose figures show whether the code still computes the same.

A stored result is stale if today's code would train another network, or train it otherwise. So every run stores the
figures of a few steps of small networks beside its result, and a later reader compares them with today's.

A *family* names one small training run, and is one of two things:

- "fixup resnet8": a method with the options that differ from their defaults, the small model that stands for the
  family of the trained model, and the block form if one was chosen.
- "crop", "optimizer=adam": a setting, tried on one small network.

`families_of` gives the families that concern a run. The *figures* of a family are the losses of its training steps, the
test loss and, for all scalars together, all vectors and all larger parameters: their number, the norm of the initial
values, and the norm of their change. They depend on the order of the data, augmentation, initialization, forward and
backward pass, parameter groups, update rule, schedule and evaluation. They do not depend on compilation and CUDA
graphs, which a canary does without, nor on the depth, width and bottlenecks of the trained model.

A *record* has the figures by the place where they were computed, "DEVICE PRECISION", with the tolerance there:

    {"cpu float32": {"tolerance": 0.01, "figures": {"fixup resnet8": [2.302585, 2.298731, …], "crop": […]}}}

There are records in three files:

- canary.json beside this file: today's figures. `python -m normfree_papers.claims.canaries today` writes it.
- result.json of every run, under "canary": the families of the run; for a GPU run also those on the GPU.
- results/canaries.json, under "commits": the record of each commit that made stored runs, or "unknown". A family is
  spelled as today's code spells the same computation. Figures are null where the commit could not compute them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normfree.data.counter_rng import below, key
from normfree.data.images.image_set import ImageSet, Split, image_set
from normfree.data.text.prepared_folder import Prepared
from normfree.data.text.token_pairs import TokenLines, TokenPairs
from normfree.methods import Method, get, names
from normfree.methods.history import FIRST_RELEASE, as_of
from normfree.models import supports
from normfree.models.special_tokens import SPECIAL
from normfree.train.config import TrainConfig
from normfree.train.engine.environment import Processes, seeded_generators
from normfree.train.engine.inputs import score
from normfree.train.engine.setup import prepare_training

Figures = dict[str, list[float]]
"""The figures of each family."""
Record = dict[str, dict[str, Any]]
"""The figures and their tolerance by place."""

COMMITTED = Path(__file__).with_suffix(".json")


_SMALL = {  # the small model for each family of models, by how its names begin
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
_BASE: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 16,
    "validation": 0.2,
    "lr": 0.05,
    "weight_decay": 0.02,
    "schedule": "constant",
    "seed": 4,
}
_SIZES: dict[str, dict[str, Any]] = {  # of the batches of text
    "transformer-": {"batch_size": 56},
    "decoder-": {"batch_size": 6, "block": 8},
}
_TRIED: dict[str, dict[str, Any]] = {  # the settings of each family that tries a setting
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
    "dropout": {"dropout": 0.2, "method": "layernorm", "model": _SMALL["transformer-"]},
    "inner_dropout": {"inner_dropout": 0.2, "method": "layernorm", "model": _SMALL["transformer-"]},
}
_TRIED_ON = {"method": "he_in", "model": _SMALL["mlp-"]}


def families_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the families that concern a run: that of its method and model, and one per setting that it uses.

    >>> families_of(TrainConfig(model="wrn-100-1", method="fixup:scalar_lr=10/L", crop=4))
    ('fixup:scalar_lr=10/L wrn-10-1', 'crop', 'schedule=cosine')

    Args:
        config: The configuration of the run.

    Returns:
        The families; none if the model is not one of normfree's, or the method is not registered.
    """
    small = next((found for start, found in _SMALL.items() if config.model.startswith(start)), None)
    try:
        method = get(config.method)
    except ValueError:
        return ()
    if small is None or not supports(small, method):
        return ()
    spelled = [_spelled(method), small, *([config.form] if config.form else [])]
    tried = []
    for family in _TRIED:
        setting, _, choice = family.partition("=")
        value = getattr(config, setting)
        if value == choice if choice else value != getattr(TrainConfig, setting):
            tried.append(family)
    return (" ".join(spelled), *tried)


def canary(
    device: torch.device | str = "cpu", *, precision: str = "float32", families: Iterable[str] | None = None
) -> Figures:
    """Compute the figures of families; torch's random generators are left as they were.

    Args:
        device: Where to compute.
        precision: The precision, as in a configuration.
        families: The families; by default all that are committed.

    Returns:
        The figures by family.

    Raises:
        ValueError: If there is no such family.
    """
    chosen = all_families() if families is None else tuple(families)
    return {family: _figures(family, torch.device(device), precision) for family in chosen}


def record_of(config: TrainConfig, device: torch.device) -> Record:
    """Return the canary to store with a run: its families on the CPU and, if the run used a GPU, there too."""
    families, record = families_of(config), {}
    for where, precision in [("cpu", "float32"), *([(str(device), config.precision)] if device.type == "cuda" else [])]:
        place = f"{torch.device(where).type} {precision}"
        figures = {family: list(_cached(family, where, precision)) for family in families}
        record[place] = {"tolerance": tolerance(place), "figures": figures}
    return record


def differing(stored: Mapping[str, Sequence[float]], today: Mapping[str, Sequence[float]], within: float) -> list[str]:
    """Return the families of `stored` whose figures differ from today's by more than a relative tolerance."""
    return [family for family, figures in stored.items() if not _close(figures, today.get(family, ()), within)]


def stale_families(config: TrainConfig, record: Record | str) -> list[str] | None:
    """Compare the canary of a stored run with today's code.

    Places without committed figures are left out: there are none for a GPU yet, so a GPU run is compared on the CPU.

    Args:
        config: The configuration of the run, with its method as today's code spells it.
        record: The canary that the run or its commit stored, or "unknown".

    Returns:
        The families of the run that today's code computes otherwise; None if the canary does not say.
    """
    families = families_of(config)
    if isinstance(record, str) or not record or not families:
        return None
    stale: list[str] = []
    for place, found in record.items():
        stored = {family: found["figures"].get(family) for family in families}
        if not all(stored.values()):
            return None
        today = todays(place, families)
        known = {family: figures for family, figures in stored.items() if family in today}
        stale += [family for family in differing(known, today, found["tolerance"]) if family not in stale]
    return stale


def todays(place: str, families: Iterable[str]) -> Figures:
    """Return today's figures of families in a place: the committed ones; on the CPU, others are computed."""
    committed: Figures = committed_record().get(place, {}).get("figures", {})
    device, precision = place.split()
    found = {}
    for family in families:
        if family in committed:
            found[family] = committed[family]
        elif device == "cpu":
            found[family] = list(_cached(family, device, precision))
    return found


@cache
def committed_record() -> Record:
    """Read the committed record of today's code."""
    record: Record = json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else {}
    return record


def all_families() -> tuple[str, ...]:
    """Return the committed families: every method, and its first definition, on the small models; and every setting."""
    found: dict[str, None] = {}
    for name in names():
        for small in dict.fromkeys(_SMALL.values()):
            if supports(small, name):
                found[f"{name} {small}"] = None
                found[f"{_spelled(get(as_of(name, FIRST_RELEASE, small)))} {small}"] = None
    return (*found, *_TRIED)


def _spelled(method: Method) -> str:
    """Return the name of a method with the options that differ from their defaults."""
    defaults = get(method.name).options
    changed = {name: value for name, value in method.options.items() if value != defaults[name]}
    return replace(method, options=changed).spec


def tolerance(place: str) -> float:
    """Return the relative difference of figures up to which two canaries of a place, such as "cpu float32", agree.

    It is at least five times what rounding was measured to change. In float32 on a CPU that is 2e-3: torch 2.11 and
    2.13 give equal figures; two threads change them by 1e-6, initial weights that differ by 1e-7 by 6e-5, and
    instructions without AVX by 2e-3, where a ReLU switches. In bf16 and mixed precision such initial weights change
    them by 2e-3, on a CPU. Convolutions in float32 on a GPU use TF32, which rounds less than bf16.
    """
    return 1e-2 if place == "cpu float32" else 2e-2


# One small run


def settings_of(family: str) -> dict[str, Any]:
    """Return the settings of a family's small run, as a `TrainConfig` takes them.

    Raises:
        ValueError: If there is no such family.
    """
    if family in _TRIED:
        settings = {**_BASE, **_TRIED_ON, **_TRIED[family]}
    else:
        method, model, *form = [*family.split(), ""]
        if model not in _SMALL.values():
            raise ValueError(
                f"expected a setting, or a method and a small model, got the family '{family}'; use families_of"
            )
        settings = {**_BASE, "method": method, "model": model, "form": form[0] or None}
    sizes = next((found for start, found in _SIZES.items() if settings["model"].startswith(start)), {})
    return {**settings, **sizes}


def _figures(family: str, device: torch.device, precision: str) -> list[float]:
    """Train the small network of a family, and return its figures."""
    settings = settings_of(family)
    # The figures must not depend on the choice of kernels.
    plain: dict[str, Any] = {"compile": False, "graph": False, "kernels": "compiled"}
    config = TrainConfig(**settings, **plain, device=str(device), precision=precision)  # type: ignore[arg-type]
    data = generated_text(settings["model"]) if _reads_text(settings["model"]) else generated_images()
    options: dict[str, Any] = {"model": None, "plan": None, "resume": False, "processes": Processes()}
    losses = []
    with (
        seeded_generators(device) as seed_generators,
        prepare_training(config, data=data, device=device, **options) as setup,
    ):
        step, steps = setup.step, setup.epoch_steps
        initial = {name: value.clone() for name, value in step.masters.named(step.masters.values).items()}
        for epoch in range(config.epochs):
            step.start_epoch(epoch, config.lr_factors(epoch, steps))
            for number in range(steps):
                seed_generators(config.seed, epoch * steps + number, 0)
                step.clear_metrics()
                step()
                losses.append(float(step.loss_sum))
        with step.averaged():
            scored = setup.inputs.test or setup.inputs.validation
            losses += [] if scored is None else [score(setup.model, scored(), setup.inputs.sums).loss]
        trained = step.masters.named(step.masters.values)
        figures = [*losses, *parameter_figures(initial, trained)]
    return [float(f"{figure:.7g}") for figure in figures]


def parameter_figures(initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> list[float]:
    """Return the number of elements, the initial norm and the norm of the change, of scalars, vectors and the others.

    >>> parameter_figures({"b": torch.tensor([4.0]), "w": torch.eye(4)}, {"b": torch.tensor([1.0]), "w": torch.eye(4)})
    [1.0, 4.0, 3.0, 0.0, 0.0, 0.0, 16.0, 2.0, 0.0]
    """
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for name, value in initial.items():
        before, after = value.detach().double().cpu(), trained[name].detach().double().cpu()
        kind = 0 if value.numel() == 1 else min(value.dim(), 2)
        sums[kind] += torch.stack((torch.tensor(value.numel()), before.square().sum(), (after - before).square().sum()))
    sums[:, 1:] = sums[:, 1:].sqrt()
    return [float(number) for number in sums.flatten()]


@cache
def _cached(family: str, device: str, precision: str) -> tuple[float, ...]:
    """Return the figures of a family, computed once per process."""
    return tuple(_figures(family, torch.device(device), precision))


def _close(figures: Sequence[float], others: Sequence[float], within: float) -> bool:
    if len(figures) != len(others):
        return False
    return all(
        a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= within * max(abs(a), abs(b))
        for a, b in zip(figures, others, strict=True)
    )


# Generated data

_PATTERNS, _NOISE, _LABELS, _WORDS, _LENGTHS = range(5)  # what is drawn
_VOCABULARY = 24


@cache
def generated_images() -> ImageSet:
    """Return 40 training and 16 test images of ten classes: a random pattern per class, with noise."""
    places = torch.arange(3 * 8 * 8)
    patterns = below(key(0, _PATTERNS, torch.arange(10)[:, None], places), 128)

    def split(number: int, count: int) -> Split:
        labels = below(key(number, _LABELS, torch.arange(count)), 10)
        noise = below(key(number, _NOISE, torch.arange(count)[:, None], places), 128)
        return Split((patterns[labels] + noise).to(torch.uint8).view(count, 3, 8, 8), labels)

    return image_set("canary", tuple("0123456789"), split(0, 40), split(1, 16))


@dataclass(frozen=True, kw_only=True)
class GeneratedText(Prepared):
    """A prepared folder in memory: random sentences of two to six tokens."""

    def pairs(self, split: str) -> TokenPairs:
        """Draw the pairs of a split."""
        return TokenPairs(_sentences(split, 0), _sentences(split, 1))

    def text(self, split: str) -> TokenLines:
        """Draw the lines of a split."""
        return _sentences(split, 0)


def generated_text(model: str) -> GeneratedText:
    """Return sentence pairs for a model that translates, and running text for a language model."""
    sides = ["source", "target"] if model.startswith("transformer-") else ["text"]
    manifest = {"vocabulary": _VOCABULARY, "sides": sides, "splits": ["train", "valid"], "inputs": {}}
    return GeneratedText(folder=Path("canary"), manifest=manifest)


def _sentences(split: str, side: int) -> TokenLines:
    count, purpose = (24, 2 * side) if split == "train" else (8, 2 * side + 1)
    lengths = 2 + below(key(purpose, _LENGTHS, torch.arange(count)), 5)
    words = SPECIAL + below(key(purpose, _WORDS, torch.arange(count)[:, None], torch.arange(6)), _VOCABULARY - SPECIAL)
    return TokenLines.of(row[:length].tolist() for row, length in zip(words, lengths.tolist(), strict=True))


def _reads_text(model: str) -> bool:
    return model.startswith(("transformer-", "decoder-"))
