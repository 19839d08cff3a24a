"""Run somebody's model and give it back as it was."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, list, set)


def call_arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How an example is handed to a model: a mapping by name, a tuple or list by position, anything else alone."""
    if isinstance(example, Mapping):
        return (), example
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


@contextmanager
def standing_in(model: nn.Module, tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, the model computes with other tensors for some of its parameters and buffers, given by their `id`.

    `torch.func.functional_call` does the same, but what stands in stays for good where a module has several names.
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
def same_draws(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the global random states back: of Python, numpy and torch, and of the GPUs that hold these tensors."""
    states = random.getstate(), np.random.get_state()
    cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module's mode is as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, the model has meta tensors for its parameters and buffers: shapes come out, nothing is computed.

    What it keeps of such a pass (a mask, a table of positions) holds no values, so every attribute is put back; and so
    are the random states, since numbers that it draws for itself are drawn.
    """
    tensors = [*model.parameters(), *model.buffers()]
    restore = remembered(model)
    try:
        with same_draws(tensors), standing_in(model, {id(t): t.to("meta") for t in tensors}):
            yield
    finally:
        restore()


def remembered(model: nn.Module) -> Callable[[], None]:
    """Remember the class and the attributes of every module; to call what is returned puts them back.

    Containers among the attributes (of parameters, modules and hooks, or a cache) get their entries back. The numbers
    in tensors are not remembered.
    """
    modules = [(m, type(m), dict(m.__dict__)) for m in model.modules()]
    containers = [v for _, _, attributes in modules for v in attributes.values() if type(v) in _CONTAINERS]
    contents = [container.copy() if container else () for container in containers]

    def restore() -> None:
        for module, kind, attributes in modules:
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


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Put the attributes of all modules, and the numbers in parameters and buffers, back when the block raises."""
    restore = remembered(model)
    values = [(t, t.detach().clone()) for t in [*model.parameters(), *model.buffers()]]
    try:
        yield
    except BaseException:
        restore()
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise
