"""The state of a model: run a model and restore its state afterwards.

`preserve_model_state` is the context manager for a pass through a model. `on_meta` does the same on tensors without
values. `restored_on_error` rolls back a failed change. `reshard_` and `full_tensor` are for models that FSDP2
(`fully_shard`) shards; all processes must call them together. The other functions are building blocks of these.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Key = TypeVar("Key", bound=Hashable)
_CONTAINERS = (dict, OrderedDict, list, set)


@dataclass(frozen=True)
class ModelParts:
    """The modules and the parameters of a model by name; a shared one is listed under its first name."""

    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]


def parts_of(model: nn.Module) -> ModelParts:
    """Collect modules and parameters in one walk, with the names and order of `named_modules` and `named_parameters`.

    With thousands of modules, each walk costs as much time as running a few layers.

    >>> list(parts_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).modules)
    ['', '0', '1']
    """
    modules = dict(model.named_modules())
    parameters: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[f"{prefix}.{name}" if prefix else name] = parameter
    return ModelParts(modules, parameters)


def call_arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Split an example into positional and keyword arguments of a model.

    A mapping holds keyword arguments, a tuple or list positional ones. Anything else is the only argument. The keyword
    arguments are a plain dictionary, since torch looks into no other mapping, such as a `UserDict`.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def small_copy(example: Any) -> Any:
    """Copy an example to keep it: the tensors without their graphs, and two images of a batch of images."""
    if isinstance(example, Tensor):
        return example.detach()[: 2 if example.dim() == 4 else None].clone()
    example = dict(example) if isinstance(example, Mapping) else example
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, example)


@contextmanager
def hooked(hooks: Mapping[nn.Module, Callable[..., Any]], *, before: bool = False) -> Iterator[None]:
    """Run forward hooks of modules inside; `before` the forward pass of each module, or after it."""
    handles = [m.register_forward_pre_hook(h) if before else m.register_forward_hook(h) for m, h in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def preserve_model_state(
    model: nn.Module, parts: ModelParts | None = None, *, attributes: bool = False
) -> Iterator[None]:
    """Run a model forward and backward inside; afterwards, also after an error, the model is as it was.

    - Gradients are set aside, not copied, and restored.
    - Buffers: the model runs on copies, since a graph of the caller may still read the buffers themselves.
    - Modes: every module is back in training or evaluation mode.
    - Hooks that run when a gradient has arrived (an optimizer that steps in the backward pass) do not run inside.
    - Random states of Python, numpy, torch and the model's GPUs are restored.
    - Parameters that FSDP2 gathered for a pass inside are sharded again.
    - With `attributes`, so are the class and all attributes of every module: other hooks, caches, lists.

    Args:
        model: The model to run.
        parts: The model's parts, if the caller has them at hand.
        attributes: Whether to restore attributes too, which costs as much time as a few layers. Pass False to
            keep attributes assigned inside the context.
    """
    known = parts or parts_of(model)
    parameters = known.parameters.values()
    restore_attributes = _remember_attributes(known.modules.values()) if attributes else None
    gradients = [(p, p.grad) for p in parameters]
    held = [(m, dict(m._buffers)) for m in known.modules.values() if m._buffers]
    copies = _copies({id(b): b for _, buffers in held for b in buffers.values() if b is not None})
    gradient_hooks = [(h, dict(h)) for p in parameters if (h := p._post_accumulate_grad_hooks)]
    modes = [(m, m.training) for m in known.modules.values()]
    with preserve_random_state(parameters):
        try:
            for p, gradient in gradients:
                if gradient is not None:
                    p.grad = None
            for hooks, _ in gradient_hooks:
                hooks.clear()
            for m, buffers in held:
                m._buffers.update({name: copies[id(b)] for name, b in buffers.items() if b is not None})
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for hooks, before in gradient_hooks:
                hooks.update(before)
            for m, buffers in held:
                m._buffers.clear()
                m._buffers.update(buffers)
            for m, training in modes:
                if m.training is not training:  # setting an attribute of a module is slow
                    m.training = training
            if restore_attributes is not None:
                restore_attributes()
            reshard_(known.modules.values())


@contextmanager
def eval_pass(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode and without gradients inside; the model is restored at the end.

    Its attributes are restored, too, since a model may cache values that it computed from the weights of this pass.
    Attention runs without its fast path, so that it calls its parts one by one.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    with preserve_model_state(model, attributes=True), torch.no_grad():
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def run_on_copy(model: nn.Module, example: Any) -> Any:
    """Run a model on a copy of an example, which it may write into."""
    args, kwargs = call_arguments(example)
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return model(*args, **kwargs)


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Give the model meta tensors for its parameters and buffers: it computes shapes only, and leaves no trace.

    Tensors that the model caches in this pass (a mask, a table of positions) have no values, so attributes are
    restored.
    """
    with preserve_model_state(model, attributes=True):
        tensors = [*model.parameters(), *model.buffers()]
        with substitute_tensors(model, {id(t): t.to("meta") for t in tensors}):
            yield


