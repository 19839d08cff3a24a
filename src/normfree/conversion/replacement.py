"""Replace layers: remove the normalizers, or put dynamic tanh in their place, and reparametrize weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Record, Removed
from normfree.conversion.inspection import Inspection, NormUse
from normfree.conversion.rescaling import draw_tokens_, reset_layer_scales_, scale_embeddings_
from normfree.errors import listed
from normfree.graph.flow import reachable
from normfree.methods import Method
from normfree.nn.model_state import ModelSnapshot, preserve_model_state, substitute_tensors
from normfree.nn.normalizers import FUSED, DynamicTanh
from normfree.nn.weight_layers import WEIGHT_LAYERS, is_computed, reparametrize_, set_weight_
from normfree.plan import Layer, ResidualPlan

_UNFREEZE = "unfreeze them for the conversion, convert before freezing, or convert only the part that is trained"


def replace_layers_(
    model: nn.Module, inspection: Inspection, method: Method, generator: torch.Generator | None
) -> list[Record]:
    """Remove the normalizers and give the model the method's layers. Returns a record of each change."""
    plan, flow = inspection.plan, inspection.flow
    layers, hidden = list(plan.layers()), list(plan.hidden())
    alpha = method.options.get("alpha", 0.5) if method.norm == "tanh" else None
    records: list[Record] = []
    records += remove_norms_(model, inspection, tanh=float(alpha) if isinstance(alpha, float | int) else None)
    if inspection.norms:
        records += scale_embeddings_(model, plan, layers, flow.call_counts)
        records += draw_tokens_(model, plan, flow, generator)
    if method.norm is None:
        records += make_plain_(model, inspection.standardized)
        records += reparametrize_layers_(model, hidden, method)
        records += reset_layer_scales_(model, plan)
    return records


class RemovedNorm(nn.Module):
    """Identity that keeps the removed normalizer's weight, for code that reads it (usually only its dtype)."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the signal."""
        return x


class Copied(nn.Module):
    """Returns a copy of its input, where the model's own code writes into the output of a normalizer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same values in new memory."""
        return x.clone()


def channels_of(norm: nn.Module, shape: Sequence[int] | None = None) -> tuple[int, int] | None:
    """The number of channels of a normalizer and their dimension in its input; None if the number is unknown.

    `shape` is that of the signal that it reads in the model, if known.
    """
    weight = _weight_of(norm)
    sizes = [getattr(norm, name, None) for name in ("num_features", "num_channels", "normalized_shape")]
    size: Any = weight.numel() if isinstance(weight, Tensor) else next((s for s in sizes if s is not None), None)
    if isinstance(size, tuple | list):
        size = size[0] if len(size) == 1 else None
    if not isinstance(size, int) or (isinstance(weight, Tensor) and weight.dim() != 1):
        return None
    batched = nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm | nn.GroupNorm
    by_channel = isinstance(norm, batched) or re.search(r"2d|BatchNorm|GroupNorm", type(norm).__name__)
    return size, _channel_dim(norm, size, 1 if by_channel else -1, shape)


def _weight_of(norm: nn.Module) -> Any:
    """The weight of a normalizer, or its first vector if all of them have one length; None if there is none."""
    vectors = [p for p in norm.parameters(recurse=False) if p.dim() == 1]
    return getattr(norm, "weight", vectors[0] if len({p.numel() for p in vectors}) == 1 else None)


@torch.no_grad()
def _channel_dim(norm: nn.Module, size: int, default: int, shape: Sequence[int] | None) -> int:
    """The dimension of the channels, as a normalizer of another library shows when its weight changes.

    Some of them read (batch, channels, length). `shape` is that of the signal in the model.
    """
    weight = _weight_of(norm)
    torchs_own = type(norm).__module__.startswith("torch.")
    if torchs_own or shape is None or weight is None or (alike := list(shape).count(size)) == 0:
        return default
    if alike == 1 and shape[0] != size:
        return list(shape).index(size) if shape[-1] != size else -1
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(weight)
    changed = torch.arange(1, size + 1).to(weight)
    try:
        with preserve_model_state(norm, attributes=True):
            with substitute_tensors(norm, {id(weight): torch.ones_like(weight)}):
                plain = norm(x.clone())
            with substitute_tensors(norm, {id(weight): changed}):
                ratio = norm(x.clone()) / plain
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return default
    for dim in (default, *(d for d in range(1, len(shape)) if shape[d] == size)):
        view = [1] * len(shape)
        view[dim] = -1
        if ratio.shape[dim] == size and (ratio - changed.view(view)).abs().median() < 0.01:
            return dim
    return default


def remove_norms_(model: nn.Module, inspection: Inspection, *, tanh: float | None) -> list[Removed]:
    """Remove every normalizer, or replace it with dynamic tanh of initial α = `tanh` if given.

    Dynamic tanh is trainable, also in the place of a frozen normalizer between trained layers.
    Also sets `inplace=False` on every module: its input is now the residual stream.
    """
    norms = {name: model.get_submodule(name) for name in inspection.norms}
    thawed = frozen_norms(model, inspection) if tanh is not None else []
    new = {name: _replacement(norm, inspection.norms[name], tanh=tanh) for name, norm in norms.items()}
    for module in (part for name in thawed for part in new[name].modules()):
        if isinstance(module, DynamicTanh):
            module.requires_grad_(True)
    replace_modules_(model, {norm: new[name] for name, norm in norms.items()})
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010  (no type declares the attribute)
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else inference would run one kernel with layer norm inside
    return [Removed(name, type(norm).__name__, _classes(new[name])) for name, norm in norms.items()]


