"""LSUV: initialization from a batch, which sets every layer from its own output in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from normfree.methods.init_context import InitContext
from normfree.methods.method import WITH_SEQUENCES, Method
from normfree.methods.registry import register
from normfree.nn.weight_layers import set_weight_

_DEAD = 1e-6  # a standard deviation below this is rounding error


@dataclass
class _Once:
    """A forward hook that calibrates a layer at its first call only, so that a shared layer is not set twice."""

    name: str
    calibrate: Callable[[nn.Module, Tensor], Tensor]
    done: bool = False

    def __call__(self, module: nn.Module, _args: object, out: Tensor) -> Tensor | None:
        if self.done:
            return None
        self.done = True
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
    layers = ctx.each(ctx.plan.hidden())
    hooks = [module.register_forward_hook(_Once(layer.name, calibrate)) for layer, module in layers]
    try:
        ctx.run()
    finally:
        for hook in hooks:
            hook.remove()


def _lsuv_(ctx: InitContext) -> None:
    for layer in ctx.plan.hidden():
        ctx.set_(layer, ctx.orthogonal(layer))

    def to_unit_variance(module: nn.Module, out: Tensor) -> Tensor:
        std = out.std(unbiased=False)
        set_weight_(module, module.weight / std)  # type: ignore[operator, arg-type]
        return out / std

    calibrate_(ctx, to_unit_variance)
    ctx.default_classifier_()


@register
def lsuv() -> Method:
    """Orthogonal weights; each layer is then scaled to unit output variance on a batch.

    Reference: fixup, section 4.1, baseline 2; normdead, section 4.1; Mishkin & Matas 2016, algorithm 1.
    Differs: one pass instead of iterations, because the output of a layer without bias is linear in its weight. Each
    layer, and so each branch, gets output variance 1; no branch scale could give x + f(x) the variance of x.
    """
    return Method(
        name="lsuv",
        summary="orthogonal weights scaled on a batch so that every layer and branch has unit output variance",
        paper="fixup, normdead",
        reference="fixup, section 4.1; Mishkin & Matas 2016",
        h="identity",
        weights="plain; orthogonal, then unit variance on a batch",
        initializer=_lsuv_,
        skips=WITH_SEQUENCES,
        needs_example=True,
    )
