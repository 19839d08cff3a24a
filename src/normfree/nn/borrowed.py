"""Run somebody's model and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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
def on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, the model has meta tensors for its parameters and buffers: shapes come out, nothing is computed."""
    with standing_in(model, {id(t): t.to("meta") for t in (*model.parameters(), *model.buffers())}):
        yield
