"""Where a method's scalars stand in a foreign model: around its weight layers, or around a block that puts out a sum.

    x' = c · (a · h(x) + β · f(α · x) + δ)

α and the entry's bias stand before the layers that read the branch's input, β and δ behind those whose output is added;
a fixed a is taken out of the bracket, a·h + β·f = a·(h + (β/a)·f), so that only whole blocks need scaling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from normfree.graph.flow import Node
from normfree.graph.functions import ADDITIONS
from normfree.methods import Law, Method
from normfree.nn.scaled import ScalarName, unscalable
from normfree.plan import Branch, Layer, ResidualPlan

Wanted = dict[tuple[str, ScalarName], tuple[float, bool]]
"""(module, scalar) → (initial value, learnable)."""


@dataclass
class Places:
    """Collects the scalars that a plan's branches ask for, and every reason why one has no place.

    `called` counts the calls of every module in a forward pass: a layer whose weight is used without a call of its own
    (the projections of an attention) is scaled through the module that uses it.
    """

    model: nn.Module
    plan: ResidualPlan
    method: Method
    called: Counter[str]
    flow: Sequence[Node]
    wanted: Wanted = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        places = {branch.place for branch in self.plan.branches}
        self.around_sums = places.union(*map(_above, places), ("",))
        self.additions: dict[tuple[str, int], list[Node]] = {}
        for node in self.flow:
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
            self.refused.append(
                f"'{layer.name}': an activation stands between it and the sum '{branch.name}', so that no module puts "
                f"out the branch to be multiplied"
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
            self.refused.append(f"'{name}': {type(self.modules[name]).__name__} cannot be given a scalar, {reason}")
            return
        before = self.wanted.setdefault((name, scalar), (value, learnable))
        if before != (value, learnable):
            self.refused.append(
                f"'{name}': it is shared by sums that want different scalars, {scalar} = {before[0]:g} and {value:g}"
            )

    def _holder(self, layer: Layer) -> str | None:
        """The module whose call uses the layer's weight: itself, or the one around it inside the same branch."""
        if layer.name not in self.modules:
            self.refused.append(f"'{layer.name}': the model has no such module, the plan is of another model")
            return None
        for name in (layer.name, *_above(layer.name)):
            if name in self.around_sums:
                break  # a sum stands inside: what goes through this module is more than the branch
            if self.called[name]:
                return name
        self.refused.append(
            f"'{layer.name}': its weight is used without calling the module, so that nothing can stand around it"
        )
        return None

    def _block(self, branch: Branch, scalar: ScalarName, law: Law) -> None:
        """A scalar on the whole sum (c) or on its shortcut (a), where a module puts out just that."""
        reason = _no_block(branch, scalar, self.additions.get((branch.place, branch.addition), []))
        if reason is not None:
            self.refused.append(
                f"'{branch.name}': method '{self.method.name}' scales the sum itself, but {reason}; use a method that "
                "scales the branch, such as 'fixup', 'skipinit' or 'nf'"
            )
            return
        value = law.at(branch.position)
        self._want(branch.place, scalar, 1.0 if value is None else value, law.learnable)


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _no_block(branch: Branch, scalar: ScalarName, at: list[Node]) -> str | None:
    """Why no module puts out the sum of a branch, or a ReLU of it that a positive factor passes through."""
    home = branch.place
    if not home or len(at) != 1:
        return "it stands in the model's own forward pass" if not home else "its block runs more than once"
    node = at[0]

    def inside(other: Node) -> bool:
        return other.home == home or other.home.startswith(f"{home}.")

    if scalar == "skip":
        shortcut = [source for source in node.inputs if not inside(source)]
        plain = node.function in ADDITIONS or not branch.branch_first  # no sign or factor before the second operand
        if branch.shortcut != "identity" or len(shortcut) != 1 or not plain:
            return "its shortcut is not what the block is given"
    users = [user for user in node.users if inside(user)]
    if not users:
        return None
    relu = len(node.users) == 1 and users[0].kind == "activation" and not any(inside(u) for u in users[0].users)
    if scalar == "skip" or not relu or "relu" not in users[0].name.lower().rpartition(".")[2].replace("relu6", ""):
        return f"'{home}' does more after it"
    return None
