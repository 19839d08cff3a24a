"""The work on the modules: normalizers out, scalars and reparametrized weights in."""

from __future__ import annotations

from torch import nn

from normfree.conversion.changes import Added, Removed
from normfree.conversion.inspection import Watched
from normfree.conversion.norms import norms, replacement
from normfree.conversion.scalar_placement import Wanted
from normfree.methods import Method
from normfree.nn.normalizers import is_norm
from normfree.nn.reparametrized import reparametrize_
from normfree.nn.scalar_wrapping import ScalarName, add_scalar_
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan

_SYMBOLS: dict[ScalarName, str] = {
    "alpha": "multiplier α",
    "shift": "bias before a layer",
    "beta": "multiplier β",
    "delta": "bias behind a layer",
    "skip": "multiplier a of a shortcut",
}


def remove_norms_(model: nn.Module, method: Method, watched: Watched) -> list[Removed]:
    """Take out every normalizer, and let no activation write into its input: that is the residual stream now."""
    tanh = method.options.get("alpha") if method.norm == "tanh" else None
    names = {id(norm): name for name, norm in norms(model).items()}
    made: dict[int, nn.Module] = {}
    removed: dict[int, Removed] = {}
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is None or not is_norm(child):
                continue
            name = names[id(child)]
            if id(child) not in made:
                made[id(child)] = replacement(
                    child,
                    tanh=float(tanh) if isinstance(tanh, float | int) else None,
                    keep_weight=name in watched.read,
                    copied=name in watched.overwritten,
                )
                left = made[id(child)]
                shown = "nothing" if isinstance(left, nn.Identity) else _kinds(left)
                removed[id(child)] = Removed(name, type(child).__name__, shown)
            parent._modules[key] = made[id(child)]
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010  (no type says that it has one)
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else inference would run one kernel with layer norm inside
    return [removed[key] for key in names if key in removed]


def _kinds(module: nn.Module) -> str:
    return ", ".join(type(m).__name__ for m in (module if isinstance(module, nn.Sequential) else [module]))


def reparametrize_layers_(model: nn.Module, plan: ResidualPlan, method: Method) -> list[Added]:
    """Make every hidden layer one of the method's kind, and give it a bias where the method's layers have one."""
    modules = dict(model.named_modules())
    added = []
    for layer in dict.fromkeys(plan.hidden()):
        module = modules[layer.name]
        if method.weight != "plain":
            reparametrize_(module, method.weight, transposed=layer.transposed)
            added.append(Added(layer.name, f"{method.weight.replace('_', ' ')} layer"))
        if method.layer_bias and isinstance(module, WEIGHT_LAYERS) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.weight.shape[0]))
            added.append(Added(layer.name, "bias a channel"))
    return added


def add_scalars_(model: nn.Module, plan: ResidualPlan, wanted: Wanted) -> list[Added]:
    """Put every scalar in its place."""
    blocks = {branch.place for branch in plan.branches}
    modules = dict(model.named_modules())
    for (name, scalar), (value, learnable) in wanted.items():
        add_scalar_(modules[name], scalar, value, learnable=learnable)
    return [
        Added(
            f"{name}.{scalar}",
            "multiplier c of a sum" if scalar == "beta" and name in blocks else _SYMBOLS[scalar],
            value,
            learnable,
        )
        for (name, scalar), (value, learnable) in wanted.items()
    ]
