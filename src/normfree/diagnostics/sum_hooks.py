"""Taps at the residual sums: statistics of their operands and results, forward and backward, while a model runs."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normfree.diagnostics.moments import Reduced, Stats, channel_dim, finish, reduce, settle
from normfree.graph.functions import SUMS, operands_of
from normfree.nn.residual import Residual
from normfree.plan import Branch, ResidualPlan

Place = tuple[str, str]  # the name of a branch, and which of its tensors
BYTES_UNSETTLED = 2**24  # of means and variances a sample that wait to be reduced together
MISSING = Stats(math.nan, math.nan, math.nan)
ZERO = Stats(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SumSignal:
    """The signal at one residual sum: forward and backward, at the sum, the branch's end and the shortcut.

    `learns` says whether any weight of the branch, a multiplier included, got a gradient other than zero, or there is
    none that could. `around` is the name of the sum whose branch this one is part of.
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
    around: str | None = None


class _Seen(NamedTuple):
    """A tensor that was measured, and where its gradient is to be noted; holding it keeps its address its own."""

    key: object
    tensor: Tensor
    reduced: Reduced
    gradients: list[Place]


class _Channels(NamedTuple):
    """Where the last layer of a branch puts its channels, and how many they are."""

    dim: int
    width: int

    def of(self, tensor: Tensor) -> int:
        """The channels' dimension at the sum: the layer's, unless something moved them on the way."""
        kept = tensor.dim() > 2 and tensor.shape[self.dim] == self.width
        return self.dim % tensor.dim() if kept else channel_dim(tensor)


class Taps(TorchFunctionMode):
    """Watches the additions that the plan names, and takes statistics of their operands and results."""

    def __init__(self, modules: Mapping[str, nn.Module], plan: ResidualPlan) -> None:
        super().__init__()
        self.plan = plan
        self.modules = modules
        self._sums = {(b.place, b.addition): b for b in plan.branches}
        if strange := next((home for home, _ in self._sums if home not in self.modules), None):
            raise ValueError(
                f"expected a plan of this model, got one with a sum in '{strange}', which the model does not have; "
                "leave the plan out to have it discovered"
            )
        self._channels = {b.name: _channels(b, modules) for b in plan.branches}
        self._own = {home for home, _ in self._sums if not isinstance(self.modules[home], Residual)}
        self._homes: list[str] = []
        self._watching = False
        self._additions: Counter[str] = Counter()
        self._moments: dict[Place, Reduced] = {}
        self._unsettled = 0
        self._awaited: set[Place] = set()
        self._recent: deque[_Seen] = deque(maxlen=3)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in SUMS or not self._homes:
            return func(*args, **(kwargs or {}))
        home = self._homes[-1]
        branch = self._sums.get((home, self._additions[home]))
        self._additions[home] += 1
        operands = operands_of(args, kwargs or {})
        if branch is None or len(operands) < 2:
            return func(*args, **(kwargs or {}))
        # Before the addition, which may be in place: a hook that is set now sees the gradient of the old value.
        first, second = operands if branch.branch_first else operands[::-1]
        self._tap(branch, "branch", first)
        self._tap(branch, "shortcut", second)
        out = func(*args, **(kwargs or {}))
        self._tap(branch, "sum", out)
        return out

    def _once(self, tensor: Tensor, channels: int) -> _Seen:
        """The moments of a tensor; a block's output is the next one's shortcut, and a sum hands its gradient on."""
        key = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), channels)
        for seen in self._recent:
            if seen.key == key:
                return seen
        reduced = reduce(tensor.detach(), channels)
        if reduced.mean.dim() == 2:
            self._unsettled += reduced.mean.nbytes
        seen = _Seen(key, tensor, reduced, [])
        self._recent.append(seen)
        return seen

    def _note(self, place: Place, reduced: Reduced) -> None:
        self._moments[place] = reduced
        if self._unsettled > BYTES_UNSETTLED:
            settle(self._moments.values())
            self._unsettled = 0

    def _watch(self) -> None:
        """Look at function calls only in a home's own forward pass, not inside its children: looking costs time."""
        wanted = bool(self._homes) and self._homes[-1] in self._own
        if wanted is not self._watching:
            self._watching = wanted
            if wanted:
                self.__enter__()  # type: ignore[no-untyped-call]
            else:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _tap(self, branch: Branch, part: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        channels = self._channels[branch.name].of(tensor)
        if tensor.dim() > 1 and tensor.numel() == tensor.shape[channels]:
            raise ValueError(
                f"expected at least two values a channel at {_label(branch)}, got one (shape {tuple(tensor.shape)}), "
                "which has no variance; use a larger batch"
            )
        seen = self._once(tensor, channels)
        self._note((branch.name, part), seen.reduced)
        place = (branch.name, part + "_gradient")
        if not tensor.requires_grad:
            if part == "sum":
                self._require_gradient(branch)
                self._awaited.add(place)  # one that never comes is zero
            return
        self._awaited.add(place)
        if seen.tensor is tensor and seen.gradients:
            seen.gradients.append(place)  # one hook for a block's output and the next one's shortcut
            return
        places = seen.gradients if seen.tensor is tensor else []
        places.append(place)

        def backward(gradient: Tensor) -> None:
            reduced = self._once(gradient, channels).reduced
            for place in places:
                self._note(place, reduced)

        tensor.register_hook(backward)

    def _require_gradient(self, branch: Branch) -> None:
        """Refuse a sum that no gradient can come to although its branch has parameters that want one."""
        layers = [self.modules[layer.name] for layer in branch.layers if layer.name in self.modules]
        if any(p.requires_grad for module in layers for p in module.parameters()):
            raise ValueError(
                f"expected a gradient at {_label(branch)}, got a forward pass that keeps none; turn gradient "
                "checkpointing off, and take torch.no_grad out of the forward pass"
            )

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Know which module's forward pass an addition stands in; children hide their own additions."""
        placed: list[tuple[dict[Any, Any], object]] = []
        by_home: dict[str, list[Branch]] = {}
        for b in self.plan.branches:
            by_home.setdefault(b.place, []).append(b)

        def place(hooks: dict[Any, Any], hook: Callable[..., None]) -> None:
            """What `register_forward_hook` does, less its handle: hundreds of handles cost as much as some layers."""
            key = object()
            hooks[key] = hook
            placed.append((hooks, key))

        def tap_residual(module: Residual, branches: list[Branch]) -> None:
            """A residual module of ours has modules where the operands come out, and its output is the sum."""
            calls = Counter[str]()

            def tap(part: str) -> Callable[[nn.Module, Any, Any], None]:
                def hook(_m: nn.Module, _a: Any, out: Any) -> None:
                    if calls[part] < len(branches):
                        self._tap(branches[calls[part]], part, out)
                    calls[part] += 1

                return hook

            for part, source in (("shortcut", module.a), ("branch", module.beta), ("sum", module)):
                place(source._forward_hooks, tap(part))

        def follow(name: str, module: nn.Module) -> None:
            def enter(_m: nn.Module, _a: Any) -> None:
                self._homes.append(name)
                self._watch()

            def leave(_m: nn.Module, _a: Any, out: Any) -> None:
                self._homes.pop()
                self._watch()

            place(module._forward_pre_hooks, enter)
            place(module._forward_hooks, leave)

        try:
            for home, branches in by_home.items():
                module = self.modules[home]
                if isinstance(module, Residual):
                    tap_residual(module, branches)
            for name, module in self._followed().items():
                follow(name, module)
            yield
        finally:
            self._homes.clear()
            self._watch()
            self._recent.clear()  # tensors hold hooks, which hold this
            for hooks, key in placed:
                hooks.pop(key, None)

    def _followed(self) -> dict[str, nn.Module]:
        """The modules whose additions must be told apart: homes that are not ours, and what is inside them."""
        if not self._own:
            return {}
        names = {id(m): name for name, m in self.modules.items()}  # a shared module has one name, as in the plan
        inside = (m for home in self._own for m in self.modules[home].modules())
        return {names[id(m)]: m for m in inside}

    def silent(self, branches: Iterable[str]) -> bool:
        """Whether each of these branches put out exactly zero."""
        seen = [self._moments.get((name, "branch")) for name in branches]
        return all(r is not None and not r.mean.any() and not r.variance.any() for r in seen)

    def settle(self) -> None:
        """Reduce what is left to be, without waiting for it."""
        settle(self._moments.values())

    def result(self, alive: set[str]) -> tuple[SumSignal, ...]:
        """What was seen at every sum of the plan, and which branches learn."""
        unseen = [_label(b) for b in self.plan.branches if (b.name, "sum") not in self._moments]
        if unseen:
            raise ValueError(
                f"expected a forward pass through every residual sum of the plan, got none through {unseen[0]} "
                f"({len(unseen)} of {len(self.plan.branches)}); use evaluation mode (--eval) where blocks are "
                "dropped at random, or in Python pass the plan of what runs"
            )
        every = list(dict.fromkeys(self._moments.values()))
        known = dict(zip(every, finish(every), strict=True))
        seen = {place: known[reduced] for place, reduced in self._moments.items()}

        def stats(branch: Branch, part: str) -> Stats:
            return seen.get((branch.name, part), ZERO if (branch.name, part) in self._awaited else MISSING)

        places = ("sum", "branch", "shortcut")
        names = [place + kind for kind in ("", "_gradient") for place in places]
        labels = {b.name: _label(b) for b in self.plan.branches}
        return tuple(
            SumSignal(
                name=_label(b),
                stage=b.position.stage,
                transition=b.position.transition,
                learns=b.name in alive or not b.layers,
                around=None if b.around is None else labels.get(b.around),
                **{name: stats(b, name) for name in names},
            )
            for b in self.plan.branches
        )


def _label(branch: Branch) -> str:
    """What a sum is called; one in the model's own forward pass has no module to be named after."""
    return branch.name if branch.name.partition("#")[0] else f"(model){branch.name}"


def _channels(branch: Branch, modules: Mapping[str, nn.Module]) -> _Channels:
    """The channels of what a branch adds: dimension 1 behind a convolution, the last behind a linear layer."""
    module = modules.get(branch.last.name) if branch.layers else None
    if isinstance(module, nn.modules.conv._ConvNd):
        return _Channels(1, module.out_channels)
    return _Channels(-1, module.out_features if isinstance(module, nn.Linear) else 0)
