"""The recorded flow of a model with the modules that it calls, the arrays of its layers, and their replacement."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_map

from normfree.arguments import check_python_modules
from normfree.graph.flow import Flow, Node
from normfree.graph.recorder import record
from normfree.nn.model_state import call_arguments
from normfree.nn.scalars import ScaledModule
from normfree.nn.weight_layers import weight_kind

_PREFIX = "model."


def require_foldable(model: nn.Module) -> None:
    """Check that a model has Python modules, all in evaluation mode.

    Raises:
        ValueError: With the name of the module in the way.
    """
    check_python_modules(model)
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(
            f"expected a model in evaluation mode, got '{training or type(model).__name__}' in training mode; folded "
            "weights no longer train as the model or method intends, so call model.eval() first"
        )


class MarkedModel(nn.Module):
    """A model whose outputs pass through a module of their own, so that the flow shows them.

    A node that other nodes read may also be an output; then nothing can be folded into it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        out = self.model(*args, **kwargs)
        return tree_map(lambda leaf: self.output(leaf) if isinstance(leaf, Tensor) else leaf, out)

    def flow(self, example: Any) -> ModuleFlow:
        """Record the model on `example`: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
        return ModuleFlow(self, record(self, *call_arguments(example)))


class ModuleFlow:
    """The nodes of a flow with their modules; tells which node is a module's only call."""

    def __init__(self, marked: MarkedModel, flow: Flow) -> None:
        self.nodes = flow.nodes
        self.functions = list(flow.normalizing)  # the calls of normalizing functions, by module and function
        self._calls = flow.call_counts
        self._modules = {name: m for name, m in marked.named_modules() if self._calls[name]}
        self._nodes = Counter(self.name(node) for node in flow.nodes)
        self._uses = Counter(weight.module for node in flow.nodes for weight in node.weights)
        holders = Counter(id(p) for m in marked.modules() for p in m._parameters.values() if p is not None)
        self._tied = {key for key, count in holders.items() if count > 1}

    def name(self, node: Node) -> str:
        """The name of the module or function; functions inside a transposed convolution count as that module."""
        return node.home if isinstance(self._modules.get(node.home), _ConvTransposeNd) else node.name

    def module(self, node: Node) -> nn.Module | None:
        """The module whose call a node is; None for a function, an input or an output."""
        # No function has a dot in its name, and every module of the model has the prefix.
        name = self.name(node)
        return self._modules[name] if name == "model" or name.startswith(_PREFIX) else None

    def is_shared(self, node: Node) -> bool:
        """Whether a module is used more than once, or holds a parameter that another module holds as well."""
        name = self.name(node)
        once = self._nodes[name] == 1 and self._calls[name] == 1 and self._uses[name] <= 1
        return not once or any(id(p) in self._tied for p in self._modules[name]._parameters.values())

    def why_unfolded(self, name: str) -> str:
        """Why a scalar or scaled layer stands alone in the flow; `name` is that in the original model."""
        path = f"{_PREFIX}{name}"
        if not self._calls[path]:
            return "it is never called"
        if self._calls[path] > 1 or self._nodes[path] > 1 or self._uses[path] > 1:
            return "it is used more than once"
        if any(id(p) in self._tied for p in self._modules[path].parameters()):
            return "it shares a parameter with another module"
        return "it has no weight layer inside that can take its scalars"

    def own_name(self, node: Node) -> str:
        """The module's name in the original model."""
        return self.name(node).removeprefix(_PREFIX)


