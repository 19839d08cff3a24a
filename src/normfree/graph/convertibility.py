"""Which models can be converted by which methods: the rules that `convert` and the advice of `diagnose` share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.arguments import check_arguments, check_plan
from normfree.errors import unknown_name
from normfree.graph.flow import Flow, Node
from normfree.graph.observer import (
    ADDITIONS,
    JOINS,
    MATRIX_PRODUCTS,
    OTHER_SUMS,
    RECURRENT_FUNCTIONS,
    REDUCTIONS,
    VIEWS,
)
from normfree.graph.residual_sums import latest_common_ancestor
from normfree.methods import Method
from normfree.methods.method import ONE
from normfree.methods.method_registry import short_spec
from normfree.nn.weight_layers import WEIGHT_LAYERS, cannot_reparametrize
from normfree.plan import Branch, Layer, ResidualPlan, unwrapped


def check_request(
    model: nn.Module, method: Method, example: Any, plan: ResidualPlan | None = None, heads: Collection[str] = ()
) -> None:
    """Refuse a model that no method converts, a method that converts no model, and arguments that cannot be used.

    Raises:
        ValueError: With the reason and a remedy.
    """
    check_arguments(model=model, example=example, plan=plan, heads=heads)
    reason = _cannot_convert_model(model) or _cannot_convert_by(method)
    if reason is not None:
        raise ValueError(reason)
    if plan is not None:
        check_plan(plan, dict(model.named_modules()))
    given = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    for tensor in given:
        if not tensor.is_meta and tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(
                f"expected an example without NaN, got NaN in its tensor of shape {tuple(tensor.shape)}; pass a "
                "batch of finite data"
            )
    if given and not given[0].numel():
        raise ValueError(
            f"expected an example of at least one sample, got the shape {tuple(given[0].shape)}; pass a batch of data"
        )
    if method.needs_example and not isinstance(example, Tensor):
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a tensor as example, got "
            f"{type(example).__name__}; use a method that needs none, such as 'fixup'"
        )


def _cannot_convert_model(model: nn.Module) -> str | None:
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
    compiled = next((n for n, m in model.named_modules() if "_orig_mod" in m._modules), None)
    if compiled is not None:
        return f"expected plain modules, got one that is compiled at '{compiled}'; convert the model, then compile it"
    for path, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return f"expected parameters with shapes, got the lazy '{path}'; run the model once on the example"
        if parameter.is_meta:
            return f"expected parameters with values, got '{path}' on the meta device; initialize the model first"
    return None


def _cannot_convert_by(method: Method) -> str | None:
    """Why no existing model can be converted with a method, and a remedy; None if some can."""
    if method.kind == "normalized" and method.norm is not None:
        return (
            f"expected a method without normalization, got '{method.name}', which keeps or adds a normalizer; use "
            "'fixup', 'skipinit', 'rezero', 'nf', 'wn' or 'dyt'"
        )
    if method.weight_kind == "spectral":
        return (
            f"expected a method that converts a model, got '{method.name}', which only divides the weights by their "
            "largest singular values; do that by torch.nn.utils.parametrizations.spectral_norm"
        )
    changes = {
        "removes the branches": method.remove_branches,
        "puts a new convolution into every shortcut": method.shortcut == "conv everywhere",
        "needs an activation function of its own": method.activation != "relu",
    }
    if (change := next((change for change, needed in changes.items() if needed), None)) is None:
        return None
    return (
        f"method '{short_spec(method.spec)}' {change}, which cannot be done without rewriting the model's code; "
        "build a normfree model with it instead"
    )


def require_signal(model: nn.Module, flow: Flow, plan: ResidualPlan, heads: Collection[str]) -> None:
    """Check that the flow reaches the model's layers and its output.

    Raises:
        ValueError: If the plan is empty over a model with weights, if the output does not depend on the input, if a
            branch is added by a function that is not followed, or if a head is not a layer of the plan.
    """
    kind = type(model).__name__
    known = list(dict.fromkeys(layer.name for layer in (*plan.classifier, *plan.layers())))
    for name in heads:
        if name not in {layer.name for layer in plan.classifier}:
            raise unknown_name("head", name, known, where=f" of {kind}")
    for node in flow.nodes:
        if _adds_by_unsupported_function(node):
            raise ValueError(
                f"expected sums by + and -, but '{node.home or kind}' adds a branch by {node.function}, which is not "
                "followed; write x + f(x) there"
            )
    has_weights = any(p.dim() >= 2 for p in model.parameters())
    if has_weights and (flow.output_is_lost or not any(True for _ in plan.layers())):
        places = [f"{function}() in '{home or kind}'" for home, function in flow.lost] or ["an unknown place"]
        raise ValueError(
            f"expected a model whose output follows from its input by torch functions, but {kind} loses the signal, at "
            f"{', '.join(places)}, so that no layer was found; keep it in torch there, or convert the part after it"
        )


def _adds_by_unsupported_function(node: Node) -> bool:
    """Whether a node adds a branch with layers to the branch's own input, by a function other than + and -."""
    joined = node.inputs[0] if len(node.inputs) == 1 and node.kind == "other" else node
    while joined.kind == "scaling" and len(joined.inputs) == 1:
        joined = joined.inputs[0]
    if joined.function in JOINS and node.function in REDUCTIONS | MATRIX_PRODUCTS:
        operands = joined.inputs
        if any(prod(operand.shape) != prod(node.shape) for operand in operands):
            return False
    elif node.function in OTHER_SUMS and node.first_operand is not None:
        operands = (node.first_operand, *(n for n in node.inputs if n is not node.first_operand))
    else:
        return False
    if len(operands) != 2:
        return False
    ancestor, sides = latest_common_ancestor(replace(node, inputs=operands), {})
    layers = [any(n.kind == "weight" for n in side) for side in sides]
    return ancestor is not None and layers[0] != layers[1]


