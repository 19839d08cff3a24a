"""Mutants: named errors that a test plants in the library, to see whether a claim notices them.

    with MUTANTS["fixup_exponent"].plant():
        ...

Each mutant patches the attribute where the library looks it up, and the patch ends with the context. An error in a
registered method replaces its factory, because the registry caches what the original returned. Import the claims before
you plant an error: a module that is imported meanwhile would keep a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree import theory
from normfree.diagnostics import homogeneity_bounds, updates
from normfree.diagnostics.curvature import Hessian
from normfree.methods import Law, Method
from normfree.methods.initialize import InitContext
from normfree.methods.method import ONE, SQRT_HALF, ScalarRate
from normfree.methods.method_registry import _FACTORIES
from normfree.methods.nf_resnets import InverseStd
from normfree.methods.residual_scaling import GeometricSeries
from normfree.models.base import BlockBuilder
from normfree.models.nonresidual import Highway
from normfree.models.resnet import ResNetShape
from normfree.nn import normalizers
from normfree.nn.attention import Attention
from normfree.nn.residual import Residual
from normfree.nn.weight_layers import _RowGain, _SpectralNorm, _Standardized, _WeightNorm
from normfree.optim.clipping import clip_adaptively_
from normfree.optim.master_weights import MasterWeights
from normfree.plan import Branch, Layer, Position

Planted = AbstractContextManager[Any]


@dataclass(frozen=True)
class Mutant:
    """An error in one line, the function whose context plants it, and the only methods that it changes, if it does."""

    error: str
    plant: Callable[[], Planted]
    methods: str = ""

    def changes(self, method: str) -> bool:
        """Whether a network of this method may differ by the error."""
        return not self.methods or method.partition(":")[0] in self.methods.split()


# Ways to plant an error


@contextmanager
def _all(*planted: Planted) -> Iterator[None]:
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one)
        yield


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Planted]:
    """Replace an attribute by what `make` returns for the original."""
    return lambda: patch.object(owner, name, make(vars(owner)[name]))


def _everywhere(function: Callable[..., Any], new: Callable[..., Any]) -> Planted:
    """Replace a function in every module that has imported it by name."""
    name = function.__name__
    modules = [
        m for key, m in list(sys.modules.items()) if key.startswith("normfree") and vars(m).get(name) is function
    ]
    return _all(*(patch.object(module, name, new) for module in modules))


def _methods(names: str, change: Callable[[Method], Method]) -> Callable[[], Planted]:
    """Change registered methods, whatever their options."""

    def changed(factory: Callable[..., Method]) -> Callable[..., Method]:
        return wraps(factory)(lambda **options: change(factory(**options)))

    return lambda: patch.dict(_FACTORIES, {n: changed(_FACTORIES[n]) for n in names.split()})


def _then(names: str, change: Callable[[Any, Layer, Branch | None], object]) -> Callable[[], Planted]:
    """Change every hidden layer after the methods' initializer, given module, layer, and the branch that it ends."""

    def added(method: Method) -> Method:
        def initialize(ctx: InitContext) -> None:
            method.initializer(ctx)
            ends = {layer: branch for branch in ctx.plan.branches for layer in branch.last_layers}
            for layer, module in ctx.each(ctx.plan.hidden()):
                change(module, layer, ends.get(layer))

        return replace(method, initializer=initialize)

    return _methods(names, added)


def _law(value: float, chosen: Law) -> Callable[[], Planted]:
    """Give a law of the residual equation another value."""
    return _instead(Law, "at", lambda true: lambda law, place: value if law == chosen else true(law, place))


def _narrow(shape: ResNetShape) -> ResNetShape:
    """Let bottlenecks expand by 2."""
    return replace(shape, expansion=2) if shape.expansion > 1 else shape


def _alpha(variance: Callable[[Position, float], float]) -> Callable[[], Planted]:
    """Give NF-ResNets another expected variance, as a function of the position and β."""
    return _instead(InverseStd, "__call__", lambda true: lambda law, place: variance(place, law.beta) ** -0.5)


def _normalizer(name: str, make: Callable[[int], nn.Module], *, vectors: bool = True) -> Callable[[], Planted]:
    """Put another module in place of a normalizer of images, and of vectors as well."""
    true = normalizers.normalizer

    def wrong(given: Any, channels: int, *, spatial: bool = True, tokens: bool = False) -> nn.Module:
        if given == name and (spatial or vectors) and not tokens:
            return make(channels)
        return true(given, channels, spatial=spatial, tokens=tokens)

    return lambda: _everywhere(true, wrong)


