"""Give any model the scalars of a method.

Scalars go to weight layers, or to a block that returns a sum:

    x' = c · (a · h(x) + β · f(α · x) + δ)

α and the entry's bias come before the layers that read the branch's input, β and δ after those whose output is added.
A fixed a is taken out of the bracket, a·h + β·f = a·(h + (β/a)·f), so that the sum is scaled and not its shortcut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from torch import nn

from normfree.conversion.changes import Added
from normfree.conversion.inspection import Inspection
from normfree.errors import quoted
from normfree.graph.discovery import WeightlessBranch
from normfree.graph.flow import Node
from normfree.graph.observer import ADDITIONS, RECTIFIERS
from normfree.methods import Method
from normfree.nn.normalizers import is_norm
from normfree.nn.scalars import ScalarName, add_scalar_, signals_of, unscalable
from normfree.plan import Branch, Layer

_RELUS = RECTIFIERS | {"leaky_relu", "leaky_relu_", "leakyrelu", "prelu"}

_IN_WORDS: dict[ScalarName, str] = {
    "alpha": "multiplier α",
    "shift": "bias before a layer",
    "beta": "multiplier β",
    "delta": "bias after a layer",
    "skip": "multiplier a of a shortcut",
}

Obstacles = dict[str, str]
"""The reasons why a model cannot be converted, each with a remedy, or '' if the only remedy is another method."""


class ScalarStart(NamedTuple):
    """The initial value of a scalar, whether it is trained, and a description."""

    value: float
    learnable: bool
    kind: str


Scalars = dict[tuple[str, ScalarName], ScalarStart]
"""The scalars to add, by module and scalar."""


_UNREACHED = "the example does not reach it, so where its scalar belongs is unknown"


class ScalarPlacement:
    """Finds a module for every scalar of a method.

    A layer whose weight is used without a call (the projections of an attention) is scaled through the module that uses
    it. Every norm-free method gives a weightless branch a multiplier, because the stream that it reads is no longer
    normalized.

    Attributes:
        scalars: The scalars to add.
        obstacles: The reasons why others have no place.
        weightless: The weightless branches, with the modules that hold their multipliers.
    """

    def __init__(self, model: nn.Module, inspection: Inspection, method: Method) -> None:
        self.plan = inspection.plan
        self.flow = inspection.flow
        self.method = method
        self.scalars: Scalars = {}
        self.obstacles: Obstacles = {}
        self.weightless: list[WeightlessBranch] = []
        self.modules = dict(model.named_modules())
        self._calls = self.flow.call_counts
        self._contested: set[tuple[str, ScalarName]] = set()
        homes = {branch.home for branch in self.plan.branches}
        self._around_sums = homes.union(*map(_parents, homes), ("",))
        self._returned: dict[Node, list[str]] = {}  # the modules with children that return a node
        for name, made in self.flow.calls.items():
            for call in made:
                if call.out is not None:
                    self._returned.setdefault(call.out, []).append(name)
        self._additions: dict[tuple[str, int], list[Node]] = {}
        for node in self.flow.nodes:
            if node.ordinal >= 0:
                self._additions.setdefault((node.home, node.ordinal), []).append(node)

    def place(self, values: Sequence[Mapping[str, float]], branches: Iterable[WeightlessBranch]) -> None:
        """Place every scalar of the stem, the branches and the classifier, and the multipliers of weightless branches.

        `values` are the initial values of the method's scalars at each branch.
        """
        biases = self.method.scalar_biases
        for layer in self.plan.stem if biases else ():
            self._place_bias_after(layer)
        for branch, scalars in zip(self.plan.branches, values, strict=True):
            self._place_multipliers(branch, scalars)
            if biases:
                self._place_biases(branch)
        for layer in self.plan.classifier if biases else ():
            if self._calls[layer.name] and not self._is_lookup(layer.name):  # a tied one is used without a call
                self._place_at(layer, "shift", 0.0, True)
        for weightless in branches if self.method.kind == "norm-free" else ():
            names = (name for step in weightless.steps for name in self._names(step))
            holder = next(filter(self._can_hold, names), None)
            if holder is not None and (holder, "beta") not in self.scalars:  # its value is set when the model runs
                self._add(holder, "beta", 1.0, self.method.rule.beta.learnable)
            self.weightless.append(weightless._replace(holder=holder))

    def repeat(self, added: Iterable[Added]) -> None:
        """Keep the scalars that an earlier conversion added, whose values are known.

        With other weights, the example may reach other experts; the record has the scalars of all.
        """
        before = {record.name: record for record in added}
        self.scalars = {place: start for place, start in self.scalars.items() if ".".join(place) in before}
        for path, record in before.items():
            name, _, scalar = path.rpartition(".")
            if record.value is not None and name in self.modules and not self._calls[name]:
                start = ScalarStart(record.value, record.learnable, record.kind)
                self.scalars[name, cast(ScalarName, scalar)] = start
        self.obstacles = {text: remedy for text, remedy in self.obstacles.items() if _UNREACHED not in text}
        self.weightless.clear()

    def add_(self, model: nn.Module) -> list[Added]:
        """Give every module of a model without normalizers its scalars. Returns a record of each."""
        for (name, scalar), start in self.scalars.items():
            add_scalar_(model.get_submodule(name), scalar, start.value, learnable=start.learnable)
        return [
            Added(f"{name}.{scalar}", start.kind, start.value, start.learnable)
            for (name, scalar), start in self.scalars.items()
        ]

    def _names(self, node: Node) -> list[str]:
        """The modules that return a node, the innermost first."""
        return [*([node.name] if node.is_module else []), *self._returned.get(node, [])]

    def _place_multipliers(self, branch: Branch, values: Mapping[str, float]) -> None:
        """Place α, β and δ at a branch's layers, c and a at its block."""
        rule = self.method.rule
        factor = 1.0
        if "a" in values and rule.a.learnable:
            self._place_at_block(branch, "skip", values["a"], True)
        else:
            factor = values.get("a", 1.0)
        whole = values.get("c", 1.0) * factor
        if whole != 1.0 or rule.c.set_by_initializer:
            self._place_at_block(branch, "beta", whole, False)
        if "beta" in values:
            beta = (values["beta"] or float(branch.merges_signals)) / factor
            for layer in branch.last_layers if beta != 1.0 or rule.beta.learnable else ():
                self._place_at_end(branch, layer, "beta", beta, rule.beta.learnable)
        if "delta" in values and branch.layers:
            self._place_at_end(branch, branch.last_layers[-1], "delta", values["delta"], rule.delta.learnable)
        alpha = values.get("alpha", 1.0)
        if alpha != 1.0 or ("alpha" in values and rule.alpha.learnable):
            for layer in (*branch.first_layers, *branch.shortcut_layers[:1]):
                self._place_at(layer, "alpha", alpha, rule.alpha.learnable)

    def _place_biases(self, branch: Branch) -> None:
        """Place a bias before every weight layer, and before the activation after a layer without a bias of its own.

        An attention that applies its projections itself has no place for a bias before the last projection; that
        projection has its own.
        """
        for layer in (*branch.layers, *branch.shortcut_layers[:1]):
            if not layer.gate:
                edge = layer in branch.first_layers or layer in branch.shortcut_layers
                self._place_at(layer, "shift", 0.0, True, edge=edge)
        for layer in branch.layers:
            if layer not in branch.last_layers:
                self._place_bias_after(layer)

    def _place_bias_after(self, layer: Layer) -> None:
        if layer.feeds_activation and getattr(self.modules.get(layer.name), "bias", None) is None:
            self._place_at(layer, "delta", 0.0, True, edge=False)

    def _place_at_end(self, branch: Branch, layer: Layer, scalar: ScalarName, value: float, learnable: bool) -> None:
        """Place a scalar at the end of a branch: after its last layer, or after the activation that follows that layer.

        If the method sets the last layer to 0, a multiplier after the activation starts at 0 instead, and the layer
        does not. If no module returns the output of the activation, the multiplier is placed before it: that is the
        same function if the multiplier is positive and the activation a ReLU.
        """
        if not (layer.must_be_nonzero or layer.feeds_activation):
            self._place_at(layer, scalar, value, learnable)
            return
        holder, rectified = self._after_activation(branch)
        if holder is not None:
            starts_at_zero = scalar == "beta" and learnable and getattr(self.method.initializer, "zero_last", False)
            starts_at_zero = starts_at_zero and not branch.merges_signals
            self._add(holder, scalar, 0.0 if starts_at_zero else value, learnable)
        elif scalar == "delta" or (value > 0 and (rectified or (learnable and value == 1.0))):
            self._place_at(layer, scalar, value, learnable)
        else:
            name, own = self._activation_after(layer), "an activation in the model's own code"
            self._refuse(
                layer.name,
                f"{quoted(name) if name else own} lies between it and the sum "
                f"{quoted(branch.name)}, so no module's output is the branch alone",
                "" if name else "make that activation a module of its own",
            )

    def _activation_after(self, layer: Layer) -> str:
        """The name of the first activation that follows a layer; '' if it is not a module."""
        node = next((n for n in self.flow.nodes if any(w.module == layer.name for w in n.weights)), None)
        while node is not None and node.kind != "activation":
            node = node.users[0] if node.users else None
        return node.name if node is not None and node.is_module else ""

    def _after_activation(self, branch: Branch) -> tuple[str | None, bool]:
        """The module, called once, that returns the branch; and whether all activations before the sum are ReLUs."""
        found = self._additions.get((branch.home, branch.addition), [])
        if not found:
            return None, False
        node = found[0].first_operand if branch.branch_first else None
        node = node or next(operand for operand in reversed(found[0].inputs))
        rectified, holder = True, None
        while node.kind != "weight":
            rectified = rectified and (node.kind == "scaling" or node.function in _RELUS)
            holder = next(filter(self._can_hold, self._names(node)), holder)
            if node.kind == "activation" or len(node.inputs) != 1:
                break
            node = node.inputs[0]
        return holder, rectified and node.kind in ("weight", "activation")

    def _can_hold(self, name: str) -> bool:
        """Whether a scalar around a module acts on one branch alone, and the module is not part of a normalizer."""
        if self._calls[name] != 1 or name in self._around_sums or any(is_norm(self.modules[p]) for p in _parents(name)):
            return False
        return unscalable(self.modules[name]) is None

    def _place_at(self, layer: Layer, scalar: ScalarName, value: float, learnable: bool, *, edge: bool = True) -> None:
        """Place a scalar around a layer.

        A layer that is not at an `edge` of the branch must hold it itself; a module around it may not.
        """
        name = self._holder(layer)
        if name is not None and (edge or name == layer.name):
            self._add(name, scalar, value, learnable)

    def _add(self, name: str, scalar: ScalarName, value: float, learnable: bool, kind: str = "") -> None:
        reason = unscalable(self.modules[name])
        if reason is not None:
            kind = type(self.modules[name]).__name__
            self._refuse(name, f"{kind} cannot be given a scalar, {reason}", "")
            return
        before = self.scalars.setdefault((name, scalar), ScalarStart(value, learnable, kind or _IN_WORDS[scalar]))
        if before[:2] != (value, learnable) and (name, scalar) not in self._contested:
            self._contested.add((name, scalar))
            values = f"{scalar} = {before.value:g} and {value:g}"
            self._refuse(name, f"it is shared by sums that need different scalars, {values}", "")

    def _holder(self, layer: Layer) -> str | None:
        """The module whose call uses the layer's weight: itself, or the one around it inside the same branch."""
        if layer.name not in self.modules:
            self._refuse(
                layer.name,
                "the model has no such module, so the plan belongs to a different model",
                "pass its own plan",
            )
            return None
        for name in (layer.name, *_parents(layer.name)):
            if name in self._around_sums:
                break  # a sum is inside: more than the branch goes through this module
            if self._calls[name] and not self._is_lookup(name):  # an embedding's lookup is a different use
                return name
        if any((w.module, w.parameter) == (layer.name, layer.parameter) for n in self.flow.nodes for w in n.weights):
            self._refuse(layer.path, "no module call uses this weight alone, so no scalar can be placed around it", "")
        else:
            self._refuse(layer.path, _UNREACHED, "pass an example that reaches it")
        return None

    def _refuse(self, name: str, why: str, remedy: str) -> None:
        self.obstacles[f"{quoted(name)}: {why}"] = remedy

    def _is_lookup(self, name: str) -> bool:
        return isinstance(self.modules.get(name), nn.Embedding | nn.EmbeddingBag)

    def _place_at_block(self, branch: Branch, scalar: ScalarName, value: float, learnable: bool) -> None:
        """Place a scalar on the whole sum (c) or on its shortcut (a), if a module returns just that."""
        reason = self._no_place_at_block(branch, scalar)
        if reason is not None:
            self._refuse(
                branch.name,
                f"method '{self.method.name}' scales the sum itself, but {reason}",
                "use a method that scales the branch",
            )
            return
        self._add(branch.home, scalar, value, learnable, "multiplier c of a sum" if scalar == "beta" else "")

    def _no_place_at_block(self, branch: Branch, scalar: ScalarName) -> str | None:
        """Return why no module returns the branch's sum, or its ReLU, which commutes with a positive factor.

        None if a module does.
        """
        home = branch.home
        if not home:
            return "it is in the model's own forward pass"
        calls = self.flow.calls.get(home, [])
        if len(calls) > 1:
            return "its block runs more than once"
        at = self._additions.get((home, branch.addition), [])
        if len(at) != 1 or not calls:
            return f"'{home}' has no such addition, so the plan belongs to a different model"
        node, call = at[0], calls[0]

        def inside(other: Node) -> bool:
            return other.home == home or other.home.startswith(f"{home}.")

        if scalar == "skip":
            name = next(iter(signals_of(type(self.modules[home]))), "")
            given = call.given.get(0, call.given.get(name))
            plain = node.function in ADDITIONS or not branch.branch_first  # no sign or factor before the second operand
            if branch.shortcut != "identity" or given not in node.inputs or not plain:
                return "its shortcut is not the first argument of the block"
        users = [user for user in node.users if inside(user)]
        if not users:
            return None if call.out is node else f"'{home}' does not return it, alone or first in a tuple"
        relu = len(node.users) == 1 and users[0].kind == "activation" and call.out is users[0]
        relu = relu and not any(inside(user) for user in users[0].users)
        name = users[0].name
        kind = type(self.modules[name]).__name__ if name in self.modules else name.rpartition(".")[2]
        if scalar == "skip" or not relu or "relu" not in kind.lower().replace("relu6", ""):
            return f"'{home}' computes more after the sum"
        return None


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
