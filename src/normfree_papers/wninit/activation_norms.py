"""The claims of `wninit` on norms over depth in networks of changing width, and on lengths and directions in training.

Reference: Arpit, Campos, Bengio 2019, sections 3 and 4. All accuracies are in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from normfree import theory
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, claim, expect, near, training_claim
from normfree_papers.claims.depth_curves import chart, decades, geometric_means, table
from normfree_papers.claims.seed_metrics import CHANCE, DEAD, QUICK_SETTINGS, NumbersByRow
from normfree_papers.claims.shared_ranges import it_trains, reading, trains
from normfree_papers.wninit.networks import (
    Norms,
    feed_forward,
    initialized,
    measure_norms,
    residual,
    width_slopes,
    with_unit_lengths,
)
from normfree_papers.wninit.sweep import Sweep

_INPUTS = 64
_SEEDS = 10
_OVER = {"activations": "over the input's", "gradients": "over the last one's"}


# Figure 1

_WIDTHS = {"150 to 250": (150, 250), "950 to 1050": (950, 1050)}
_LAYERS, _BLOCKS = 20, 40
_KINDS: dict[str, tuple[int, Callable[[Sequence[int]], nn.Sequential]]] = {
    "feed-forward": (_LAYERS, feed_forward),
    "residual": (_BLOCKS, residual),
}


def _slack(width: int) -> float:
    """How far the mean norm after 20 layers may lie from 1: the bias of a root, and three standard errors.

    With orthogonal rows of m outputs a ReLU keeps a random half of the squared norm, whose relative variance is 3/m.
    """
    variance = 3 * _LAYERS / width
    return round(variance / 8 + 3 * math.sqrt(variance) / 2 / math.sqrt(_SEEDS), 2)


def _fig1_checks() -> tuple[Check, ...]:
    checks = []
    for name, ends in _WIDTHS.items():
        width = sum(ends) // 2
        scale: Scale | None = None if name == "150 to 250" else "full"
        for what in ("activations", "gradients"):
            passed = int(what == "gradients")  # gradients at the first layer's output pass one layer less
            halved = -math.log10(2) * (_LAYERS - passed) / 2
            edge = theory.weightnorm_norm_ratio(_BLOCKS) / (1 + 1 / _BLOCKS) ** (passed / 2)
            grown = math.log10(1.5) * (_BLOCKS - passed) / 2
            ideal = "" if what == "activations" else ", but for √(n_1/n_20), which g = √(2n/m) adds"
            checks += [
                near(
                    f"{what}, feed-forward, {name}, proposed",
                    1.0,
                    _slack(width),
                    paper="neither explodes nor vanishes",
                    scale=scale,
                ).derived(
                    f"the norm of {what} over 20 layers of width {name} is kept by the proposed lengths{ideal}",
                    why=f"3/m in the relative variance of a square, m = {width}, over 20 layers: the bias of its root "
                    "and three standard errors of 10 seeds, if all inputs were alike",
                ),
                near(f"log10 {what}, feed-forward, {name}, g = 1", halved, 0.2, paper="vanishing", scale=scale).derived(
                    f"g = 1 lets the {what} vanish",
                    why=f"½ per layer in the square over {_LAYERS - passed} layers is {halved:.2f}; 0.2 for the bias, "
                    "three standard errors and √(n_20/n_0)",
                ),
                near(f"{what}, residual, {name}, proposed", edge, share=0.03, paper="√2 to √e", scale=scale).derived(
                    f"over 40 blocks the {what} change by a factor between √2 and √e",
                    why=f"1 + 1/B per block in the square, B = 40, {_BLOCKS - passed} blocks: {edge:.3f}; ⟨h, F⟩ adds "
                    "4/n to the variance of a square, which leaves 0.3 % (inputs independent) to 2.2 % (all alike)",
                ),
                near(f"log10 {what}, residual, {name}, g = 1", grown, 0.15, paper="exploding", scale=scale).derived(
                    f"g = 1 lets the {what} explode",
                    why=f"1 + ½ per block in the square over {_BLOCKS - passed} blocks is {grown:.2f}; ⟨h, F⟩ leaves "
                    "0.03 with 10 seeds if all inputs were alike, and a bias of 0.02",
                ),
            ]
    for what, slope in (("activations", 0.0), ("gradients", 0.5)):
        checks.append(
            near(f"slope in the width, {what}", slope, 0.15, paper="of any width").derived(
                f"the factor of a layer for {what}, as a power of its ratio of widths",
                why=f"g = √(2n/m) makes it {slope:g}; a layer's 6 % over ratios that vary by 20 % leave 0.07 a seed; g "
                "with n and m swapped gives 1 and -0.5, g = √2 gives 0.5 and 0",
            )
        )
    return tuple(checks)


@claim(
    id="wninit/fig1",
    where="Figure 1",
    statement="The proposed lengths keep norms of activations and gradients through 20 layers and 40 residual blocks "
    "of any width, where g = 1 lets them vanish or explode.",
    paper_value="four panels: flat, and between √2 and √e in residual networks; g = 1 vanishes or explodes",
    how="Networks on N(0, 1) inputs that the library initializes by method wn, the width of every layer drawn from "
    "U(150, 250) or U(950, 1050), random gradient at the end.",
    cost=Cost(quick_seconds=12, full_seconds=110),
    seeds=_SEEDS,
    quick_seeds=_SEEDS,
    departures=("the supplement with the settings was not available; in residual networks each branch has a width",),
    version=2,
    checks=_fig1_checks(),
)
def fig1(settings: Settings) -> Measurement:
    """Norms over layers of changing width. Reference: wninit, Figure 1; sections 3 and 4.

    Differs: the supplement with the details was not available. In a residual network one width is drawn for the stream
    and one for each branch, since the sum needs equal widths.
    """
    chosen = {name: ends for name, ends in _WIDTHS.items() if not settings.quick or name == "150 to 250"}
    found: dict[tuple[str, str, str], list[Norms]] = {}
    for kind, width, seed in settings.each("{}, width {}, seed {}", _KINDS, chosen, settings.seeds):
        (depth, network), (low, high) = _KINDS[kind], chosen[width]
        g = torch.Generator().manual_seed(seed)
        widths = torch.randint(low, high + 1, (depth + 1,), generator=g).tolist()
        model = initialized(network(widths), "wn", widths[0], g).to(settings.device)
        x = torch.randn(_INPUTS, widths[0], generator=g).to(settings.device)
        found.setdefault((kind, width, "proposed"), []).append(measure_norms(model, x, g))
        found.setdefault((kind, width, "g = 1"), []).append(measure_norms(with_unit_lengths(model), x, g))
    values: dict[str, list[float]] = {}
    curves: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {}
    for (kind, width, name), seeds in found.items():
        for what in ("activations", "gradients"):
            series = [getattr(norms, what) for norms in seeds]
            ends = [s[-1] if what == "activations" else s[0] for s in series]
            if (kind, what, name) == ("feed-forward", "gradients", "proposed"):
                ends = [end * math.sqrt(s.widths[-1] / s.widths[1]) for end, s in zip(ends, seeds, strict=True)]
            key = f"{what}, {kind}, {width}, {name}"
            values[key if name == "proposed" else f"log10 {key}"] = (
                ends if name == "proposed" else [decades([1.0, end]) for end in ends]
            )
            curves.setdefault((kind, what), {})[f"{name}, width {width}"] = geometric_means(series)
    slopes = [width_slopes(norms) for norms in found["feed-forward", "150 to 250", "proposed"]]
    for what, column in zip(("activations", "gradients"), zip(*slopes, strict=True), strict=True):
        values[f"slope in the width, {what}"] = list(column)
    panels = tuple(
        chart(
            f"{kind}: norm of the {what}", named, _OVER[what], "layer" if kind == "feed-forward" else "residual block"
        )
        for (kind, what), named in curves.items()
    )
    return Measurement(values=values, panels=panels, notes=(f"geometric means over {len(settings.seeds)} seeds",))


# Section 3: lengths for the forward and for the backward pass

_GROWING = (128, 1024)  # the first and the last width
_LENGTHS = {"forward": (0.0, 0.5), "mean": (0.25, 0.25), "backward": (0.5, 0.0)}


@claim(
    id="wninit/sec3_lengths",
    where="Section 3, implementation details",
    statement="The lengths that keep activations, √(2n/m), and those that keep gradients, √2, differ where the width "
    "changes; each lets the other change as the square root of the ratio of widths.",
    paper_value="'there is a discrepancy between the initialization required by the forward and backward pass'; g = "
    "√(2n/m) by Theorem 1, g = √2 by Theorem 2",
    how="MLPs of 20 layers that grow from 128 to 1,024 units, initialized by wn with g=forward, g=backward and their "
    "geometric mean; the exponents of the norms' factors in the ratio of widths.",
    cost=Cost(quick_seconds=12, full_seconds=12),
    seeds=_SEEDS,
    quick_seeds=_SEEDS,
    checks=tuple(
        near(f"exponent of {what}, {lengths}", exponent, 0.12, paper=exponent).derived(
            f"with lengths for the {lengths} pass, {what} change as this power of the ratio of widths"
            if lengths != "mean"
            else f"with the geometric mean of both lengths, {what} change as this power of the ratio of widths",
            why="a layer multiplies the squares by g²m/(2n) and g²/2; 3/m in the variance of each leaves 0.11 a seed, "
            "0.12 are three standard errors of 10",
        )
        for lengths, both in _LENGTHS.items()
        for what, exponent in zip(("activations", "gradients"), both, strict=True)
    ),
)
def sec3_lengths(settings: Settings) -> Measurement:
    """Norms with lengths for either pass. Reference: wninit, section 3, Theorems 1 and 2, implementation details."""
    first, last = _GROWING
    widths = [round(first * (last / first) ** (layer / _LAYERS)) for layer in range(_LAYERS + 1)]

    def measured(name: str, seed: int) -> Norms:
        g = torch.Generator().manual_seed(seed)
        model = initialized(feed_forward(widths), f"wn:g={name}", widths[0], g).to(settings.device)
        x = torch.randn(_INPUTS, widths[0], generator=g).to(settings.device)
        return measure_norms(model, x, g)

    found = settings.over_seeds_of(_LENGTHS, measured)
    values: dict[str, list[float]] = {}
    for name, seeds in found.items():
        values[f"exponent of activations, {name}"] = [
            math.log(s.activations[-1]) / math.log(s.widths[-1] / s.widths[0]) for s in seeds
        ]
        values[f"exponent of gradients, {name}"] = [
            math.log(s.gradients[0]) / math.log(s.widths[1] / s.widths[-1]) for s in seeds
        ]
    return Measurement(
        values=values,
        panels=tuple(
            chart(
                f"norm of the {what}",
                {name: geometric_means(getattr(s, what) for s in seeds) for name, seeds in found.items()},
                over,
                "layer",
            )
            for what, over in _OVER.items()
        ),
        tables=table(
            "Exponents in the ratio of widths",
            ("number", "measured"),
            ((name, f"{sum(v) / len(v):.3f}") for name, v in values.items()),
        ),
    )


# Section 3: lengths for the forward pass and orthogonal directions, in training

_OTHERS = {
    "g for the backward pass": "wn:g=backward",
    "geometric mean of both g": "wn:g=mean",
    "Gaussian directions": "wn:directions=gaussian",
}
_ALL = {"proposed": "wn", **_OTHERS}
_SMALL: dict[str, Any] = {**QUICK_SETTINGS, "flip": False, "cutout": 0, "model": "wrn-22-1", "epochs": 1}
_DEPTH = {"quick": 22, "full": 40}


@training_claim(
    id="wninit/sec3",
    where="Section 3, implementation details and footnote 2",
    statement="The lengths for the forward pass train better than those for the backward pass and than a combination "
    "of both, and orthogonal directions better than Gaussian ones.",
    paper_value="'we tested both (and combinations of them) … and found the one proposed for the forward pass to be "
    "superior'; of Gaussian and orthogonal initialization 'the latter is superior'; no numbers",
    how="Recipe wninit_seeds: WRN-40-10, 3 epochs of CIFAR-10 at 0.1, 0.03 and 0.01, the best chosen on held-out "
    "images (full); WRN-22-1, one epoch of the embedded images at 0.03 (quick).",
    cost=Cost(quick_seconds=60, full_seconds=1850, device="gpu"),
    checks=(
        it_trains("proposed", "test accuracy of the proposed initialization", paper="superior", why=trains("superior")),
        *(
            expect(f"proposed - {other}", paper="superior", low=0.0, scale="full").reading(
                f"test accuracy of the proposed initialization less that with {other}, in points",
                why=reading("superior", "a higher accuracy at the best rate of each", "below 0"),
            )
            for other in _OTHERS
        ),
    ),
    departures=("bf16 on a GPU", "network, epochs and rates are chosen: the paper calls the experiments preliminary"),
    needs_data="CIFAR-10",
)
def sec3(settings: Settings) -> Measurement:
    """Accuracy with other lengths and directions. Reference: wninit, section 3, implementation details, footnote 2."""
    depth = _DEPTH[settings.scale]
    network = recipe("wninit_seeds", **(_SMALL if settings.quick else {}))
    rates = (0.03,) if settings.quick else (0.1, 0.03, 0.01)
    sweep = Sweep.run(settings, _ALL, {depth: network}, rates, diverged=CHANCE, trains=DEAD)
    found = NumbersByRow({label: sweep.accuracies(label, depth) for label in _ALL})
    return Measurement(
        values=found | found.differences(*(("proposed", other) for other in _OTHERS)),
        panels=sweep.panels("the embedded images" if settings.quick else "CIFAR-10"),
        notes=("a diverged run counts as chance",),
    )