# Wrong pieces of the library that need more than a line

_swap_fans = _instead(InitContext, "fans", lambda true: lambda ctx, layer: true(ctx, layer)[::-1])


def _fans_swapped(method: Method) -> Method:
    def initialize(ctx: InitContext) -> None:
        with _swap_fans():
            method.initializer(ctx)

    return replace(method, initializer=initialize)


def _draw_biases(ctx: InitContext) -> None:
    for _, module in ctx.each(ctx.plan.layers()):
        if module.bias is not None:
            module.bias.normal_(generator=torch.Generator().manual_seed(0))


def _lecun(ctx: InitContext, layer: Layer) -> None:
    ctx.set_(layer, ctx.normal(layer, 1 / ctx.fans(layer)[0]))


def _no_relu_gain(module: Any, layer: Layer, branch: Branch | None) -> None:
    if layer.feeds_activation and branch is None:
        module.gain.div_(2**0.5)


def _share(module: Any, layer: Layer, branch: Branch | None, power: float) -> None:
    if branch is not None:
        module.gain.mul_(branch.position.stage_size ** (power / 2))


def _centred_only(layer: Any) -> Tensor:
    centred: Tensor = layer.gain * (layer.weight - layer._weight_rows(layer.weight).mean(1).view_as(layer.gain))
    return centred


def _norm_detached(layer: Any, weight: Tensor) -> Tensor:
    out: Tensor = weight / layer._weight_rows(weight).norm(dim=1).detach().view_as(layer.gain)
    return out


def _beta_apart(true: Callable[..., Tensor], block: Any, x: Tensor, *context: Any, on_sum: bool) -> Tensor:
    beta, block.beta = block.beta, nn.Identity()
    try:
        out = true(block, x, *context)
        return beta(out) if on_sum else out
    finally:
        block.beta = beta


def _open_highway(block: Highway, x: Tensor) -> Tensor:
    out: Tensor = torch.sigmoid(block.gate(x) - 1.0) * block.transform(x) + x
    return out


class _RunningBatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class _UncentredBatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        over = [d for d in range(x.dim()) if d != 1]
        return x / (x.var(over, keepdim=True, correction=0) + self.eps).sqrt()


def _elu(layer: Any, x: Tensor) -> Tensor:
    return F.alpha_dropout(1.0507 * F.elu(x), layer.dropout, layer.training)


def _last_doubled(hessian: Hessian, vector: Tensor, true: Callable[..., Tensor]) -> Tensor:
    out = true(hessian, vector)
    out[-hessian.parameters[-1].numel() :] *= 2
    return out


def _copy_float32_only(masters: Any, true: Callable[..., None]) -> None:
    if all(half.stop == half.start for _, half in masters._half):
        true(masters)


def _clip_inverted(params: Any, grads: Any, *limits: float) -> None:
    before = [grad.clone() for grad in grads]
    clip_adaptively_(params, grads, *limits)
    for grad, whole in zip(grads, before, strict=True):
        grad.copy_(torch.where(grad == 0, whole, whole * whole / grad))


# The table

_PROPOSED, _BROCK = "idshort learnscalar convshort", "idshort_brock learnscalar_brock convshort_brock"

