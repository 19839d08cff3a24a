"""Weight normalization: the initialization of wninit, and the three that the paper compares it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from normfree.methods.initialize import InitContext
from normfree.methods.lsuv import calibrate_
from normfree.methods.method import Law, Method, Rule, require_choice
from normfree.methods.method_registry import register
from normfree.methods.standard_init import draw_normal_
from normfree.nn.normalizers import OmittedActivation
from normfree.plan import Branch

Directions = Literal["orthogonal", "gaussian"]
Lengths = Literal["forward", "backward", "mean"]
_POWERS: dict[Lengths, float] = {"forward": 1.0, "backward": 0.0, "mean": 0.5}


def _set_lengths_(
    ctx: InitContext,
    last_gain: Callable[[Branch, int, int], float],
    directions: Directions = "orthogonal",
    power: float = 1.0,
) -> None:
    """Draw directions, and set g = √(γ·(fan_in/fan_out)^power) with γ = 2 before a ReLU, else 1.

    The last layer of a branch gets `last_gain`. The stem of a ResNet has γ = 2 even without its ReLU, as in the
    authors' code, but not in their text.
    """
    # The activation beside a layer, by the name that normfree's networks give it.
    beside = {layer: ctx.modules.get(f"{layer.name.rpartition('.')[0]}.act") for layer in ctx.plan.stem}
    bare = {layer for layer, activation in beside.items() if isinstance(activation, OmittedActivation)}
    ends = {layer: branch for branch in ctx.plan.branches for layer in branch.last_layers}
    for layer, module in ctx.each(ctx.plan.hidden()):
        fan_in, fan_out = ctx.fans(layer)
        ctx.set_(layer, ctx.orthogonal(layer) if directions == "orthogonal" else ctx.normal(layer))
        if layer in ends:
            length = last_gain(ends[layer], fan_in, fan_out)
        else:
            gamma = 2.0 if layer.feeds_activation or layer in bare else 1.0
            length = (gamma * (fan_in / fan_out) ** power) ** 0.5
        module.gain.fill_(length)  # type: ignore[operator]  # a weight-norm layer, checked by `initialize_`
    ctx.default_classifier_()


@dataclass(frozen=True)
class WeightNormInit:
    """Initializer of `wn`: directions, and lengths with γ = 1/B_k at the end of a branch in stage k."""

    directions: Directions = "orthogonal"
    g: Lengths = "forward"

    def __call__(self, ctx: InitContext) -> None:
        power = _POWERS[self.g]

        def stage_share(branch: Branch, fan_in: int, fan_out: int) -> float:
            return float(((fan_in / fan_out) ** power / branch.position.stage_size) ** 0.5)

        _set_lengths_(ctx, stage_share, self.directions, power)


def _wn_hanin_(ctx: InitContext) -> None:
    def geometric(branch: Branch, fan_in: int, fan_out: int) -> float:
        return float(0.9**branch.position.index_in_stage)

    _set_lengths_(ctx, geometric)


def _orthogonal_weights_(ctx: InitContext) -> None:
    """Orthogonal weights as drawn; g is the norm of their rows."""
    for layer in ctx.plan.hidden():
        ctx.set_(layer, ctx.orthogonal(layer))
    ctx.default_classifier_()


def _he_weights_(ctx: InitContext) -> None:
    """He's weights, N(0, 2/fan_in), in every layer; g is the norm of their rows."""
    draw_normal_(ctx, lambda layer, fan_in, fan_out: 2.0 / fan_in)


_WEIGHTS = {"orthogonal": _orthogonal_weights_, "he": _he_weights_}


def _wn_data_(ctx: InitContext) -> None:
    """g = 1/σ and b = -μ/σ per channel, so that every pre-activation has mean 0 and variance 1 on the batch."""
    for layer, module in ctx.each(ctx.plan.hidden()):
        ctx.set_(layer, ctx.orthogonal(layer))
        module.gain.fill_(1.0)  # type: ignore[operator]

    def standardize(module: torch.nn.Module, out: torch.Tensor) -> torch.Tensor:
        channels = out.dim() - 1 if isinstance(module, torch.nn.Linear) else 1
        dims = [d for d in range(out.dim()) if d != channels]
        mean, std = out.mean(dims), out.std(dims, unbiased=False).clamp_min(1e-6)
        module.gain.copy_((1 / std).view_as(module.gain))  # type: ignore[operator, arg-type]
        module.bias.copy_(-mean / std)  # type: ignore[operator]
        shape = [-1 if d == channels else 1 for d in range(out.dim())]
        return (out - mean.view(shape)) / std.view(shape)

    calibrate_(ctx, standardize)
    ctx.default_classifier_()


