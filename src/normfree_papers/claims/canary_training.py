"""Compute the figures of a canary: train the small network of each probe for a few steps on generated data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normfree.data.counter_rng import below, key
from normfree.data.images.image_set import ImageSet, Split, image_set
from normfree.data.text.prepared_folder import Prepared
from normfree.data.text.tokens import TokenLines, TokenPairs
from normfree.methods import names
from normfree.methods.method_registry import FIRST_RELEASE, as_of
from normfree.models import supports
from normfree.nn.attention import SPECIAL
from normfree.nn.devices import device_of
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes
from normfree.train.engine.process_state import seeded_generators
from normfree.train.engine.setup import prepare_training
from normfree_papers.claims.canary import SMALL_MODELS, TRIED, Figures, Record, probes_of, spelled, tolerance

_BASE: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 16,
    "validation": 0.2,
    "lr": 0.05,
    "weight_decay": 0.02,
    "schedule": "constant",
    "seed": 4,
}
_TEXT: dict[str, dict[str, Any]] = {  # text has its own validation split
    "transformer-": {"batch_size": 56, "validation": 0.0},
    "decoder-": {"batch_size": 6, "block": 8, "validation": 0.0},
}
_TRIED_ON = {"method": "he_in", "model": SMALL_MODELS["mlp-"]}


def canary(
    device: torch.device | str = "cpu", *, precision: str = "float32", probes: Iterable[str] | None = None
) -> Figures:
    """Compute the figures of probes; torch's random generators are left as they were.

    Args:
        device: Where to compute.
        precision: The precision, as in a configuration.
        probes: The probes; by default every method and setting.

    Returns:
        The figures by probe.

    Raises:
        ValueError: If there is no such probe.
    """
    chosen = all_probes() if probes is None else tuple(probes)
    return {probe: _figures(probe, device_of(str(device)), precision) for probe in chosen}


def record_of(config: TrainConfig, device: torch.device) -> Record:
    """Return the canary to store with a run: its probes on the CPU and, if the run used a GPU, there too.

    The record is empty for a model that is not one of normfree's. Figures are computed once per process and device.
    """
    probes, record = probes_of(config), {}
    if not probes or not supports(settings_of(probes[0])["model"], config.method):
        return {}
    for where, precision in [("cpu", "float32"), *([(str(device), config.precision)] if device.type == "cuda" else [])]:
        place = f"{torch.device(where).type} {precision}"
        figures = {probe: list(cached_figures(probe, where, precision)) for probe in probes}
        record[place] = {"tolerance": tolerance(place), "figures": figures}
    return record


def all_probes() -> tuple[str, ...]:
    """Return every method, and its first definition, on the small models; and every setting."""
    found: dict[str, None] = {}
    for name in names():
        for small in dict.fromkeys(SMALL_MODELS.values()):
            if supports(small, name):
                found[f"{name} {small}"] = None
                found[f"{spelled(as_of(name, FIRST_RELEASE, small))} {small}"] = None
    return (*found, *TRIED)


# One small run


def settings_of(probe: str) -> dict[str, Any]:
    """Return the settings of a probe's small run, as a `TrainConfig` takes them.

    Raises:
        ValueError: If there is no such probe.
    """
    if probe in TRIED:
        settings = {**_BASE, **_TRIED_ON, **TRIED[probe]}
    else:
        method, model, *form = [*probe.split(), ""]
        if model not in SMALL_MODELS.values():
            raise ValueError(
                f"expected a setting, or a method and a small model, got the probe '{probe}'; use probes_of"
            )
        settings = {**_BASE, "method": method, "model": model, "form": form[0] or None}
    changes = next((found for start, found in _TEXT.items() if settings["model"].startswith(start)), {})
    return {**settings, **changes}


def _figures(probe: str, device: torch.device, precision: str) -> list[float]:
    """Train the small network of a probe, and return its figures."""
    settings = settings_of(probe)
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
        step, steps = setup.step, setup.steps_per_epoch
        initial = {name: value.clone() for name, value in step.masters.named(step.masters.values).items()}
        for epoch in range(config.epochs):
            step.start_epoch(epoch, setup.lr_factors(epoch))
            for number in range(steps):
                seed_generators(config.seed, epoch * steps + number, 0)
                step.clear_metrics()
                step()
                losses.append(float(step.loss_sum))
        with step.averaged():
            scored = setup.inputs.test or setup.inputs.validation
            losses += [] if scored is None else [setup.score(scored()).loss]
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
def cached_figures(probe: str, device: str, precision: str) -> tuple[float, ...]:
    """Return the figures of a probe, computed once per process."""
    return tuple(_figures(probe, torch.device(device), precision))


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
