"""Batch norms with fixed statistics become part of the weights beside them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normfree.conversion.folding.layer_arrays import Numbers, obstacle
from normfree.conversion.folding.marked_flow import Calls, Marked
from normfree.conversion.folding.summary import Fold, Folding, Kept
from normfree.graph.flow import Node
from normfree.nn.normalizers import ChannelAffine

_ACTIVATED = ("BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d")  # timm's: dropout and activation inside
_SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # in evaluation mode


def fold_batchnorm(model: nn.Module, example: Any) -> tuple[nn.Module, Folding]:
    """A copy of a model in evaluation mode that computes the same function and has no batch norm left, and a record.

    With its running statistics a batch norm is y = s · x + t a channel. A convolution or linear layer in front of it
    that nothing else reads takes both (W ← s·W, b ← s·b + t), else the layers behind it do when it is all they read and
    they pad with no zeros (W ← W·s, b ← b + ΣW·t); else a `ChannelAffine` stays in its place. Which is in front and
    which behind is read off the recorded flow. `example` is a batch, a tuple of arguments, or a dict of keyword
    arguments; only its shape matters. The model itself is left as it was. Other normalizers depend on their input at
    evaluation, too, and stay.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> folded, record = fold_batchnorm(model, torch.zeros(1, 3, 8, 8))
    >>> print(folded[1], record)
    Identity() 1 of 1 folded

    Raises `ValueError`, with the qualified name, for a batch norm without running statistics and for a subclass whose
    forward pass is not known, and when the model does not run on the example.
    """
    for name, module in model.named_modules():
        _check(name, module)
    marked = Marked(deepcopy(model).eval())
    norms = {module: _Norm(name, module) for name, module in marked.named_modules() if _is_batch_norm(module)}
    marked.replace_({module: norm.replacement for module, norm in norms.items()})
    # The function is the same already; what follows only moves numbers.
    calls = marked.flow(example)
    nodes = {calls.name(node): node for node in calls.nodes if calls.module(node) is not None}
    folded: list[Fold] = []
    kept: list[Kept] = []
    gone: dict[nn.Module, nn.Module] = {}
    for norm in norms.values():
        node = nodes.get(norm.place)
        taken = "it is not called" if node is None else _fold_(norm, node, calls)
        if isinstance(taken, str):
            kept.append(Kept(norm.name, norm.kind, taken))
        else:
            folded.append(Fold(norm.name, norm.kind, taken))
            gone[norm.affine] = nn.Identity()
    marked.replace_(gone)
    return marked.model, Folding(folded=tuple(folded), kept=tuple(kept))


class _Norm:
    """A batch norm as the affine map that it is at evaluation, in float64, and the module that computes it."""

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


def _fold_(norm: _Norm, node: Node, calls: Calls) -> tuple[str, ...] | str:
    """Multiply a batch norm into a neighbour: the names of the layers that took it, or why none could."""
    if calls.shared(node):
        return "it is called more than once"
    front = _single_source(node, calls)
    before = _refusal(front, calls, reads=False)
    if before is None:
        numbers = Numbers(calls.module(front))
        numbers.scale_outputs_(norm.scale, norm.shift)
        numbers.write_()
        return (calls.own_name(front),)
    behind = _readers(node, calls)
    after = (
        "nothing reads it" if not behind else next(filter(None, (_refusal(n, calls, reads=True) for n in behind)), None)
    )
    if after is None:
        for reader in behind:
            numbers = Numbers(calls.module(reader))
            numbers.scale_inputs_(norm.scale, norm.shift)
            numbers.write_()
        return tuple(calls.own_name(reader) for reader in behind)
    return f"in front {before}; behind {after}"


def _single_source(node: Node, calls: Calls) -> Node:
    """What a node reads, through modules that do nothing at evaluation, as long as nothing else reads that."""
    source = node.inputs[0]
    while isinstance(calls.module(source), _SILENT) and len(source.users) == 1:
        source = source.inputs[0]
    return source


def _readers(node: Node, calls: Calls) -> list[Node]:
    """What reads a node, through modules that do nothing at evaluation."""
    found: list[Node] = []
    for user in node.users:
        found += _readers(user, calls) if isinstance(calls.module(user), _SILENT) else [user]
    return found


def _refusal(node: Node, calls: Calls, *, reads: bool) -> str | None:
    """Why a layer in front of a batch norm, or one that `reads` it, cannot take it; None when it can."""
    layer = calls.module(node)
    if layer is None:
        return f"stands '{node.name}'"
    reason = obstacle(layer)
    if reason is not None:
        return f"stands '{calls.own_name(node)}': {reason}"
    if calls.shared(node):
        return f"stands '{calls.own_name(node)}', which is used more than once"
    if not reads and len(node.users) > 1:
        return f"stands '{calls.own_name(node)}', which others read as well"
    shape = node.inputs[0].shape if reads else node.shape
    if len(shape) != (2 if isinstance(layer, nn.Linear) else cast(Tensor, layer.weight).dim()):
        return f"stands '{calls.own_name(node)}', whose channels are another dimension"
    if reads and Numbers(layer).pads_zeros:
        return f"stands '{calls.own_name(node)}', which pads with zeros"
    return None


def _is_batch_norm(module: nn.Module) -> bool:
    # torchvision, timm and transformers each have a frozen one of their own, which is no subclass of torch's.
    return isinstance(module, _BatchNorm) or "FrozenBatchNorm" in type(module).__name__


def _check(name: str, module: nn.Module) -> None:
    """Refuse a batch norm that is no fixed affine map."""
    if not _is_batch_norm(module):
        return
    kind = type(module)
    if getattr(module, "running_mean", None) is None or getattr(module, "running_var", None) is None:
        raise ValueError(
            f"expected running statistics to fold, got none in '{name}' ({kind.__name__}), which normalizes by its "
            "batch at evaluation, too; train it with track_running_stats=True"
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