@contextmanager
def substitute_tensors(model: nn.Module, tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the model compute with other tensors in place of some parameters and buffers, given by their `id`.

    `torch.func.functional_call` does the same, but leaves the substitutes in modules that have several names.
    """
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers) if table]
    held = [(table, dict(table)) for table in tables]
    try:
        for table, before in held:
            table.update({name: tensors[id(t)] for name, t in before.items() if id(t) in tensors})
        yield
    finally:
        for table, before in held:
            table.clear()
            table.update(before)


@contextmanager
def preserve_random_state(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the global random states of Python, numpy, torch, and of the GPUs that hold these tensors."""
    states = random.getstate(), np.random.get_state()
    cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models and functions as plain Python inside: compiled code runs no hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and every module back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class ModelSnapshot:
    """A model at one moment: the attributes of all modules, and the values of parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._restore_attributes = _remember_attributes(model.modules())
        self._values = [(t, t.detach().clone()) for t in [*model.parameters(), *model.buffers()]]

    def restore_(self) -> None:
        """Make the model what it was at that moment."""
        self._restore_attributes()
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make the model what it was inside; afterwards it is what it is now."""
        now = ModelSnapshot(self._model)
        self.restore_()
        try:
            yield
        finally:
            now.restore_()


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[ModelSnapshot]:
    """Restore the model if the block raises. Yields the model before the block, for a block that restores it itself."""
    before = ModelSnapshot(model)
    try:
        yield before
    except BaseException:
        before.restore_()
        raise


def _remember_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember the class and the attributes of every module. Returns a function that restores them.

    Containers among the attributes (of parameters, modules and hooks, or a cache) get their entries back. The values
    of tensors are not remembered.
    """
    remembered = [(m, type(m), dict(m.__dict__)) for m in modules]
    containers = [v for _, _, attributes in remembered for v in attributes.values() if type(v) in _CONTAINERS]
    contents = [container.copy() if container else () for container in containers]

    def restore() -> None:
        for module, kind, attributes in remembered:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in zip(containers, contents, strict=True):
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)

    return restore


@torch.no_grad()
def _copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copy each tensor outside of any graph."""
    found = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    for keys, _ in by_device_and_type(tensors):
        torch._foreach_copy_([found[key] for key in keys], [tensors[key] for key in keys])
    return found


def reshard_(modules: Iterable[nn.Module]) -> bool:
    """Free the gathered parameters that a forward pass without a backward pass did not free.

    Returns:
        Whether one of the modules is sharded by FSDP2.
    """
    library: Any = sys.modules.get("torch.distributed.fsdp")
    found = [] if library is None else [module for module in modules if isinstance(module, library.FSDPModule)]
    for module in found:
        module.reshard()
    return bool(found)


def by_device_and_type(tensors: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], torch.dtype]]:
    """Group the keys of tensors that share device and type, so that one kernel can handle each group.

    Sharded tensors are groups of their own.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype, bool], list[Key]] = defaultdict(list)
    for key, tensor in tensors.items():
        groups[tensor.device, tensor.dtype, is_sharded(tensor)].append(key)
    for (_, dtype, _), keys in groups.items():
        yield keys, dtype


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes (a DTensor of FSDP2)."""
    # Importing torch's distributed tensors takes seconds, so look them up only if the caller has imported them.
    library: Any = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values, gathered from the processes if it is sharded."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full
