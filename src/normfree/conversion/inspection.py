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

from normfree.graph.flow import tensors_of
from normfree.graph.functions import writes_into
from normfree.graph.observer import FunctionCall, Observer
from normfree.nn.model_state import preserve_model_state, substitute_tensors
from normfree.nn.normalizers import is_norm
from normfree.nn.weight_layers import WEIGHT_LAYERS

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
        several_inputs: The normalizers that are called with more than one tensor.
        standardized: The weight layers whose own forward pass standardizes their weight.
        shapes: The shapes of input and output of each of these.
    """

    calls: Counter[str]
    weight_read: set[str]
    overwritten: set[str]
    functional_norms: list[tuple[str, str]]
    norm_like: list[str]
    several_inputs: set[str]
    standardized: set[str]
    shapes: dict[str, tuple[Tensor, Tensor]]


def inspect_model(model: nn.Module, norms: Mapping[str, nn.Module], args: Any, kwargs: Any) -> Inspection:
    """Run a model once on an example and report how it behaves; the model is left unchanged.

    Modules that may be normalizers then run on scaled copies of their input.

    Raises:
        ValueError: If the model does not run on the example.
    """
    modules = dict(model.named_modules())
    inspector = _Inspector(modules, norms)
    try:
        with trial_run(model, attributes=True), _weight_readers(norms) as weight_read, inspector.following(modules):
            run(model, args, kwargs)
        with trial_run(model, attributes=True):
            norm_like = [name for name, x in inspector.inputs.items() if _normalizes(modules[name], x)]
            kinds = {type(modules[n]) for n, xy in inspector.layers.items() if _ignores_scale(modules[n], *xy)}
            shapes = {n: xy for n, xy in inspector.layers.items() if type(modules[n]) in kinds}
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} failed: {error}; "
            "pass an example that it accepts"
        ) from error
    return Inspection(
        inspector.calls,
        weight_read,
        inspector.overwritten,
        list(inspector.functional_norms),
        norm_like,
        inspector.several_inputs,
        set(shapes),
        shapes,
    )


class _Inspector(Observer):
    """Notes normalizing functions, writes into the outputs of normalizers, and inputs of possible normalizers."""

    def __init__(self, modules: Mapping[str, nn.Module], norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.norms = norms
        self.inputs: dict[str, Tensor] = {}
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}
        self.several_inputs: set[str] = set()
        self.overwritten: set[str] = set()
        self.functional_norms: dict[tuple[str, str], None] = {}
        self._outputs: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        model = modules[""]
        self._own: dict[int, Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers())}

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the first input of a module that may be a normalizer."""
        single = len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if single and name not in self.inputs and _may_normalize(module):
            self.inputs[name] = args[0].detach().clone()

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember the output of a normalizer, and input and output of a weight layer with its own forward pass."""
        if name in self.norms and isinstance(out, Tensor):
            self._outputs[id(out)] = (name, weakref.ref(out))
            if len(tensors_of((args, kwargs))) > 1:
                self.several_inputs.add(name)
        own = isinstance(module, WEIGHT_LAYERS) and not type(module).__module__.startswith(("torch.", "normfree."))
        if own and name not in self.layers and len(args) == 1 and isinstance(out, Tensor):
            self.layers[name] = args[0].detach().clone(), out.detach().clone()

    def on_function(self, call: FunctionCall) -> Any:
        """Note a normalizing function, or a write in place."""
        name = call.name
        tensors = tensors_of((call.args, call.kwargs))
        on_weight = bool(tensors) and all(id(t) in self._own for t in tensors)  # made from parameters alone
        if name in _NORMALIZING and not on_weight and self.home not in self.norms:
            self.functional_norms[self.home, name] = None
        written = writes_into(name, call.args, call.kwargs)
        if written is not None or (call.args and call.kwargs.get("inplace")):
            self._note_write(call.args[0] if written is None else written)
        out = call.run()
        if on_weight:
            self._own |= {id(t): t for t in tensors_of(out)}
        return out

    def _note_write(self, tensor: Any) -> None:
        name, reference = self._outputs.get(id(tensor), ("", None))
        # The conversion sets `inplace` of modules to False.
        has_switch = self.running and getattr(self.modules[self.home], "inplace", False) is True
        if reference is not None and reference() is tensor and not has_switch:
            self.overwritten.add(name)


def _may_normalize(module: nn.Module) -> bool:
    """Whether a module is third-party code without matrices or children that is not a known normalizer."""
    third_party = not type(module).__module__.startswith(("torch.", "normfree."))
    leaf = next(module.children(), None) is None and all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return third_party and leaf and not is_norm(module)


def _normalizes(module: nn.Module, x: Tensor) -> bool:
    """Whether a module returns the same for an input four times as large, but not for one of opposite sign.

    The second test excludes a module whose output does not depend on its input.
    """
    module.train()  # to use the statistics of the batch
    try:
        out, large, turned = (module(factor * x) for factor in (1.0, 4.0, -1.0))
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.isfinite().all():
        return False
    near = 0.02 * out.std(unbiased=False)
    return bool((large - out).abs().mean() <= near < (turned - out).abs().mean())


def _ignores_scale(layer: nn.Module, x: Tensor, out: Tensor) -> bool:
    """Whether a layer returns the same with a weight four times as large: it standardizes its weight."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.any():
        return False
    with substitute_tensors(layer, {id(weight): 4 * weight}):
        large = layer(x)
    return bool((large - out).abs().mean() < 0.25 * out.std(unbiased=False))  # it would be 3 times for a plain one


@contextmanager
def _weight_readers(norms: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Collect the normalizers whose weight the model's own code reads, that is, while the normalizer does not run."""
    read: set[str] = set()
    plain = {name: type(norm) for name, norm in norms.items()}
    for name, norm in norms.items():
        norm.__class__ = _reporting_class(plain[name], name, read)
    try:
        yield read
    finally:
        for name, norm in norms.items():
            norm.__class__ = plain[name]


def _reporting_class(plain: type[nn.Module], name: str, read: set[str]) -> type[nn.Module]:
    """A subclass that adds `name` to `read` when its weight is read from outside."""
    depth = [0]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            return plain.__call__(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    def attribute(self: nn.Module, key: str) -> Any:
        if key == "weight" and not depth[0]:
            read.add(name)
        return plain.__getattr__(self, key)

    return type(plain.__name__, (plain,), {"__call__": call, "__getattr__": attribute, "__module__": plain.__module__})


def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a model on copies of its inputs, which it may write into."""
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return model(*args, **kwargs)


@contextmanager
def trial_run(model: nn.Module, *, attributes: bool = False) -> Iterator[None]:
    """Context for a trial run: evaluation mode and no gradients inside; the model is restored at the end.

    Attention runs without its fast path, so that it calls its parts one by one. `attributes` is as for
    `preserve_model_state`.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with preserve_model_state(model, attributes=attributes), torch.no_grad():
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
