"""Blocks without a residual sum among their likes, which have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from normfree.diagnostics.sum_hooks import address
from normfree.plan import ResidualPlan


@contextmanager
def without_sums(modules: Mapping[str, nn.Module], plan: ResidualPlan) -> Iterator[list[str]]:
    """The modules that could have had a residual sum as most of their likes do, once the model has run inside."""
    homes = {branch.place for branch in plan.branches}

    def kind(name: str) -> tuple[str, type[nn.Module]]:
        return address(name), type(modules[name])

    have = Counter(kind(home) for home in homes if home in modules)
    others = Counter(kind(name) for name in modules if name not in homes)
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def compare(_m: nn.Module, args: Any, out: Any) -> None:
            same = args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and args[0].shape == out.shape
            if same and name not in found:
                found.append(name)

        return compare

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in modules.items()
        if name not in homes and have[kind(name)] > others[kind(name)]
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