@register
def wn(*, directions: Directions = "orthogonal", g: Lengths = "forward", stem_relu: bool = False) -> Method:
    """W = g·v/‖v‖, v orthogonal, g = √(γ·fan_in/fan_out), γ = 1/B_k at the end of a branch in stage k.

    No ReLU follows the stem of a ResNet, as in the authors' code. `stem_relu=true` adds one, as in release 0.1. Wide
    ResNets and MLPs do not depend on it.

    The other choices of the paper's section 3 are options: `directions=gaussian`; `g=backward`, which is √γ and keeps
    gradients instead of activations; and `g=mean`, the geometric mean of both lengths.

    Reference: wninit, sections 3 and 4, implementation details; theorems 1 to 4.
    """
    require_choice("wn", "directions", directions, get_args(Directions))
    require_choice("wn", "g", g, _POWERS)
    return Method(
        name="wn",
        summary="weight norm with orthogonal directions and lengths that keep the norm through any depth",
        paper="wninit",
        reference="wninit, sections 3 and 4, implementation details",
        weights_text="weight norm; orthogonal, g = √(γ·fan_in/fan_out)",
        rule=Rule(beta=Law(1.0, text="in g, 1/√B_k")),
        initializer=WeightNormInit(directions, g),
        form="linear",
        skips=("residual", "none"),
        shortcut="conv",
        weight_kind="weight_norm",
        layer_bias=True,
        stem_relu=stem_relu,
    )


@register
def wn_default(*, directions: str = "orthogonal", stem_relu: bool = False) -> Method:
    """Weight norm as PyTorch wraps it around existing weights: g = ‖v‖.

    The weights are orthogonal, as in the runs of the paper's Table 2. `directions=he` takes He's, N(0, 2/fan_in),
    as release 0.1 did; the authors' code offers both.

    Reference: wninit, section 5.1, baseline 1.
    """
    require_choice("wn_default", "directions", directions, _WEIGHTS)
    drawn = {"orthogonal": "orthogonal", "he": "He"}[directions]
    return replace(
        wn(stem_relu=stem_relu),
        name="wn_default",
        summary="weight norm around orthogonal weights, with the lengths that they have",
        reference="wninit, section 5.1, baseline 1",
        weights_text=f"weight norm; {drawn} v, g = ‖v‖",
        rule=Rule(beta=Law(1.0, text="1")),
        initializer=_WEIGHTS[directions],
    )


@register
def wn_data(*, stem_relu: bool = False) -> Method:
    """Weight norm with g and b from one batch. Reference: wninit, section 5; Salimans & Kingma 2016, section 3."""
    return replace(
        wn(stem_relu=stem_relu),
        name="wn_data",
        summary="weight norm with lengths and biases that standardize every pre-activation on one batch",
        reference="wninit, section 5; Salimans & Kingma 2016",
        weights_text="weight norm; orthogonal, g = 1/σ and b = -μ/σ from a batch",
        rule=Rule(beta=Law(1.0, text="1")),
        initializer=_wn_data_,
        needs_example=True,
    )


@register
def wn_hanin(*, stem_relu: bool = False) -> Method:
    """`wn` with g = 0.9^b at the end of the b-th branch of a stage. Reference: wninit, section 5.1, baseline 2."""
    return replace(
        wn(stem_relu=stem_relu),
        name="wn_hanin",
        summary="weight norm with a geometric series of branch lengths in every stage",
        reference="wninit, section 5.1, baseline 2",
        weights_text="weight norm; as wn, but 0.9^b at branch ends",
        rule=Rule(beta=Law(1.0, text="in g, 0.9^b")),
        initializer=_wn_hanin_,
        skips=("residual",),
    )
