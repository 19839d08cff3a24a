"""`fold_batchnorm`: batch norms with fixed statistics become part of the weights next to them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from normfree.arguments import check_arguments
from normfree.conversion.changes import FoldedModule, Folding, RemainingModule
from normfree.conversion.folding.module_flow import (
    LayerArrays,
    MarkedModel,
    ModuleFlow,
    cannot_fold_into,
    require_foldable,
)
from normfree.conversion.replacement import replace_modules_
from normfree.graph.flow import Node
from normfree.nn.normalizers import ChannelAffine, is_batch_norm

_ACTIVATED = ("BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d")  # timm's, with dropout and activation
_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # in evaluation mode


def fold_batchnorm(model: nn.Module, example: Any) -> tuple[nn.Module, Folding]:
    """Return a copy of a model with its batch norms folded into neighbouring weights.

    The copy computes the same function as the model in evaluation mode.

    With its running statistics, a batch norm computes y = s · x + t per channel. The convolution or linear layer before
    it takes both if nothing else reads that layer: W ← s·W, b ← s·b + t. Otherwise the layers after it take them, if
    they read nothing else and pad with no zeros: W ← W·s, b ← b + ΣW·t. Otherwise a `ChannelAffine` takes its place.
    The order of the layers comes from the recorded flow. Other normalizers depend on their input at evaluation as well,
    and stay.

    Args:
        model: The model in evaluation mode, which is left as it was.
        example: An input that the model accepts: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. Only its shape matters.

    Returns:
        The folded copy, and a record of the batch norms that were folded, and of those that became a `ChannelAffine`,
        with the reason.

    Raises:
        ValueError: If the model is in training mode or TorchScript, if a batch norm has no running statistics or an
            unknown forward pass, or if the model does not run on the example.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> folded, record = fold_batchnorm(model, torch.zeros(1, 3, 8, 8))
    >>> print(folded[1], record)
    Identity() 1 of 1 folded
    """
    check_arguments(model=model, example=example)
    for name, module in model.named_modules():
        _check(name, module)
    require_foldable(model)
    marked = MarkedModel(deepcopy(model))
    norms = {module: _AffineNorm(name, module) for name, module in marked.named_modules() if is_batch_norm(module)}
    replace_modules_(marked, {module: norm.replacement for module, norm in norms.items()})
    # The model computes the same function already; the rest only moves factors into weights.
    flow = marked.flow(example)
    nodes = {flow.name(node): node for node in flow.nodes if flow.module(node) is not None}
    folded: list[FoldedModule] = []
    remaining: list[RemainingModule] = []
    swaps: dict[nn.Module, nn.Module] = {}
    for norm in norms.values():
        node = nodes.get(norm.place)
        into = "it is not called" if node is None else _fold_into_neighbours_(norm, node, flow)
        if isinstance(into, str):
            remaining.append(RemainingModule(norm.name, norm.kind, into))
        else:
            folded.append(FoldedModule(norm.name, norm.kind, into))
            swaps[norm.affine] = nn.Identity()
    remaining += [
        RemainingModule(
            home.removeprefix("model").removeprefix("."), function, "it is a function; make it nn.BatchNorm2d"
        )
        for home, function in flow.functions
        if function == "batch_norm"
    ]
    replace_modules_(marked, swaps)
    return marked.model, Folding(folded=tuple(folded), kept=tuple(remaining))


class _AffineNorm:
    """A batch norm as the affine map that it computes at evaluation, in float64, and a module that computes it."""

    def __init__(self, name: str, norm: Any) -> None:
        self.kind = type(norm).__name__
        self.name = name.removeprefix("model.") if name != "model" else ""
        mean, variance = norm.running_mean.detach().double().cpu(), norm.running_var.detach().double().cpu()
        self.scale = (variance + getattr(norm, "eps", 1e-5)).rsqrt()
        if norm.weight is not None:
            self.scale = self.scale * norm.weight.detach().double().cpu()
        self.shift = -mean * self.scale
        if norm.bias is not None:
            self.shift = self.shift + norm.bias.detach().double().cpu()
        self.affine = ChannelAffine(self.scale.to(norm.running_mean), self.shift.to(norm.running_mean))
        self.replacement: nn.Module = self.affine
        self.place = name
        if self.kind in _ACTIVATED:
            self.place = f"{name}.affine"
            self.replacement = nn.Sequential()
            self.replacement.add_module("affine", self.affine)
            for part in ("drop", "act"):
                child = getattr(norm, part, None)
                if isinstance(child, nn.Module) and not isinstance(child, nn.Identity):
                    self.replacement.add_module(part, child)


def _fold_into_neighbours_(norm: _AffineNorm, node: Node, flow: ModuleFlow) -> tuple[str, ...] | str:
    """Multiply a batch norm into a neighbour. Returns the names of the layers that took it, or why none could."""
    if flow.is_shared(node):
        return "it is called more than once"
    source = _source(node, flow)
    reason_before = _cannot_take(source, flow, reads=False)
    if reason_before is None:
        arrays = LayerArrays(flow.module(source))
        arrays.scale_outputs_(norm.scale, norm.shift)
        arrays.write_()
        return (flow.own_name(source),)
    readers = _readers(node, flow)
    reasons = [reason for reader in readers if (reason := _cannot_take(reader, flow, reads=True)) is not None]
    if not readers or reasons:
        reason_after = f"the step after it, {reasons[0]}" if reasons else "nothing reads it"
        return f"the step before it, {reason_before}; {reason_after}"
    for reader in readers:
        arrays = LayerArrays(flow.module(reader))
        arrays.scale_inputs_(norm.scale, norm.shift)
        arrays.write_()
    return tuple(flow.own_name(reader) for reader in readers)


def _source(node: Node, flow: ModuleFlow) -> Node:
    """The input of a node, through modules that do nothing at evaluation and that nothing else reads."""
    source = node.inputs[0]
    while isinstance(flow.module(source), _PASSING) and len(source.users) == 1:
        source = source.inputs[0]
    return source


def _readers(node: Node, flow: ModuleFlow) -> list[Node]:
    """The readers of a node, through modules that do nothing at evaluation."""
    found: list[Node] = []
    for user in node.users:
        found += _readers(user, flow) if isinstance(flow.module(user), _PASSING) else [user]
    return found


def _cannot_take(node: Node, flow: ModuleFlow, *, reads: bool) -> str | None:
    """Why the layer before a batch norm, or one that `reads` it, cannot take it; None if it can."""
    layer = flow.module(node)
    if layer is None:
        return f"'{node.name}', is a function"
    reason = cannot_fold_into(layer)
    shape = node.inputs[0].shape if reads else node.shape
    if reason is None and flow.is_shared(node):
        reason = "it is used more than once"
    elif reason is None and not reads and len(node.users) > 1:
        reason = "others read its output as well"
    elif reason is None and len(shape) != (2 if isinstance(layer, nn.Linear) else cast(Tensor, layer.weight).dim()):
        reason = "its channels are in another dimension"
    elif reason is None and reads and LayerArrays(layer).pads_zeros:
        reason = "it pads with zeros"
    return reason and f"'{flow.own_name(node)}', cannot take it: {reason}"


def _check(name: str, module: nn.Module) -> None:
    """Raise an error for a batch norm that is not a fixed affine map at evaluation."""
    if not is_batch_norm(module):
        return
    kind = type(module)
    if getattr(module, "running_mean", None) is None or getattr(module, "running_var", None) is None:
        raise ValueError(
            f"expected running statistics to fold, got none in '{name}' ({kind.__name__}), which normalizes by its "
            "batch at evaluation as well; train it with track_running_stats=True"
        )
    if torch.nn.parameter.is_lazy(cast(Tensor, module.running_mean)):
        raise ValueError(
            f"expected running statistics to fold, got '{name}' before its first batch; run the model once"
        )
    ours = kind.__name__ in _ACTIVATED or kind.__name__.endswith("FrozenBatchNorm2d")
    if not ours and not kind.forward.__module__.startswith(("torch.nn.", "normfree.nn.")):
        raise ValueError(
            f"expected a batch norm of torch, torchvision or timm, got '{name}' ({kind.__name__}) with a forward pass "
            "of its own; replace it by nn.BatchNorm2d first"
        )
