"""The recorded flow of a model with its outputs marked, and the replacing of modules in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._pytree import tree_map

from normfree.graph.flow import Node
from normfree.graph.recorder import record
from normfree.nn.model_state import call_arguments

_PREFIX = "model."


class Marked(nn.Module):
    """A model whose outputs pass through a module of their own, so that the flow shows them.

    A node that is read by others may be an output as well, and then nothing may be folded into it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model puts out."""
        out = self.model(*args, **kwargs)
        return tree_map(lambda leaf: self.output(leaf) if isinstance(leaf, Tensor) else leaf, out)

    def flow(self, example: Any) -> Calls:
        """The flow of the model on `example`: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
        counts: Counter[str] = Counter()

        def count(name: str) -> Callable[..., None]:
            return lambda *_: counts.update([name])

        # A model that fails on tensors without values is run again, on a copy.
        handles = [self.register_forward_pre_hook(lambda *_: counts.clear())]
        handles += [module.register_forward_hook(count(name)) for name, module in self.named_modules()]
        try:
            args, kwargs = call_arguments(example)
            flow = record(self, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return Calls(self, flow.nodes, counts)

    def replace_(self, swaps: Mapping[nn.Module, nn.Module]) -> None:
        """Put the new modules wherever the old ones stand, in their mode."""
        for old, new in swaps.items():
            new.train(old.training)
        for parent in list(self.modules()):
            for name, child in parent._modules.items():
                if child is not None and child in swaps:
                    parent._modules[name] = swaps[child]


class Calls:
    """The nodes of a flow, and which of them are a module's only call."""

    def __init__(self, marked: Marked, nodes: list[Node], counts: Counter[str]) -> None:
        self.nodes = nodes
        self._modules = {name: m for name, m in marked.named_modules() if counts[name]}
        self._counts = counts
        self._nodes = Counter(self.name(node) for node in nodes)
        self._uses = Counter(weight.module for node in nodes for weight in node.weights)
        holders = Counter(id(p) for m in marked.modules() for p in m._parameters.values() if p is not None)
        self._tied = {key for key, count in holders.items() if count > 1}

    def name(self, node: Node) -> str:
        """The name of what was called: a function of the signal in a transposed convolution is that module's call."""
        return node.home if isinstance(self._modules.get(node.home), _ConvTransposeNd) else node.name

    def module(self, node: Node) -> nn.Module | None:
        """The module whose call a node is; None for a function, an input or an output."""
        # No function has a name with a dot, and all names of the model's modules begin with that of the attribute.
        name = self.name(node)
        return self._modules[name] if name == "model" or name.startswith(_PREFIX) else None

    def shared(self, node: Node) -> bool:
        """Whether a module is used more than once, or holds a parameter that another module holds as well."""
        name = self.name(node)
        once = self._nodes[name] == 1 and self._counts[name] == 1 and self._uses[name] <= 1
        return not once or any(id(p) in self._tied for p in self._modules[name]._parameters.values())

    def own_name(self, node: Node) -> str:
        """The name of what was called as the model has it."""
        return self.name(node).removeprefix(_PREFIX)
