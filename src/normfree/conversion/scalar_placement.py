"""Where a method's scalars stand in a foreign model: around its weight layers, or around a block that puts out a sum.

    x' = c · (a · h(x) + β · f(α · x) + δ)

α and the entry's bias stand before the layers that read the branch's input, β and δ behind those whose output is added;
a fixed a is taken out of the bracket, a·h + β·f = a·(h + (β/a)·f), so that only whole blocks need scaling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from normfree.graph.flow import Flow, Node
from normfree.graph.functions import ADDITIONS
from normfree.methods import Law, Method
from normfree.nn.scalar_wrapping import ScalarName, signals_of, unscalable
from normfree.plan import Branch, Layer, ResidualPlan

Refused = dict[str, str]
"""Why a model cannot be converted, and what can be done about it."""

_WITHOUT_SCALARS = "use a method without scalars, such as 'wn' or 'lsuv'"

Wanted = dict[tuple[str, ScalarName], tuple[float, bool]]
"""(module, scalar) → (initial value, learnable)."""


@dataclass
class Places:
    """Collects the scalars that a plan's branches ask for, and every reason why one has no place.

    `called` counts the calls of every module in a forward pass: a layer whose weight is used without a call of its own
    (the projections of an attention) is scaled through the module that uses it. Only a method that scales whole sums
    needs the `flow`.
    """

    model: nn.Module
    plan: ResidualPlan
    method: Method
    called: Counter[str]
    flow: Flow | None
    wanted: Wanted = field(default_factory=dict)
    refused: Refused = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        places = {branch.place for branch in self.plan.branches}
        self.around_sums = places.union(*map(_above, places), ("",))
        self.additions: dict[tuple[str, int], list[Node]] = {}
        for node in self.flow.nodes if self.flow else ():
            if node.ordinal >= 0:
                self.additions.setdefault((node.home, node.ordinal), []).append(node)

    def find(self) -> Wanted:
        """Place every scalar of every branch, stem and classifier."""
        biases = self.method.scalar_biases
        for layer in self.plan.stem if biases else ():
            self._bias_behind(layer)
        for branch in self.plan.branches:
            self._sum(branch)
            if biases:
                self._biases(branch)
        for layer in self.plan.classifier if biases else ():
            if not self._is_lookup(layer.name):  # a tied classifier is used without a call of its own
                self._put(layer, "shift", 0.0, True)
        return self.wanted

    def _sum(self, branch: Branch) -> None:
        """α, β and δ at a branch's layers; c and a at its block."""
        rule, position = self.method.rule, branch.position
        a, beta, factor = rule.a.at(position), rule.beta.at(position), 1.0
        c = rule.c.at(position)
        if a is not None and rule.a.learnable:
            self._block(branch, "skip", rule.a)
        elif a is not None:
            factor = a
        whole = (1.0 if c is None else c) * factor
        if whole != 1.0:
            self._block(branch, "beta", Law(whole))
        if beta is not None and (beta / factor != 1.0 or rule.beta.learnable):
            for layer in branch.ends:
                self._end(branch, layer, "beta", beta / factor, rule.beta.learnable)
        delta = rule.delta.at(position)
        if delta is not None and branch.layers:
            self._end(branch, branch.last, "delta", delta, rule.delta.learnable)
        alpha = rule.alpha.at(position)
        if alpha is not None and (alpha != 1.0 or rule.alpha.learnable):
            for layer in (*branch.entries, *branch.shortcut_layers[:1]):
                self._put(layer, "alpha", alpha, rule.alpha.learnable)

    def _biases(self, branch: Branch) -> None:
        """A scalar before every weight layer, and before the activation behind it where it has no bias of its own.

        Inside an attention that uses its projections itself there is no place before the last one; its own bias is.
        """
        for layer in (*branch.layers, *branch.shortcut_layers[:1]):
            if not layer.gate:
                edge = layer in branch.entries or layer in branch.shortcut_layers
                self._put(layer, "shift", 0.0, True, edge=edge)
        for layer in branch.layers:
            if layer not in branch.ends:
                self._bias_behind(layer)

    def _bias_behind(self, layer: Layer) -> None:
        if layer.activated_out and getattr(self.modules.get(layer.name), "bias", None) is None:
            self._put(layer, "delta", 0.0, True, edge=False)

    def _end(self, branch: Branch, layer: Layer, scalar: ScalarName, value: float, learnable: bool) -> None:
        """A scalar at the end of a branch, which an activation between layer and sum leaves no place for."""
        if layer.activated_out:
            self._refuse(
                layer.name,
                f"an activation stands between it and the sum {named(branch.name)}, so that no module puts out the "
                "branch to be multiplied",
                _WITHOUT_SCALARS,
            )
        else:
            self._put(layer, scalar, value, learnable)

    def _put(self, layer: Layer, scalar: ScalarName, value: float, learnable: bool, *, edge: bool = True) -> None:
        """A scalar around a layer; one that does not stand at an `edge` of the branch must be at the layer itself."""
        name = self._holder(layer)
        if name is not None and (edge or name == layer.name):
            self._want(name, scalar, value, learnable)

    def _want(self, name: str, scalar: ScalarName, value: float, learnable: bool) -> None:
        reason = unscalable(self.modules[name])
        if reason is not None:
            kind = type(self.modules[name]).__name__
            self._refuse(name, f"{kind} cannot be given a scalar, {reason}", _WITHOUT_SCALARS)
            return
        before = self.wanted.setdefault((name, scalar), (value, learnable))
        if before != (value, learnable):
            wishes = f"{scalar} = {before[0]:g} and {value:g}"
            self._refuse(name, f"it is shared by sums that want different scalars, {wishes}", _WITHOUT_SCALARS)

    def _holder(self, layer: Layer) -> str | None:
        """The module whose call uses the layer's weight: itself, or the one around it inside the same branch."""
        if layer.name not in self.modules:
            self._refuse(layer.name, "the model has no such module, the plan is of another model", "pass its own plan")
            return None
        for name in (layer.name, *_above(layer.name)):
            if name in self.around_sums:
                break  # a sum stands inside: what goes through this module is more than the branch
            if self.called[name] and not self._is_lookup(name):  # of which the call is another use of the weight
                return name
        self._refuse(
            layer.path,
            "the weight is used without a call of a module of its own, so that no scalar can stand around it",
            _WITHOUT_SCALARS,
        )
        return None

    def _refuse(self, name: str, why: str, remedy: str) -> None:
        self.refused[f"{named(name)}: {why}"] = remedy

    def _is_lookup(self, name: str) -> bool:
        return isinstance(self.modules.get(name), nn.Embedding | nn.EmbeddingBag)

    def _block(self, branch: Branch, scalar: ScalarName, law: Law) -> None:
        """A scalar on the whole sum (c) or on its shortcut (a), where a module puts out just that."""
        reason = self._no_block(branch, scalar)
        if reason is not None:
            self._refuse(
                branch.name,
                f"method '{self.method.name}' scales the sum itself, but {reason}",
                "use a method that scales the branch, such as 'fixup', 'skipinit' or 'nf'",
            )
            return
        value = law.at(branch.position)
        self._want(branch.place, scalar, 1.0 if value is None else value, law.learnable)

    def _no_block(self, branch: Branch, scalar: ScalarName) -> str | None:
        """Why no module puts out the sum of a branch, or a ReLU of it that a positive factor passes through."""
        home = branch.place
        if not home:
            return "it stands in the model's own forward pass"
        calls = self.flow.calls[home] if self.flow else []
        if len(calls) > 1:
            return "its block runs more than once"
        at = self.additions.get((home, branch.addition), [])
        if len(at) != 1 or not calls:
            return f"'{home}' has no such addition, the plan is of another model"
        node, call = at[0], calls[0]

        def inside(other: Node) -> bool:
            return other.home == home or other.home.startswith(f"{home}.")

        if scalar == "skip":
            name = next(iter(signals_of(type(self.modules[home]))), "")
            given = call.given.get(0, call.given.get(name))
            plain = node.function in ADDITIONS or not branch.branch_first  # no sign or factor before the second operand
            if branch.shortcut != "identity" or given not in node.inputs or not plain:
                return "its shortcut is not what the block is given as its first argument"
        users = [user for user in node.users if inside(user)]
        if not users:
            return None if call.out is node else f"it is not what '{home}' puts out, alone or first of a tuple"
        relu = len(node.users) == 1 and users[0].kind == "activation" and call.out is users[0]
        relu = relu and not any(inside(user) for user in users[0].users)
        name = users[0].name
        kind = type(self.modules[name]).__name__ if name in self.modules else name.rpartition(".")[2]
        if scalar == "skip" or not relu or "relu" not in kind.lower().replace("relu6", ""):
            return f"'{home}' does more after it"
        return None


def named(name: str) -> str:
    """A module, or a sum in it, as a message calls it; the model itself has no name of its own."""
    return f"'{name}'" if name.partition("#")[0] else f"'(model){name}'"


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
