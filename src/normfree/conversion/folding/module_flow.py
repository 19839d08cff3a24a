"""The recorded flow of a model together with the modules that it calls, and the replacement of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._pytree import tree_map

from normfree.graph.flow import Flow, Node
from normfree.graph.recorder import record
from normfree.nn.model_state import call_arguments

_PREFIX = "model."


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
        args, kwargs = call_arguments(example)
        return ModuleFlow(self, record(self, *args, **kwargs))

    def replace_(self, swaps: Mapping[nn.Module, nn.Module]) -> None:
        """Replace modules wherever they stand; a new one takes the mode of the old one."""
        for old, new in swaps.items():
            new.train(old.training)
        for parent in list(self.modules()):
            for name, child in parent._modules.items():
                if child is not None and child in swaps:
                    parent._modules[name] = swaps[child]


class ModuleFlow:
    """The nodes of a flow with their modules; tells which node is a module's only call."""

    def __init__(self, marked: MarkedModel, flow: Flow) -> None:
        self.nodes = flow.nodes
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

    def own_name(self, node: Node) -> str:
        """The module's name in the original model."""
        return self.name(node).removeprefix(_PREFIX)
