"""Inspect a model in one forward pass on the example, before it is converted."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normfree.conversion.norms import may_normalize, normalizes, weight_readers
from normfree.graph.observer import FunctionCall, Observer
from normfree.nn.model_state import leave_no_trace

_NORMALIZING = frozenset(
    {"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize"}
)


@dataclass(frozen=True)
class Inspection:
    """How a model behaves in a forward pass.

    Attributes:
        calls: The number of calls of each module.
        weight_read: The normalizers whose weight other code reads.
        overwritten: The normalizers whose output is written to in place.
        functional_norms: The calls of normalizing functions outside of normalizers, by module and function.
        norm_like: The modules of unknown classes that behave like a normalizer.
    """

    calls: Counter[str]
    weight_read: set[str]
    overwritten: set[str]
    functional_norms: list[tuple[str, str]]
    norm_like: list[str]


def inspect_model(model: nn.Module, norms: Mapping[str, nn.Module], args: Any, kwargs: Any) -> Inspection:
    """Run a model once on an example and leave no trace.

    Raises:
        ValueError: If the model does not run on the example.
    """
    modules = dict(model.named_modules())
    inspector = _Inspector(modules, norms)
    try:
        with trial_run(model, attributes=True), weight_readers(norms) as weight_read, inspector.following(modules):
            run(model, args, kwargs)
        with trial_run(model, attributes=True):
            norm_like = [name for name, x in inspector.inputs.items() if normalizes(modules[name], x)]
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} stopped: {error}; "
            "pass an example that it accepts"
        ) from error
    return Inspection(inspector.calls, weight_read, inspector.overwritten, list(inspector.functional_norms), norm_like)


class _Inspector(Observer):
    """Notes normalizing functions, writes into the outputs of normalizers, and inputs of possible normalizers."""

    def __init__(self, modules: Mapping[str, nn.Module], norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.norms = norms
        self.inputs: dict[str, Tensor] = {}
        self.overwritten: set[str] = set()
        self.functional_norms: dict[tuple[str, str], None] = {}
        self._outputs: dict[int, tuple[str, weakref.ref[Tensor]]] = {}

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the first input of a module that may be a normalizer."""
        single = len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if single and name not in self.inputs and may_normalize(module):
            self.inputs[name] = args[0].detach().clone()

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember the output of a normalizer."""
        if name in self.norms and isinstance(out, Tensor):
            self._outputs[id(out)] = (name, weakref.ref(out))

    def on_function(self, call: FunctionCall) -> Any:
        """Note a normalizing function, or a write in place."""
        name = call.name
        on_parameter = bool(call.args) and isinstance(call.args[0], nn.Parameter)  # a weight may be normalized
        if name in _NORMALIZING and not on_parameter and self.home not in self.norms:
            self.functional_norms[self.home, name] = None
        in_place = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
        if call.args and (in_place or name == "__setitem__" or call.kwargs.get("inplace")):
            self._note_write(call.args[0])
        return call.run()

    def _note_write(self, tensor: Any) -> None:
        name, reference = self._outputs.get(id(tensor), ("", None))
        # The conversion sets `inplace` of modules to False.
        has_switch = self.running and getattr(self.modules[self.home], "inplace", False) is True
        if reference is not None and reference() is tensor and not has_switch:
            self.overwritten.add(name)


def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a model on copies of its inputs, which it may write into."""
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return model(*args, **kwargs)


@contextmanager
def trial_run(model: nn.Module, *, attributes: bool = False) -> Iterator[None]:
    """Run a model inside, in evaluation mode and without gradients, and leave no trace.

    Attention runs without its fast path, so that it calls its parts one by one. `attributes` is as for
    `leave_no_trace`.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with leave_no_trace(model, attributes=attributes), torch.no_grad():
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