MUTANTS: dict[str, Mutant] = {
    "nothing": Mutant("none: the library as it is (the control)", ExitStack),
    # Fans and gains
    "proposed_fan_in": Mutant("robust's proposed weights have fan-in for fan-out", _methods(_PROPOSED, _fans_swapped)),
    "brock_fan_out": Mutant("Brock's weights have fan-out for fan-in", _methods(_BROCK, _fans_swapped)),
    "fixup_fan_in": Mutant("Fixup has fan-in for fan-out", _methods("fixup fixup_bounded", _fans_swapped)),
    "relu_gain_one": Mutant(
        "He's gain for ReLU is 1, not 2", _instead(theory, "forward_gain", lambda true: lambda *_a, **_k: 1.0)
    ),
    "variance_gain_two": Mutant(
        "the gain of centred weights for ReLU is 2, not 2/(1 - 1/π)",
        _instead(theory, "variance_gain", lambda true: lambda *_a, **_k: 2.0),
    ),
    # Biases, multipliers and zeros
    "biases_drawn": Mutant(
        "biases of layers start at random, not at 0", _instead(InitContext, "zero_biases_", lambda true: _draw_biases)
    ),
    "zeros_left_out": Mutant(
        "layers that should start at 0 get LeCun's weights", _instead(InitContext, "zero_", lambda true: _lecun)
    ),
    "fixup_no_multipliers": Mutant(
        "Fixup has no multipliers", _methods("fixup", lambda m: replace(m, rule=replace(m.rule, beta=ONE)))
    ),
    "fixup_scalar_rate": Mutant(
        "Fixup's scalars learn at 1/L of the rate, whatever scalar_lr says",
        _methods("fixup", lambda m: replace(m, scalar_rate=ScalarRate(1.0, over_branches=True))),
    ),
    "fixup_scalars_fast": Mutant(
        "Fixup's scalars learn at the rate of the weights, whatever scalar_lr says",
        _methods("fixup fixup_bounded", lambda m: replace(m, scalar_rate=ScalarRate(1.0))),
    ),
    "nf_no_biases": Mutant(
        "NF-ResNets have no biases in their layers", _methods("nf", lambda m: replace(m, layer_bias=False))
    ),
    # Fixup's exponent
    "fixup_exponent": Mutant(
        "Fixup's exponent is -1/(2m), not -1/(2m-2)",
        _instead(theory, "fixup_scale", lambda true: lambda branches, layers: branches ** (-1 / (2 * layers))),
    ),
    "fixup_exponent_sign": Mutant(
        "Fixup's exponent is 1/(2m-2), not -1/(2m-2)",
        _instead(theory, "fixup_scale", lambda true: lambda branches, layers: 1 / true(branches, layers)),
        methods="fixup fixup_bounded",
    ),
    "scalar_update_root": Mutant(
        "the update of a scalar branch is the root of the sum of squares",
        _instead(theory, "scalar_branch_update", lambda true: lambda a, x=1.0: true(a, x) ** 0.5),
    ),
    # Weight norm: lengths, and the weight itself
    "wn_unit_lengths": Mutant(
        "weight norm has g = 1 in every layer", _then("wn", lambda module, layer, branch: module.gain.fill_(1.0))
    ),
    "wn_no_relu_gain": Mutant("weight norm has no factor 2 in g before a ReLU", _then("wn", _no_relu_gain)),
    "wn_no_share": Mutant("weight norm has no 1/√B at the end of a branch", _then("wn", partial(_share, power=1.0))),
    "wn_share_squared": Mutant(
        "weight norm has 1/B for 1/√B at the end of a branch", _then("wn", partial(_share, power=-1.0))
    ),
    "wn_fans_swapped": Mutant("weight norm has g = √(γ·fan_out/fan_in)", _methods("wn", _fans_swapped)),
    "wn_no_division": Mutant(
        "weight norm does not divide by ‖v‖",
        _instead(_WeightNorm, "effective_weight", lambda true: lambda layer: layer.gain * layer.weight),
    ),
    "wn_norm_detached": Mutant(
        "the gradient of weight norm treats ‖v‖ as a constant",
        _instead(_RowGain, "_over_norm", lambda true: _norm_detached),
    ),
    "k_n_other_area": Mutant(
        "K_n takes another convention for the area of a sphere",
        _instead(theory, "k_n", lambda true: lambda n: true(n) * (n - 1) / n),
    ),
    # NF-ResNets and standardized weights
    "nf_alpha_one": Mutant("NF-ResNets have α = 1", _alpha(lambda place, beta: 1.0)),
    "nf_no_restart": Mutant(
        "the expected variance of NF-ResNets does not restart at a transition",
        _alpha(lambda place, beta: 1 + (place.index - 1) * beta**2),
    ),
    "nf_beta_not_squared": Mutant(
        "the expected variance of NF-ResNets grows by β per branch, not by β²",
        _alpha(lambda place, beta: 1 + beta * (place.index_in_stage - 1 or place.previous_stage_size)),
    ),
    "no_centring": Mutant(
        "standardized weights are not centred",
        _instead(_Standardized, "effective_weight", lambda true: lambda w: w.gain * w._over_norm(w.weight)),
    ),
    "no_scaling": Mutant(
        "standardized weights are centred, but not scaled",
        _instead(_Standardized, "effective_weight", lambda true: _centred_only),
    ),
    # The residual equation
    "sqrt_half_left_out": Mutant("sums are not multiplied by √½", _law(1.0, SQRT_HALF)),
    "half_for_sqrt_half": Mutant("sums are multiplied by ½, not by √½", _law(0.5, SQRT_HALF)),
    "beta_forgotten": Mutant(
        "the forward pass forgets the factor β of the branch",
        _instead(Residual, "forward", lambda true: lambda *args: _beta_apart(true, *args, on_sum=False)),
    ),
    "beta_on_the_sum": Mutant(
        "β multiplies the whole sum, not the branch",
        _instead(Residual, "forward", lambda true: lambda *args: _beta_apart(true, *args, on_sum=True)),
    ),
    "hanin_constant": Mutant(
        "Hanin's factor is r for every branch, not r^l",
        _instead(GeometricSeries, "__call__", lambda true: lambda law, place: law.r),
    ),
    "shao_plain_shortcut": Mutant(
        "Shao's rule leaves the shortcut at 1", _methods("shao", lambda m: replace(m, rule=replace(m.rule, a=ONE)))
    ),
    "shortcut_reads_raw": Mutant(
        "shortcuts of pre-activation blocks read the raw signal",
        _instead(
            BlockBuilder, "sum", lambda true: lambda *args, **kw: true(*args, **{**kw, "shortcut_reads_entry": False})
        ),
    ),
    "highway_open_shortcut": Mutant(
        "the shortcut of a highway block lacks the factor 1 - T",
        _instead(Highway, "forward", lambda true: _open_highway),
    ),
    # Normalizers and activations
    "batch_norm_running": Mutant(
        "batch norm uses its running statistics in training", _normalizer("batch", _RunningBatchNorm)
    ),
    "batch_norm_uncentred": Mutant("batch norm does not subtract the mean", _normalizer("batch", _UncentredBatchNorm)),
    "layer_norm_per_channel": Mutant(
        "layer norm of images takes its statistics over each channel",
        _normalizer("layer", lambda channels: nn.GroupNorm(channels, channels), vectors=False),
    ),
    "selu_alpha_one": Mutant("SELU has ELU's α = 1", _instead(normalizers.SELU, "forward", lambda true: _elu)),
    "spectral_frobenius": Mutant(
        "spectral norm divides by the Frobenius norm",
        _instead(_SpectralNorm, "effective_weight", lambda true: lambda layer: layer.weight / layer.weight.norm()),
    ),
    "normprop_uncentred": Mutant(
        "normalization propagation does not subtract the mean of ReLU",
        _instead(normalizers.NormPropReLU, "mean", lambda true: 0.0),
    ),
    "mask_forgotten": Mutant(
        "a decoder sees the words that it should predict",
        _instead(Attention, "__init__", lambda true: lambda *args, **kw: true(*args, **{**kw, "causal": False})),
    ),
    # Training
    "masters_not_copied": Mutant(
        "the float32 copies of bf16 weights are not rounded into the model",
        _instead(MasterWeights, "copy_to_model_", lambda true: lambda masters: _copy_float32_only(masters, true)),
    ),
    "clip_inverted": Mutant(
        "adaptive clipping multiplies by the factor by which it should divide",
        lambda: _everywhere(clip_adaptively_, _clip_inverted),
    ),
    # Networks and diagnostics
    "bottleneck_expansion": Mutant(
        "bottlenecks expand by 2, not by 4",
        _instead(ResNetShape, "build", lambda true: lambda shape, *args: true(_narrow(shape), *args)),
    ),
    "no_stride": Mutant(
        "the stride of a block is left out",
        _instead(BlockBuilder, "block", lambda true: lambda *args, **kw: true(*args, **{**kw, "stride": 1})),
    ),
    "block_bound_by_root": Mutant(
        "the bound of fixup's Theorem 1 divides by the root of the norm",
        _instead(
            homogeneity_bounds, "_block_bound", lambda true: lambda name, norms, *rest: true(name, norms.sqrt(), *rest)
        ),
    ),
    "update_squared": Mutant(
        "an update is measured by its squared norm",
        _instead(updates, "_norm", lambda true: lambda change: true(change) ** 2),
    ),
    "hessian_product": Mutant(
        "the Hessian-vector product counts the last parameter twice",
        _instead(Hessian, "__call__", lambda true: lambda hessian, vector: _last_doubled(hessian, vector, true)),
    ),
}
