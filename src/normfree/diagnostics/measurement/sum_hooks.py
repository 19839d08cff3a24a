"""Statistics at residual sums, or at weight layers without sums, forward and backward, taken while a model runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.diagnostics.measurement.graph_nodes import function_name, nodes_read, walk
from normfree.diagnostics.measurement.moments import MomentStore, channels_after, concatenate, variations
from normfree.diagnostics.signals import Stats, SumSignal
from normfree.graph.observer import MATRIX_PRODUCTS, FunctionCall, Observer, operands_of
from normfree.nn.model_state import full_tensor
from normfree.nn.normalizers import is_norm
from normfree.nn.residual import Residual
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import Branch, Layer, Position, ResidualPlan

SumPart = tuple[str, str]  # the name of a branch, and which of its tensors
MISSING = Stats(math.nan, math.nan, math.nan)
ZERO = Stats(0.0, 0.0, 0.0)
RECURRENT_LAYERS = (nn.RNNBase, nn.RNNCellBase)


class NoLayersError(ValueError):
    """Nothing was measured: the forward pass adds nothing and calls no module with weights."""


class SumObserver(Observer):
    """Measures the operands and the results of the additions that a plan names, or else the outputs of its layers.

    Only modules that contain such an addition get hooks, and functions are observed only in their own forward
    passes, not inside their children: observing costs time.
    """

    def __init__(self, modules: Mapping[str, nn.Module], plan: ResidualPlan, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.plan = plan
        self.weights = weights  # the names of the parameters by their identities; empty if layers are modules
        self.modules = modules
        self.half = False  # whether float16 was seen
        self._sums = {(b.home, b.addition): b for b in plan.branches}
        self._points = list(plan.branches)
        self.labels = place_names(plan)
        self.homes = None if weights else {h for h, _ in self._sums if not isinstance(self.modules[h], Residual)}
        self.moments: MomentStore[SumPart] = MomentStore()
        self._awaited: set[SumPart] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._variations: dict[str, Tensor] = {}
        self._normalized: set[str] = set()
        self._nodes: dict[str, Any] = {}  # the functions that made what is measured
        self._output: Any = None
        self._without_gradient: list[Branch] = []
        self._layer_calls: Counter[str] = Counter()
        self._trained = _trained_modules(modules)
        self._latest_layer: list[tuple[Branch, Tensor]] = []
        self._hooked_parts: dict[SumPart, list[SumPart]] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Measure every pass of the model inside."""
        try:
            self._hook_residuals()
            if not self.plan.branches and not self.weights:
                self._hook_layers()
            with self.following(self._followed()):
                yield
        finally:
            self.moments.recent.clear()  # tensors hold hooks, which hold this
            self._nodes.clear()
            self._output = None
            self._hooked_parts.clear()
            self._latest_layer.clear()
            self.remove_hooks()

    def _hook_residuals(self) -> None:
        """Hook our own residual modules, whose submodules return the operands and which return the sum."""

        def hook(part: str, branches: list[Branch]) -> Callable[..., None]:
            calls = iter(branches)

            def measure(_m: nn.Module, _a: Any, out: Any) -> None:
                if branch := next(calls, None):
                    self._measure(branch, part, out)

            return measure

        by_home: dict[str, list[Branch]] = {}
        for b in self.plan.branches:
            by_home.setdefault(b.home, []).append(b)
        for home, branches in by_home.items():
            module = self.modules[home]
            if isinstance(module, Residual):
                for part, source in (("shortcut", module.a), ("branch", module.beta), ("sum", module)):
                    self.add_hook(source._forward_hooks, hook(part, branches))

    def _hook_layers(self) -> None:
        """Hook the hidden weight layers of a network without sums; each call of a layer is a point of its own.

        A layer right before a normalizer is measured behind it, because the normalizer undoes the layer's scale.
        """
        hidden = {layer.name: layer for layer in (*self.plan.stem, *self.plan.body) if layer.name and not layer.gate}
        hidden |= {name: Layer(name) for name, m in self.modules.items() if isinstance(m, RECURRENT_LAYERS)}
        last = {layer.name for layer in self.plan.classifier}
        if not hidden and not last:  # no layer reads the input
            tables = {n: m for n, m in self.modules.items() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
            filled = [name for name, m in tables.items() if bool(full_tensor(m.weight.detach()).any())]
            wide = [name for name, m in tables.items() if m.embedding_dim > 1]  # the others hold biases
            names = [n for n, m in self.modules.items() if isinstance(m, WEIGHT_LAYERS)] or filled or wide or tables
            hidden = {name: Layer(name) for name in names}
        layers = {name: layer for name, layer in hidden.items() if name in self.modules and name not in last}
        latest = self._latest_layer

        def behind_normalizer(_m: nn.Module, args: Any, out: Any) -> None:
            if latest and args and args[0] is latest[0][1]:
                point, _ = latest.pop()
                part = (point.name, "sum_gradient")
                if part in self._hooked_parts:
                    self._hooked_parts[part].remove(part)
                self._measure(point, "sum", out)
                self._normalized.add(point.name)

        def hook(name: str) -> Callable[..., None]:
            return lambda module, _args, out: self._measure_layer(layers[name], module, out)

        for name in layers:
            self.add_hook(self.modules[name]._forward_hooks, hook(name))
        for name in () if layers else sorted(last & self.modules.keys()):  # the weights before it are in no module
            layers[name] = Layer(name)
            measure = hook(name)
            pre_hooks = self.modules[name]._forward_pre_hooks
            self.add_hook(pre_hooks, lambda m, args, measure=measure: measure(m, args, args[0] if args else None))
        for module in self.modules.values():
            if is_norm(module):
                self.add_hook(module._forward_hooks, behind_normalizer)

    def _measure_layer(self, layer: Layer, module: nn.Module | None, out: Any) -> None:
        """Measure a call of a weight layer."""
        tensor = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
            return  # a vector, such as the weights of a hypernetwork, belongs to no sample
        name = layer.name
        self._layer_calls[name] += 1
        number = self._layer_calls[name]
        place = Position(len(self._points) + 1, 0, 1, len(self._points) + 1, 0)
        point = Branch(f"{name}#{number}", place, (layer,))
        self._points.append(point)
        self.labels[point.name] = point.name if number > 1 else name
        if number == 2:
            self.labels[f"{name}#1"] = f"{name}#1"
        self._measure(point, "sum", tensor)
        for state in tree_leaves(out)[1:2] if isinstance(module, nn.RNNBase) and tensor.requires_grad else ():
            state.register_hook(partial(self._measure_state, (point.name, "sum_gradient")))
        self._latest_layer[:] = [(point, tensor)]

    def _measure_function(self, call: FunctionCall, out: Any) -> None:
        """Measure a product of the signal with weights; its place is the module of the code, or the parameter."""
        factors = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1][:2]
        made = [self._parameter_of(t) for t in factors]
        if len(made) == 2 and bool(made[0]) != bool(made[1]):
            name = self.home or made[0] or made[1]
            self._measure_layer(Layer(name), None, out)

    def _parameter_of(self, tensor: Tensor) -> str:
        """The parameter that a tensor is, or was made from without the signal; '' for a signal."""
        if tensor.grad_fn is None:
            return self.weights.get(id(tensor), "(model)")
        nodes = list(walk([tensor.grad_fn]))
        leaves = [id(node.variable) for node in nodes if hasattr(node, "variable")]
        if any(function_name(node) == "Embedding" for node in nodes) or not self.weights.keys() >= set(leaves):
            return ""
        return self.weights[leaves[0]] if leaves else "(model)"

    def _followed(self) -> dict[str, nn.Module]:
        """The modules to track: homes of sums that are not ours, and everything inside them."""
        if self.weights:
            return {name: module for name, module in self.modules.items() if name}
        if not self.homes:
            return {}
        names = {id(m): name for name, m in self.modules.items()}  # a shared module has one name, as in the plan
        inside = (m for home in self.homes for m in self.modules[home].modules())
        return {names[id(m)]: m for m in inside}

    def on_function(self, call: FunctionCall) -> Any:
        """Measure an addition of the plan, or a product with weights that are not the layer of a module."""
        if self.weights and call.name in MATRIX_PRODUCTS and not self.plan.branches:
            out = call.run()
            self._measure_function(call, out)
            return out
        branch = self._sums.get((self.home, call.addition)) if call.addition >= 0 else None
        operands = () if branch is None else operands_of(call.args, call.kwargs)
        if branch is None or len(operands) < 2:
            return call.run()
        # Before the addition, which may be in place: a hook that is set now sees the gradient of the old value.
        first, second = operands if branch.branch_first else operands[::-1]
        self._measure(branch, "branch", first)
        self._measure(branch, "shortcut", second)
        out = call.run()
        self._measure(branch, "sum", out)
        return out

    def _measure(self, branch: Branch, part: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        self.half = self.half or tensor.dtype is torch.float16
        if part == "sum":
            self._shapes[branch.name] = tuple(tensor.shape)
            self._variations[branch.name] = variations(tensor)
            self._nodes[branch.name] = tensor.grad_fn
        last = self.modules.get(branch.last_layers[-1].name) if branch.layers else None
        channels = channels_after(last, tensor)
        if tensor.dim() > 1 and tensor.numel() == tensor.shape[channels]:
            raise ValueError(
                f"expected at least two values per channel at '{self.labels[branch.name]}', got one "
                f"(shape {tuple(tensor.shape)}), which has no variance; use a larger batch"
            )
        measured = self.moments.measure(tensor, channels)
        self.moments.store((branch.name, part), measured.moments)
        gradient_part = (branch.name, part + "_gradient")
        if not tensor.requires_grad:
            if part == "sum":
                self._without_gradient += [branch] if self.plan.branches else []
                self._awaited.add(gradient_part)  # a gradient that never arrives counts as 0
            return
        self._awaited.add(gradient_part)
        if measured.tensor is tensor and measured.gradients:
            measured.gradients.append(gradient_part)  # one hook for a block's output and the next one's shortcut
            return
        parts = measured.gradients if measured.tensor is tensor else []
        parts.append(gradient_part)
        self._hooked_parts[gradient_part] = parts

        def backward(gradient: Tensor) -> None:
            found = self.moments.measure(gradient, channels).moments
            for part in parts:
                self.moments.store(part, found)

        tensor.register_hook(backward)

    def _measure_state(self, part: SumPart, gradient: Tensor) -> None:
        """Measure the gradient of the final state of an RNN, (layers, samples, units), if only that is read."""
        if part not in self.moments and gradient.dim() == 3:
            self.moments.store(part, self.moments.measure(gradient.transpose(0, 1), 2).moments)

    def are_zero(self, branches: Iterable[str]) -> bool:
        """Whether the output of each of these branches was exactly zero."""
        measured = [self.moments.get((name, "branch")) for name in branches]
        return all(m is not None and not m.mean.any() and not m.variance.any() for m in measured)

    def leave_out_head(self, output: Tensor | None) -> None:
        """Leave out the last layer of a network without sums if it returns the output: the head is judged apart."""
        self._output = None if output is None else output.grad_fn
        if len(self._points) > 1 and self._latest_layer and self._latest_layer[0][1] is output:
            self._points.remove(self._latest_layer[0][0])

    def require_points(self) -> None:
        """Refuse a forward pass in which nothing was measured, or no gradient can reach a branch that could learn.

        A sum without a gradient is left out if its layers are frozen, or if they take another step with a gradient, as
        at a fixed point.
        """
        left_out = {b.name for b in self._without_gradient}
        kept = [b for b in self._points if b.name not in left_out]
        learning = {layer.name for b in kept for layer in b.layers}
        for b in self._without_gradient:
            names = [layer.name for layer in b.layers if layer.name in self.modules]
            if not names or not (kept or self._trained.intersection(names)):
                continue
            if not learning.issuperset(names) and self._trained.intersection(names):
                raise ValueError(
                    f"expected a gradient at '{self.labels[b.name]}', got a forward pass that keeps none; turn "
                    "gradient checkpointing off, and take torch.no_grad out of the forward pass"
                )
            self._points.remove(b)
            self.plan = replace(self.plan, branches=tuple(self._points))
        self._reads: dict[str, tuple[str, ...]] = {}
        if not self.plan.branches:
            self._reads = nodes_read({b.name: self._nodes[b.name] for b in self._points}, self._output)
        hidden = [layer for layer in (*self.plan.stem, *self.plan.body) if not layer.gate]
        unseen = len(hidden) - sum(self._layer_calls[layer.name] > 0 for layer in hidden)
        recurrent = any(isinstance(m, RECURRENT_LAYERS) for m in self.modules.values())
        functions = not (self.plan.branches or self.weights or recurrent) and unseen > max(1, len(self._points))
        if not self._points or functions:
            raise NoLayersError(
                "expected a network with residual sums or weight layers, got a forward pass through none; write its "
                "layers as modules (nn.Linear, nn.Conv2d, nn.LSTM) and call them"
            )

    def result(self, alive: set[str]) -> tuple[SumSignal, ...]:
        """The signal at every sum of the plan; `alive` names the branches that learn."""
        unseen = [self.labels[b.name] for b in self._points if (b.name, "sum") not in self.moments]
        if unseen:
            raise ValueError(
                f"expected a forward pass through every residual sum of the plan, got none through {unseen[0]} "
                f"({len(unseen)} of {len(self._points)}); use evaluation mode (--eval) where blocks are "
                "dropped at random, or in Python, pass a plan of the executed blocks"
            )
        measured = self.moments.stats()

        def stats(branch: Branch, part: str) -> Stats:
            return measured.get((branch.name, part), ZERO if (branch.name, part) in self._awaited else MISSING)

        names = [part + kind for kind in ("", "_gradient") for part in ("sum", "branch", "shortcut")]
        compared = concatenate([self._variations[b.name] for b in self._points]).reshape(-1, 2).tolist()
        return tuple(
            SumSignal(
                name=self.labels[b.name],
                stage=b.position.stage,
                transition=b.position.transition,
                learns=b.name in alive or not b.layers or not self.plan.branches,
                around=None if b.outer_branch is None else self.labels.get(b.outer_branch),
                layer=not self.plan.branches,
                reads=tuple(self.labels[name] for name in self._reads.get(b.name, ())),
                read_by_output=b.name in self._reads.get("", ()),
                shape=self._shapes[b.name],
                normalized=b.name in self._normalized,
                variation=over_samples,
                token_variation=over_tokens,
                **{name: stats(b, name) for name in names},
            )
            for b, (over_samples, over_tokens) in zip(self._points, compared, strict=True)
        )


def _trained_modules(modules: Mapping[str, nn.Module]) -> set[str]:
    """The names of the modules that hold a parameter with a gradient, or a module with one."""
    found: set[str] = set()
    for name, module in modules.items():
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            while name and name not in found:
                found.add(name)
                name = name.rpartition(".")[0]
    return found


def place_names(plan: ResidualPlan) -> dict[str, str]:
    """Name each branch of a plan after a module that the user wrote, by the branch's name in the plan.

    A module with one sum gives its name. If the sum stands in a loop over blocks, or a module has several sums, the
    name is that of the outermost module that holds the branch and no other branch, or that of the branch's layers.
    A branch that is called several times is named by its module and the number of the call, and a branch without
    layers by the number of its addition.

    >>> from normfree.plan import Layer, Position
    >>> place = Position(1, 2, 1, 1, 2)
    >>> plan = ResidualPlan(tuple(Branch(f"#{i + 1}", place, (Layer(f"blocks.{i}.mlp.1"),)) for i in range(2)))
    >>> place_names(plan)
    {'#1': 'blocks.0', '#2': 'blocks.1'}
    """
    homes = Counter(b.home for b in plan.branches)
    inside: Counter[str] = Counter()
    for b in plan.branches:
        inside.update({prefix for layer in b.layers for prefix in _prefixes(layer.name)})
    names: dict[str, str] = {}
    for b in plan.branches:
        plain = b.name if b.name.partition("#")[0] else f"(model){b.name}"
        alone = homes[b.home] == 1 and b.home
        names[b.name] = plain if alone else _name_by_layers(b, inside) or plain
    counts = Counter(names.values())
    return {
        key: name if counts[name] == 1 or key == name else f"{name}#{key.partition('#')[2]}"
        for key, name in names.items()
    }


def _prefixes(name: str) -> list[str]:
    """The module names from the outermost to the module itself."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _name_by_layers(branch: Branch, inside: Mapping[str, int]) -> str:
    """The outermost module below the sum's home that holds all layers of this branch and of no other; '' if none."""
    layers = list(dict.fromkeys(layer.name for layer in branch.layers))
    if not layers:
        return ""
    shared = [p for p in _prefixes(layers[0]) if all(f"{name}.".startswith(f"{p}.") for name in layers)]
    own = [p for p in shared if inside[p] == 1 and len(p) > len(branch.home)]
    if own:
        return own[0]
    if any(inside[name] > 1 for name in layers):  # the block is called several times
        times = inside[layers[0]]
        same = [p for p in shared if inside[p] == times]
        return same[0] if same and same[0] != branch.home else ""
    names = ", ".join(name.removeprefix(f"{shared[-1]}." if shared else "") for name in layers)
    return f"{shared[-1]} ({names})" if shared and len(layers) > 1 else names