def recurrent_branches(flow: Flow) -> dict[str, str]:
    """The recurrent layers whose output is added to their input, each with the module that adds it.

    No method can scale such a branch.
    """
    found: dict[str, str] = {}
    for node in flow.nodes:
        for operand in node.inputs if node.kind == "sum" else ():
            last = operand
            while (
                last.kind in ("scaling", "other") and last.function not in RECURRENT_FUNCTIONS and len(last.inputs) == 1
            ):
                last = last.inputs[0]
            if last.function in RECURRENT_FUNCTIONS and latest_common_ancestor(node, {})[0] is not None:
                found.setdefault(last.name if last.is_module else last.home, node.home)
    return found


def layers_not_reparametrizable(
    model: nn.Module, plan: ResidualPlan, method: Method, flow: Flow | None = None
) -> dict[str, str]:
    """The weight layers that cannot become the method's kind of layer, by qualified name, with the reason.

    With the recorded flow it is also known whether a weight is used by a call of its layer, and whether a layer of a
    class that torch does not know computes more than x W + b.
    """
    if method.weight_kind == "plain":
        return {}
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for layer in dict.fromkeys(plan.hidden()):
        if layer.parameter != "weight" or (flow is not None and layer.name not in flow.call_counts):
            reason: str | None = "the weight is used without a call of the layer"
        else:
            module = modules[layer.name]
            reason = cannot_reparametrize(module, method.weight_kind, transposed=layer.transposed)
            if reason is None and not isinstance(module, WEIGHT_LAYERS) and _computes_more(module, layer, flow):
                reason = f"{type(module).__name__} uses its weight in a custom way"
            if reason is None and method.weight_kind == "weight_norm" and _is_single_weight(module, layer):
                reason = "a single weight per output has no direction to learn"
        if reason is not None:
            found[layer.path] = reason
    return found


def _computes_more(module: nn.Module, layer: Layer, flow: Flow | None) -> bool:
    """Whether a module that is no layer of torch has children or no bias, or computes more than x W + b."""
    if "bias" not in module._parameters or next(module.children(), None) is not None:
        return True
    if flow is None:
        return False
    inside = [node.function for node in flow.nodes if node.home == layer.name]
    products = [function for function in inside if function in MATRIX_PRODUCTS]
    return len(products) != flow.call_counts[layer.name] or not {*inside} <= MATRIX_PRODUCTS | VIEWS | ADDITIONS


def _is_single_weight(module: nn.Module, layer: Layer) -> bool:
    """Whether each output of a layer has a single weight, as in a depthwise 1x1 convolution."""
    weight = getattr(module, layer.parameter)
    return bool(weight.numel() == weight.shape[1 if layer.transposed else 0])


def scales_by_sums(method: Method) -> bool:
    """Whether a method is made for residual sums only, so that its scales depend on their number and place."""
    return method.norm is None and not {"none", "dense"} & set(method.skips)


def recurrent_layers(plan: ResidualPlan) -> list[str]:
    """The weights that a recurrence written by hand uses at every step, by name.

    Each step adds something to what it makes of the step before. So the layer is part of a branch, and also of that
    branch's shortcut or of a branch around it. It cannot start at 0 as one and at unit variance as the other, and the
    number of steps is no depth.
    """
    branches: dict[str | None, Branch] = {branch.name: branch for branch in plan.branches}
    found: dict[str, None] = {}
    for branch in plan.branches:
        around = {layer.path for layer in branch.shortcut_layers}
        outer = branches.get(branch.outer_branch)
        while outer is not None:
            around |= {layer.path for layer in (*outer.layers, *outer.shortcut_layers)}
            outer = branches.get(outer.outer_branch)
        found |= dict.fromkeys(layer.path for layer in branch.layers if layer.path in around)
    return list(found)


def supports_conversion(model: nn.Module, plan: ResidualPlan, method: Method) -> bool:
    """Whether an existing model is certain to be convertible with a method, judged without converting it.

    Returns False for a method that scales whole sums, because it needs a module around every sum, and, on a model with
    attention, for a method that is not made for attention.
    """
    if scales_by_sums(method) and recurrent_layers(plan):
        return False
    skip = "sequence" if any(map(_multiplies, plan.branches)) else "residual"
    scales_sums = not method.rule.c == method.rule.a == ONE  # only a module that returns the sum can do that
    if skip not in method.skips or scales_sums or _cannot_convert_by(method) is not None:
        return False
    return not layers_not_reparametrizable(model, plan, method)


def _multiplies(branch: Branch) -> bool:
    """Whether outputs of layers are multiplied with one another, as in attention.

    Every layer then counts in the degree. If several layers read the input and are only added, the longest chain counts
    alone, so the degree is less than the number of layers.
    """
    side_by_side = len(branch.first_layers) > 1
    return branch.degree + side_by_side > sum(not layer.gate for layer in branch.layers)
