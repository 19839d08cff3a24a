"""An estimate of the time that a run takes on a GPU."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from normfree.models import build
from normfree.models.foreign import is_foreign
from normfree.train import TrainConfig
from normfree.train.text.token_runs import is_tokens

# What one H200 was measured to do: operations a second of a wide network, seconds an image and layer of a narrow one,
# and seconds to set up.
_FLOPS, _NARROW, _SET_UP = 4e14, 0.5e-6, 40.0
_IMAGES = {"fashion14": 6_000, "mnist": 60_000}  # training images; others are taken to have as many as CIFAR-10
_CIFAR_IMAGES = 50_000
_TOKENS = {"multi30k": 4.3e5, "europarl": 6.0e6}  # target tokens for training, by the first word of the folder's name
_TOKEN_SPEED = 3e5  # a second, of a Transformer of 6 + 6 layers; assumed
_DEEP, _STEP = 160, 18  # a deeper network is not built for its size: 10,000 layers take half a minute


def gpu_seconds(config: TrainConfig) -> float:
    """About how long a run takes on one H200, for planning; a model of others is not looked at and counts as small."""
    if is_tokens(config.data):
        return 2 * _SET_UP + config.epochs * _TOKENS.get(Path(config.data).name.partition("-")[0], 0.0) / _TOKEN_SPEED
    layers, operations = (0.0, 0.0) if is_foreign(config.model) else _size(config.model)
    images = _IMAGES.get(config.data, _CIFAR_IMAGES) * (1 - config.validation)
    return _SET_UP + config.epochs * images * max(layers * _NARROW, 3 * operations / _FLOPS)


@cache
def _size(model: str) -> tuple[float, float]:
    """Weight layers of a model, and operations of a forward pass of one image in the shape of CIFAR-10.

    Both are linear in the depth, so that those of a deep network follow from two others of its family.
    """
    named = re.fullmatch(r"(resnet|wrn-|mlp-|resmlp-|cnn-)(\d+)(.*)", model)
    if named is not None and int(named[2]) > _DEEP:
        depth = int(named[2])
        steps = (depth - 60) // _STEP
        (a, b), (c, d) = (_size(f"{named[1]}{depth - n * _STEP}{named[3]}") for n in (steps, steps - 1))
        return a + steps * (c - a), b + steps * (d - b)
    x = torch.empty(2, 3, 32, 32, device="meta")
    network = build(model, "he_in", example=x, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(x)
    return sum(1 for p in network.parameters() if p.dim() > 1), counter.get_total_flops() / 2
