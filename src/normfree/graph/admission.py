"""Which methods an existing model admits: the rules that `convert` and the advice of `diagnose` share."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from normfree.methods import Method
from normfree.methods.method import ONE
from normfree.nn.weight_layers import cannot_reparametrize
from normfree.plan import Branch, ResidualPlan, unwrapped


def cannot_convert_model(model: nn.Module) -> str | None:
    """Why no method can convert a model as it is, and a remedy; None if one may."""
    name = type(model).__name__
    if (inner := unwrapped(model)) is not model:
        attribute = "_orig_mod" if hasattr(model, "_orig_mod") else "module"
        return (
            f"expected the model itself, got {name} around a {type(inner).__name__}; convert model.{attribute} first, "
            "and compile or wrap the result"
        )
    if scripted := next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None):
        return f"expected Python modules, got TorchScript at '{scripted}'; convert the model before it is scripted"
    if isinstance(model, torch.jit.ScriptModule):
        return f"expected Python modules, got the TorchScript of a {name}; convert the model before it is scripted"
    for path, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return f"expected parameters with shapes, got the lazy '{path}'; run the model once on the example"
        if parameter.is_meta:
            return f"expected parameters with values, got '{path}' on the meta device; initialize the model first"
    return None


def cannot_convert_by(method: Method) -> str | None:
    """Why no existing model can be converted with a method, and a remedy; None if some can."""
    if method.kind == "normalized" and method.norm is not None:
        return (
            f"expected a method without normalization, got '{method.name}', which is one of the normalizers: there is "
            "nothing to convert to; use 'fixup', 'skipinit', 'rezero', 'nf', 'wn' or 'dyt'"
        )
    if method.weight == "spectral":
        return (
            f"expected a method that converts a model, got '{method.name}', which only divides the weights by their "
            "largest singular values; do that by torch.nn.utils.parametrizations.spectral_norm"
        )
    changes = {
        "removes the branches": method.remove_branches,
        "puts a new convolution into every shortcut": method.shortcut == "conv everywhere",
        "needs an activation function of its own": method.activation != "relu",
    }
    for change in (change for change, needed in changes.items() if needed):
        return (
            f"method '{method.spec}' {change}, which cannot be done without rewriting the model's code; "
            "build a normfree model with it instead"
        )
    return None


def rigid_layers(
    model: nn.Module, plan: ResidualPlan, method: Method, called: Container[str] | None = None
) -> dict[str, str]:
    """The weight layers that cannot become the method's kind of layer, by qualified name, with the reason.

    `called` holds the modules that a forward pass calls, if the caller knows them: a weight that is used without a call
    of its layer cannot be reparametrized.
    """
    if method.weight == "plain":
        return {}
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for layer in dict.fromkeys(plan.hidden()):
        if layer.parameter != "weight" or (called is not None and layer.name not in called):
            reason: str | None = "the weight is used without a call of the layer"
        else:
            reason = cannot_reparametrize(modules[layer.name], method.weight, transposed=layer.transposed)
        if reason is not None:
            found[layer.path] = reason
    return found


def scales_sums(method: Method) -> bool:
    """Whether a method scales whole sums or their shortcuts, which only a module that returns the sum can do."""
    return not method.rule.c == method.rule.a == ONE


def supports_conversion(model: nn.Module, plan: ResidualPlan, method: Method) -> bool:
    """Whether an existing model is certain to be convertible with a method, judged without converting it.

    Returns False for a method that scales whole sums, because it needs a module around every sum, and, on a model with
    attention, for a method that is not made for attention.
    """
    skip = "sequence" if any(map(_multiplies, plan.branches)) else "residual"
    if skip not in method.skips or scales_sums(method) or cannot_convert_by(method) is not None:
        return False
    return not rigid_layers(model, plan, method)


def _multiplies(branch: Branch) -> bool:
    """Whether layers side by side are multiplied with one another, as in attention.

    If they are only added, `depth` is the length of the longest chain of layers, which is less than their number.
    """
    side_by_side = len(branch.entries) > 1
    return branch.depth + side_by_side > sum(not layer.gate for layer in branch.layers)
