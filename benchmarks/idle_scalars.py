"""The scalars of a converted model that could not move in its original either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models_page import ALL_STEPS, SMALL_RATE
from subjects import Subject
from torch import nn


def idle_scalars(make: Callable[[], Subject], names: Sequence[str]) -> list[str]:
    """Return those of the scalars that a conversion added which could not move in the original either.

    In all steps of the original, the module is not called, the gradient at its output is exactly 0, or its output is,
    and the scalar multiplies that.
    """
    torch.manual_seed(0)
    subject = make()
    model = subject.model.train()
    without_dropout(model)
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(home: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            if not first.requires_grad:  # nothing before it is trained, but a scalar after it would be
                first = first.detach().requires_grad_()
            first.retain_grad()
            outputs.setdefault(home, []).append(first)
            return (first, *out[1:]) if type(out) is tuple else first if isinstance(out, torch.Tensor) else None

        return hook

    def is_idle(name: str) -> bool:
        home, _, scalar = name.rpartition(".")
        return all(
            tensor.grad is None or not tensor.grad.any() or (scalar == "beta" and not tensor.any())
            for tensor in outputs.get(home, ())
        )

    for home in dict.fromkeys(name.rpartition(".")[0] for name in names):
        model.get_submodule(home).register_forward_hook(keep(home))
    optimizer = torch.optim.AdamW(model.parameters(), lr=SMALL_RATE, weight_decay=0.0)
    idle = list(names)
    for _ in range(ALL_STEPS):
        outputs.clear()
        optimizer.zero_grad(set_to_none=True)
        subject.loss(model).backward()
        idle = [name for name in idle if is_idle(name)]
        optimizer.step()
    return idle


def without_dropout(model: nn.Module) -> None:
    """Switch off dropout and stochastic depth, so that every model that learns reaches a low loss."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
            module.eval()
