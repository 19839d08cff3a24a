"""LSUV: scale every residual block or layer to unit output variance on a batch, in one pass.

`calibrate_` is also used by `wn_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normfree.methods.initialize import InitContext
from normfree.methods.method import ONE, WITH_SEQUENCES, Law, Method, Rule, require_choice
from normfree.methods.method_registry import register
from normfree.nn.residual import Residual
from normfree.nn.scalars import scalars_of
from normfree.nn.weight_layers import set_weight_

_DEAD = 1e-6  # a standard deviation below this is rounding error


@dataclass
class _Once:
    """A forward hook that calibrates a module at its first call only, so that a shared layer is not set twice."""

    name: str
    calibrate: Callable[[nn.Module, Tensor], Tensor]
    done: bool = False

    def __call__(self, module: nn.Module, _args: object, out: Tensor | tuple[Tensor, ...]) -> Any:
        if self.done:
            return None
        self.done = True
        if isinstance(out, tuple):  # a block of a third-party model; the signal is the first of its outputs
            parts = (self._calibrated(module, out[0]), *out[1:])
            return type(out)(*parts) if hasattr(out, "_fields") else parts  # a named tuple stays one
        return self._calibrated(module, out)

    def _calibrated(self, module: nn.Module, out: Tensor) -> Tensor:
        if not out.std(unbiased=False) > _DEAD:
            raise ValueError(
                f"expected a signal that varies after '{self.name}', got a constant; pass a batch of the "
                "training data, or use a method that needs none, such as 'fixup'"
            )
        return self.calibrate(module, out)


def calibrate_(ctx: InitContext, calibrate: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Calibrate every layer but the classifier during one forward pass of the batch.

    `calibrate(module, output)` changes the module and returns its new output, which the next layers read. So one pass
    is enough at any depth. Modes, hooks and the random state are unchanged afterwards.
    """
    _calibrate_(ctx, (layer.name for layer in ctx.plan.hidden()), calibrate)


def _calibrate_(ctx: InitContext, names: Iterable[str], calibrate: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Calibrate the named modules during one forward pass."""
    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(ctx.modules[name].register_forward_hook(_Once(name, calibrate)))
        ctx.run_model()


def _scale_blocks_(ctx: InitContext) -> None:
    """Orthogonal weights; c of each block makes the variance of its output 1."""
    if not ctx.plan.branches:
        return _scale_layers_(ctx)
    for layer in ctx.plan.hidden():
        ctx.set_(layer, ctx.orthogonal(layer))

    def to_unit_variance(module: nn.Module, out: Tensor) -> Tensor:
        std = out.std(unbiased=False)
        factors[module].div_(std)
        return out / std

    places = [branch.home for branch in ctx.plan.branches]
    factors = {ctx.modules[place]: _sum_factor(ctx, place) for place in places}
    _calibrate_(ctx, places, to_unit_variance)
    ctx.default_classifier_()


def _sum_factor(ctx: InitContext, place: str) -> Tensor:
    """Return c of the sum in a module; a converted model has it as a scalar around the module."""
    module = ctx.modules[place]
    found = getattr(module.c, "value", None) if isinstance(module, Residual) else scalars_of(module).get("beta")
    if found is None:
        raise ValueError(
            f"method 'lsuv' expects a factor of the sum in '{place}', got none; build the model with method='lsuv', or "
            "convert it, or use 'lsuv:by=layer'"
        )
    return found


def _scale_layers_(ctx: InitContext) -> None:
    """Orthogonal weights; a factor of each layer makes the variance of its output 1."""
    for layer in ctx.plan.hidden():
        ctx.set_(layer, ctx.orthogonal(layer))

    def to_unit_variance(module: nn.Module, out: Tensor) -> Tensor:
        std = out.std(unbiased=False)
        set_weight_(module, module.weight / std)  # type: ignore[operator, arg-type]
        return out / std

    calibrate_(ctx, to_unit_variance)
    ctx.default_classifier_()


@register
def lsuv(*, by: str = "block") -> Method:
    """x' = p(c·(x + f(x))), orthogonal weights, and a fixed c that gives each block's output unit variance on a batch.

    With `by=layer` the sums have no c; instead, the weight of each layer is scaled to unit output variance, as in
    release 0.1 and in Mishkin & Matas. In a network without residual blocks, layers are always scaled.

    Reference: fixup, section 4.1, baseline 2; normdead, section 4.1; Mishkin & Matas 2016, algorithm 1.
    Differs: the factor c, because no scale of the branch's weights could give x + f(x) the variance of x. One pass
    instead of iterations, because block and layer outputs are proportional to their factors.
    """
    require_choice("lsuv", "by", by, ("block", "layer"))
    blocks = by == "block"
    return Method(
        name="lsuv",
        summary=f"orthogonal weights scaled on a batch so that every {by} has unit output variance",
        paper="fixup, normdead",
        reference="fixup, section 4.1; Mishkin & Matas 2016",
        weights_text="plain; orthogonal" + ("" if blocks else ", then unit variance on a batch"),
        rule=Rule(c=Law(1.0, text="1/std on a batch", set_by_initializer=True) if blocks else ONE),
        initializer=_scale_blocks_ if blocks else _scale_layers_,
        skips=WITH_SEQUENCES,
        needs_example=True,
    )