def replace_modules_(model: nn.Module, swaps: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules everywhere in a model; a new one takes the mode of the old one."""
    for old, new in swaps.items():
        new.train(old.training)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in swaps:
                parent._modules[name] = swaps[child]


def frozen_layers(model: nn.Module, plan: ResidualPlan) -> dict[str, str]:
    """The reason, with a remedy, why layers with frozen weights cannot get new ones; empty if there are none."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    names = dict.fromkeys(layer.name for layer in plan.layers() if layer.path in frozen)
    reason = "frozen (requires_grad is False), so the weights that the method draws or sets to zero would never train"
    return {f"{listed(names)}: {reason}": _UNFREEZE} if names else {}


def frozen_part(model: nn.Module, inspection: Inspection) -> dict[str, str]:
    """The reason, with a remedy, why the normalizers of a frozen part cannot be replaced; empty if there are none."""
    if not frozen_layers(model, inspection.plan) or not (names := frozen_norms(model, inspection)):
        return {}
    reason = (
        "frozen (requires_grad is False) like layers around them, so what takes their place would never train, and "
        "would spoil the trained features"
    )
    return {f"{listed(names)}: {reason}": _UNFREEZE}


def frozen_norms(model: nn.Module, inspection: Inspection) -> list[str]:
    """The frozen normalizers that trained parameters depend on, or that depend on them.

    A normalizer without parameters is frozen if all parameters of the module that holds it are. A frozen copy of the
    network that shares no path with trained parameters, as the target of BYOL, is left out.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, p in parameters.items() if p.requires_grad}
    frozen = {}
    for name in inspection.norms:
        own = list(model.get_submodule(name).parameters())
        held = own or list(model.get_submodule(name.rpartition(".")[0]).parameters())
        if held and not any(p.requires_grad for p in held):
            frozen[name] = [n for n in inspection.flow.nodes if name in (n.name, n.home)]
    if not frozen or not trained:
        return []
    users = [n for n in inspection.flow.nodes if any(f"{w.module}.{w.parameter}" in trained for w in n.weights)]
    near = reachable(users, attrgetter("users")) | reachable(users, attrgetter("inputs"))
    return [name for name, nodes in frozen.items() if not near.isdisjoint(nodes)]


def fixed_weights(model: nn.Module, plan: ResidualPlan) -> dict[str, str]:
    """The weights that cannot be set, since the model computes them and cannot invert that, each with a remedy."""
    found = {}
    for layer in dict.fromkeys(plan.layers()):
        module = model.get_submodule(layer.name)
        if is_computed(module, layer.parameter) and not _can_be_set(module, layer.parameter):
            found[f"'{layer.path}' is computed from other parameters, which cannot be inverted to set it"] = (
                "make it plain first, by torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') or, for "
                "old hooks, torch.nn.utils.remove_weight_norm(layer)"
            )
    return found


def _can_be_set(module: nn.Module, parameter: str) -> bool:
    before = ModelSnapshot(module)
    try:
        set_weight_(module, 2 * getattr(module, parameter).detach(), parameter)
    except ValueError:
        return False
    finally:
        before.restore_()
    return True


def make_plain_(model: nn.Module, standardized: Mapping[str, type[nn.Module] | None]) -> list[Removed]:
    """Make the layers that standardize their own weight plain: the method sets the scale, or standardizes, itself."""
    removed = []
    for name, base in sorted(standardized.items()):
        layer = model.get_submodule(name)
        if base is not None:
            removed.append(Removed(name, type(layer).__name__, base.__name__))
            layer.__class__ = base
            for extra in set(layer._parameters) - {"weight", "bias"}:
                delattr(layer, extra)
    return removed


def _replacement(norm: nn.Module, use: NormUse, *, tanh: float | None) -> nn.Module:
    """The module that takes the place of a normalizer: dynamic tanh or nothing, then its fused activation.

    Code that reads the weight finds one, and code that writes into the output gets a copy.
    """
    parts: list[nn.Module] = []
    if tanh is not None:
        size, dim = channels_of(norm, use.shape) or (1, -1)
        held = [t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
        parts.append(DynamicTanh(size, alpha=tanh, dim=dim).to(held[0] if held else torch.empty(0)))
        learned = [p.requires_grad for p in norm.parameters()]
        parts[0].requires_grad_(any(learned) or not learned)  # in a frozen copy of a network, it stays frozen
    elif use.tensor_read:
        parts.append(RemovedNorm(norm.weight))  # type: ignore[arg-type]
    elif use.overwritten:
        parts.append(Copied())
    fused = [getattr(norm, name, None) for name in FUSED]
    parts += [part for part in fused if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)]
    return nn.Sequential(*parts) if len(parts) > 1 else parts[0] if parts else nn.Identity()


def _classes(module: nn.Module) -> str:
    """The classes of a replacement, in words."""
    if isinstance(module, nn.Identity):
        return "nothing"
    return ", ".join(type(m).__name__ for m in (module if isinstance(module, nn.Sequential) else [module]))


def reparametrize_layers_(model: nn.Module, hidden: Iterable[Layer], method: Method) -> list[Added]:
    """Give every hidden layer the method's kind of weight, and a bias if the method's layers have one."""
    modules = dict(model.named_modules())
    added = []
    for layer in {(layer.name, layer.parameter): layer for layer in hidden}.values():
        module = modules[layer.name]
        if method.weight_kind != "plain":
            reparametrize_(module, method.weight_kind, transposed=layer.transposed)
            added.append(Added(layer.name, f"{method.weight_kind.replace('_', ' ')} layer"))
        if method.layer_bias and isinstance(module, WEIGHT_LAYERS) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.weight.shape[0]))
            added.append(Added(layer.name, "bias per channel"))
    return added
