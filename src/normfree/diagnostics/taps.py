"""Taps at the residual sums: statistics of their operands and results, forward and backward, while a model runs."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normfree.diagnostics.moments import Reduced, Stats, channel_dim, finish, reduce
from normfree.graph.record import ADDITIONS
from normfree.nn.residual import Residual
from normfree.plan import Branch, ResidualPlan

MISSING = Stats(math.nan, math.nan, math.nan)
ZERO = Stats(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SumSignal:
    """The signal at one residual sum: forward and backward, at the sum, the branch's end and the shortcut.

    `learns` says whether any parameter of the branch, a scalar included, got a gradient other than zero.
    """

    name: str
    stage: int
    transition: bool
    sum: Stats
    branch: Stats
    shortcut: Stats
    sum_gradient: Stats
    branch_gradient: Stats
    shortcut_gradient: Stats
    learns: bool = True


class Taps(TorchFunctionMode):
    """Watches the additions that the plan names, and takes statistics of their operands and results."""

    def __init__(self, modules: Mapping[str, nn.Module], plan: ResidualPlan) -> None:
        super().__init__()
        self.plan = plan
        self.modules = modules
        self._sums = {(b.place, b.addition): b for b in plan.branches}
        self._own = {home for home, _ in self._sums if not isinstance(self.modules.get(home), Residual)}
        if strange := next((home for home, _ in self._sums if home not in self.modules), None):
            raise ValueError(
                f"expected a plan of this model, got one with a sum in '{strange}', which the model does not have; "
                "leave the plan out to have it discovered"
            )
        self._homes: list[str] = []
        self._watching = False
        self._additions: Counter[str] = Counter()
        self._moments: dict[tuple[str, str], Reduced] = {}
        self._awaited: set[tuple[str, str]] = set()
        self._recent: deque[tuple[object, Tensor, Reduced]] = deque(maxlen=3)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ADDITIONS or not self._homes:
            return func(*args, **(kwargs or {}))
        home = self._homes[-1]
        branch = self._sums.get((home, self._additions[home]))
        self._additions[home] += 1
        if branch is None or len(args) < 2:
            return func(*args, **(kwargs or {}))
        # Before the addition, which may be in place: a hook that is set now sees the gradient of the old value.
        first, second = (args[0], args[1]) if branch.branch_first else (args[1], args[0])
        self._tap(branch, "branch", first)
        self._tap(branch, "shortcut", second)
        out = func(*args, **(kwargs or {}))
        self._tap(branch, "sum", out)
        return out

    def _once(self, tensor: Tensor) -> Reduced:
        """The moments of a tensor; a block's output is the next one's shortcut, and a sum hands its gradient on."""
        key = (tensor.data_ptr(), tensor.shape, tensor._version)
        for known, _, reduced in self._recent:
            if known == key:
                return reduced
        reduced = reduce(tensor)
        self._recent.append((key, tensor, reduced))  # holding the tensor keeps its address its own
        return reduced

    def _watch(self) -> None:
        """Look at function calls only in a home's own forward pass, not inside its children: looking costs time."""
        wanted = bool(self._homes) and self._homes[-1] in self._own
        if wanted and not self._watching:
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self._watching and not wanted:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._watching = wanted

    def _tap(self, branch: Branch, part: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        if tensor.dim() > 1 and tensor.numel() == tensor.shape[channel_dim(tensor)]:
            raise ValueError(
                f"expected at least two values a channel at {_label(branch)}, got one (shape {tuple(tensor.shape)}), "
                "which has no variance; use a larger batch"
            )
        self._moments[branch.name, part] = self._once(tensor.detach())

        def backward(gradient: Tensor) -> None:
            self._moments[branch.name, f"{part}_gradient"] = self._once(gradient)

        if tensor.requires_grad:
            tensor.register_hook(backward)
        if tensor.requires_grad or part == "sum":
            self._awaited.add((branch.name, f"{part}_gradient"))  # one that never comes is zero

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Know which module's forward pass an addition stands in; children hide their own additions."""
        handles = []
        by_home: dict[str, list[Branch]] = {}
        for b in self.plan.branches:
            by_home.setdefault(b.place, []).append(b)

        def tap_residual(module: Residual, branches: list[Branch]) -> None:
            """A residual module of ours has modules where the operands come out, and its output is the sum."""
            calls = Counter[str]()

            def tap(part: str) -> Callable[[nn.Module, Any, Any], None]:
                def hook(_m: nn.Module, _a: Any, out: Any) -> None:
                    if calls[part] < len(branches):
                        self._tap(branches[calls[part]], part, out)
                    calls[part] += 1

                return hook

            for part, place in (("shortcut", module.a), ("branch", module.beta), ("sum", module)):
                handles.append(place.register_forward_hook(tap(part)))

        def follow(name: str, module: nn.Module) -> None:
            def enter(_m: nn.Module, _a: Any) -> None:
                self._homes.append(name)
                self._watch()

            def leave(_m: nn.Module, _a: Any, out: Any) -> None:
                self._homes.pop()
                self._watch()

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))

        names = {id(m): name for name, m in self.modules.items()}  # a shared module has one name, as in the plan
        followed: dict[str, nn.Module] = {}
        for home, branches in by_home.items():
            module = self.modules[home]
            if isinstance(module, Residual):
                tap_residual(module, branches)
            else:
                followed.update({names[id(m)]: m for m in module.modules()})
        for name, module in followed.items():
            follow(name, module)
        try:
            yield
        finally:
            self._homes.clear()
            self._watch()
            for handle in handles:
                handle.remove()

    def result(self, alive: set[str]) -> tuple[SumSignal, ...]:
        """What was seen at every sum of the plan, and which branches learn."""
        self._recent.clear()
        unseen = [_label(b) for b in self.plan.branches if (b.name, "sum") not in self._moments]
        if unseen:
            raise ValueError(
                f"expected a forward pass through every residual sum of the plan, got none through {unseen[0]} "
                f"({len(unseen)} of {len(self.plan.branches)}); pass the plan of what runs, or use evaluation mode "
                "where blocks are dropped at random"
            )
        every = list({id(r): r for r in self._moments.values()}.values())
        known = {id(r): stats for r, stats in zip(every, finish(every), strict=True)}
        seen = {key: known[id(r)] for key, r in self._moments.items()}

        def stats(branch: Branch, part: str) -> Stats:
            return seen.get((branch.name, part), ZERO if (branch.name, part) in self._awaited else MISSING)

        places = ("sum", "branch", "shortcut")
        names = [place + kind for kind in ("", "_gradient") for place in places]
        return tuple(
            SumSignal(
                name=_label(b),
                stage=b.position.stage,
                transition=b.position.transition,
                learns=b.name in alive,
                **{name: stats(b, name) for name in names},
            )
            for b in self.plan.branches
        )


def _label(branch: Branch) -> str:
    """What a sum is called; one in the model's own forward pass has no module to be named after."""
    return branch.name if branch.name.partition("#")[0] else f"(model){branch.name}"