_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_PADS = {1: nn.ConstantPad1d, 2: nn.ConstantPad2d, 3: nn.ConstantPad3d}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PLAIN = (*_CONVOLUTIONS.values(), nn.Linear, *_TRANSPOSED)
_FORWARDS: tuple[Any, ...] = _PLAIN


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the scalars that a conversion added."""
    return module.plain_class if isinstance(module, ScaledModule) else type(module)


def cannot_fold_into(layer: nn.Module) -> str | None:
    """Why no factor can be multiplied into a layer's weight; None if one can.

    A subclass with a forward pass of its own may use its weight in any way, and so may a hook.
    """
    if not isinstance(layer, _PLAIN):
        return f"{type(layer).__name__} is not a weight layer"
    if hasattr(layer, "parametrizations") or layer._forward_pre_hooks or layer._forward_hooks:
        return "the layer's weight or output is changed by a hook or parametrization"
    kind: Any = base_class(layer)
    same = kind.__name__ == "Conv2dSame" and not isinstance(layer, ScaledModule)  # timm's, linear in its weight
    known = same or kind.forward in [plain.forward for plain in _FORWARDS]
    if not known and weight_kind(layer) == "plain":
        return f"{kind.__name__} has a forward pass of its own"
    return None


class LayerArrays:
    """W and b of one layer y = W * x + b, in float64 on the CPU.

    Scales and shifts are numbers, or have one entry per channel.
    """

    layer: Any  # any of the weight layers

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.transposed = isinstance(layer, _ConvTransposeNd)
        self.groups = layer.groups if isinstance(layer, _ConvNd) else 1
        weight: Tensor = layer.weight if weight_kind(layer) == "plain" else layer.effective_weight()
        self.weight = weight.detach().to("cpu", torch.float64, copy=True)
        self.outputs = self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]
        self.inputs = self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups
        bias = layer.bias
        self.bias = self.weight.new_zeros(self.outputs) if bias is None else bias.detach().to("cpu", torch.float64)
        self.pad = 0.0

    @property
    def plain(self) -> bool:
        """Whether the layer is one of torch's own, without scalars or reparametrization."""
        return weight_kind(self.layer) == "plain" and not isinstance(self.layer, ScaledModule)

    @property
    def pads_zeros(self) -> bool:
        """Whether the layer pads its input with zeros, or may do so."""
        if not isinstance(self.layer, _ConvNd):
            return False
        same = base_class(self.layer).__name__ == "Conv2dSame"  # timm's pads in its forward pass
        padded = any(self.layer._reversed_padding_repeated_twice)
        return self.transposed or same or (padded and self.layer.padding_mode == "zeros")

    def scale_outputs_(self, scale: Tensor, shift: Tensor) -> None:
        """Let the layer return scale · y + shift."""
        scale = scale.reshape(-1).expand(self.outputs)
        rest = (1,) * (self.weight.dim() - 2)
        if self.transposed:  # stored as (inputs, outputs of a group, …)
            by_group = self.weight.view(self.groups, -1, *self.weight.shape[1:])
            self.weight = (by_group * scale.view(self.groups, 1, -1, *rest)).view_as(self.weight)
        else:
            self.weight = self.weight * scale.view(-1, 1, *rest)
        self.bias = self.bias * scale + shift.reshape(-1)

    def scale_inputs_(self, scale: Tensor, shift: Tensor) -> None:
        """Let the layer read scale · x + shift in place of x, up to its zero padding; not for a transposed one."""
        rows = self.outputs // self.groups
        shift = shift.reshape(-1).expand(self.inputs).reshape(self.groups, -1, 1)
        taps = self.weight.flatten(2).sum(2) if self.weight.dim() > 2 else self.weight
        self.bias = self.bias + (taps.view(self.groups, rows, -1) @ shift).flatten()
        by_row = scale.reshape(-1).expand(self.inputs).reshape(self.groups, 1, -1).expand(-1, rows, -1)
        self.weight = self.weight * by_row.reshape(self.outputs, -1, *(1,) * (self.weight.dim() - 2))

    @torch.no_grad()
    def write_(self) -> nn.Module:
        """Write the arrays into the layer if it is plain, else into a new plain one, with a pad before it if needed."""
        old = self.layer
        layer = old if self.plain and not self.pad else self._empty()
        if layer is old:
            old.weight.copy_(self.weight)
        else:
            layer.weight = nn.Parameter(torch.empty_like(old.weight).copy_(self.weight), old.weight.requires_grad)
        if old.bias is not None or self.bias.any():
            like = old.weight if old.bias is None else old.bias
            layer.bias = nn.Parameter(self.bias.to(like.device, like.dtype), like.requires_grad)
        if not self.pad:
            return cast(nn.Module, layer)
        out = nn.Sequential()
        out.add_module("pad", _PADS[self.weight.dim() - 2](list(old._reversed_padding_repeated_twice), self.pad))  # type: ignore[arg-type]
        out.add_module("conv", layer)
        return out

    def _empty(self) -> Any:
        """A layer of torch's own with the same shape and no values; without padding if a pad module does it."""
        old = self.layer
        if isinstance(old, nn.Linear):
            return nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
        make: Any = _CONVOLUTIONS[self.weight.dim() - 2]
        padding = 0 if self.pad else old.padding
        hold = (old.in_channels, old.out_channels, old.kernel_size, old.stride, padding, old.dilation, old.groups)
        return make(*hold, bias=False, padding_mode=old.padding_mode, device="meta")
