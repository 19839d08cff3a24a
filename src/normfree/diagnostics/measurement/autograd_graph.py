"""Facts from the autograd graph of a forward pass: saturated activations, softmaxes, normalizers and the loss.

A node of the graph keeps the tensors that its derivative needs, so that reading them costs no pass of the model. A
place is the weight layer, or normalizer, that the node reads from.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from normfree.diagnostics.measurement.graph_nodes import (
    CAMEL_CASE,
    NEAR,
    VIEWS,
    dimension,
    first_function,
    function_name,
    group_size,
    normalized_variance,
    place_of,
    saved_tensor,
    walk,
)
from normfree.diagnostics.measurement.moments import MOST_SAMPLES, concatenate, sample_values
from normfree.diagnostics.signals import Fact, GraphFacts
from normfree.graph.observer import ACTIVATIONS
from normfree.nn.model_state import ModelParts, is_sharded

SWAMPED = 1e-3  # variance over epsilon, about the variance that a normalizer then returns
ROOT_NEAR = 8  # nodes in which the precision of the numbers under a root is searched
USUAL_EPSILON = 1e-3
NORMALIZERS = ("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm")
PRODUCTS = ("Bmm", "Baddbmm")
CLAMPS = {"Clamp": ("min", "max"), "Hardtanh": ("min_val", "max_val")}  # and the names of their limits
MASKINGS = ("MaskedFill", "Where", "Add", "Sub")
EPSILON = "epsilon too large"
# Functions that turn infinity into zero, or have it in their result, and the tensor that shows it.
ROOTS = {
    "Rsqrt": "result", "Sqrt": "result", "LinalgVectorNorm": "result", "Std": "result", "Div": "other", "Pow": "self",
}  # fmt: skip
RARE = 0.05  # an output may be the probability of something rarer, and is no shut gate
PADDED = 16  # samples whose padding is looked at
CONDITIONS = (
    "softmax over the wrong axis", "even attention", "mask of the wrong side", "mask of the diagonal",
    "padding attended to", "choice by ties", "overflow", "items overwritten",
)  # fmt: skip
DOUBLED = ("Tanh", "Sigmoid", "Softmax", "Gelu", "Silu")  # functions that nobody applies twice in a row
# Functions that are linear in the signal, or only move, average or normalize it.
LINEAR = frozenset({
    *VIEWS, *NORMALIZERS, "AccumulateGrad", "Add", "Sub", "Addmm", "Mm", "Mv", "Convolution", "Mean",
    "Sum", "Expand", "Cat", "Split", "SplitWithSizes", "Unbind", "Stack", "Mul", "Div", "Neg", "AvgPool1D", "AvgPool2D",
    "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "MeanAdaptive", "NativeDropout", "Embedding", "ConstantPadNd", "Dropout",
    "MaxPool2DWithIndices", "MaxPool2D", "Repeat", "Copy", "CopySlices", "CopyBackwards", "ThnnConv2D", "Linear", "",
})  # fmt: skip


def overwritten_place(parts: ModelParts, roots: Iterable[Tensor]) -> str:
    """The layer behind which a tensor that the backward pass needs was changed in place; '' if there is none."""
    names = {id(p): name.rpartition(".")[0] for name, p in parts.parameters.items()}
    for node in walk([t.grad_fn for t in roots]):
        for attribute in dir(node):
            try:
                getattr(node, attribute) if attribute.startswith("_saved_") else None
            except RuntimeError as error:
                if "inplace" in str(error):
                    return place_of(node, names)
    return ""


class GraphReader:
    """Collects facts node by node; numbers stay on their device until the end, where one transfer fetches all."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self.names = {id(p): name.rpartition(".")[0] for name, p in parts.parameters.items()}
        self.plain: dict[int, int] = {}
        self.batch = 0
        self.functions: Counter[str] = Counter()
        self.custom = False
        self.products = False  # whether a signal is multiplied by another one
        self.reached: set[int] = set()
        self.ends: set[Any] = set()  # the functions that made the outputs
        self.attentions: list[tuple[Any, Tensor]] = []  # with their weights, or numbers that are zero where these are
        self.paddings: list[Tensor] = []  # which words are padding, by table
        self.word_gradients: dict[int, Tensor] = {}  # how large the gradient of each word is, by the address of words
        self.unknown: set[int] = set()  # learned or multiplied tensors that are not parameters of the model
        self.noted: list[tuple[Fact, tuple[Tensor, ...], Any]] = []

    def read(
        self, output: Tensor | None, result: Tensor | None, others: Iterable[Tensor]
    ) -> tuple[GraphFacts, list[Fact]]:
        """Read the graph behind the outputs of a model; `result` is the loss, if there is one."""
        end = None if output is None else output.grad_fn
        self.batch = 0 if output is None or output.dim() < 2 else len(output)
        self.plain = _plain_tensors(self.parts.modules)
        with torch.no_grad():
            roots = [t.grad_fn for t in (output, *others) if t is not None]
            self.ends = set(map(first_function, roots))
            for node in walk(roots):
                self._read_node(node)
            self._read_paddings()
            facts = self._fetch()
        parameters = self.parts.parameters
        maker = first_function(end)
        active = [n for k, _ in self.functions.most_common() if (n := CAMEL_CASE.sub("_", k).lower()) in ACTIVATIONS]
        found = GraphFacts(
            nonlinear=self.products or not self.functions.keys() <= LINEAR,
            activation=active[0] if active else "",
            output=function_name(maker),
            output_place=place_of(maker, self.names),
            loss=_loss_functions(None if result is None else result.grad_fn, end),
            custom=self.custom,
            reached=frozenset(name for name, p in parameters.items() if id(p) in self.reached),
        )
        return found, facts

    def _note(self, kind: str, node: Any, *numbers: Tensor, detail: str = "", near: int = NEAR) -> None:
        """Note a fact about the layer before a node; its value and mean are fetched at the end."""
        self.noted.append((Fact(kind, place_of(node, self.names, near), detail), numbers, node))

    def _fetch(self) -> list[Fact]:
        """Fetch the numbers of all facts, from the input on; conditions that do not hold are left out."""
        tensors = [t.float().reshape(1) for _, numbers, _ in self.noted for t in numbers]
        values = iter(concatenate(tensors).tolist() if tensors else [])
        facts, restored = [], -1
        for fact, numbers, node in self.noted:
            value, mean = ([next(values) for _ in numbers] + [math.nan] * 2)[:2]
            if fact.kind == EPSILON:
                mean = eps = float(fact.detail)
                swamped = bool(fact.place) and value > 1 - SWAMPED  # then the exact variance: 1 - value is rounded
                value = normalized_variance(node) if swamped else 0.0
                made = node._sequence_nr()
                if not 0 < value < SWAMPED * eps:
                    restored = max(restored, made)
                    continue
                if eps <= USUAL_EPSILON and made < restored:  # a later normalizer restores the scale, as of small words
                    continue
            elif fact.kind in CONDITIONS and not value:
                continue
            facts.append(replace(fact, value=value, mean=mean))
        return facts[::-1]  # the walk goes from the output to the input

    def _read_node(self, node: Any) -> None:
        kind = function_name(node)
        if _is_identity(node, kind):
            kind = "Alias"
        self.functions[kind] += 1
        self.products = self.products or (kind in ("Mul", "Div") and _multiplies_signals(node))
        if kind in DOUBLED and function_name(before := first_function(node.next_functions[0][0])) == kind:
            self._note("{function} twice", before, detail=kind.lower())
        if isinstance(node, BackwardCFunction):
            self.custom = True
        elif kind == "AccumulateGrad":
            self.reached.add(id(node.variable))
            if node.variable.is_leaf and id(node.variable) not in self.names:
                self.unknown.add(id(node.variable))
        elif kind == "Mul":
            self._read_mask(node)
        elif kind in ("Mm", "Addmm", "Bmm", "Convolution", "Linear"):
            self._read_product(node, kind)
        elif kind in ("Tanh", "Sigmoid"):
            if (result := saved_tensor(node, "result")) is not None:
                y = sample_values(result)
                slope = 1 - y.square() if kind == "Tanh" else 4 * y * (1 - y)
                least = RARE if kind == "Sigmoid" and node in self.ends else -1.0
                self._note("openness", node, slope.square().mean(), y.mean().clamp_min(least), detail=kind.lower())
        elif kind == "Softmax":
            if (result := saved_tensor(node, "result")) is not None:
                self._read_softmax(node, result)
        elif kind in CLAMPS:
            if (x := saved_tensor(node, "self")) is not None:
                low, high = (getattr(node, f"_saved_{name}", None) for name in CLAMPS[kind])
                y = sample_values(x)
                inside = (y > (-math.inf if low is None else low)) & (y < (math.inf if high is None else high))
                self._note("openness", node, inside.float().mean(), y.mean(), detail=kind.lower())
        elif kind.startswith("ScaledDotProduct"):
            q, k = saved_tensor(node, "query"), saved_tensor(node, "key")
            if q is not None and k is not None and q.dim() == 4 and k.shape[-2] >= 4 and q.shape[1] == k.shape[1]:
                scale = getattr(node, "_saved_scale", None) or q.shape[-1] ** -0.5
                logits = q[:1, :, :16].float() @ k[:1].float().transpose(-1, -2) * scale
                self._note("openness", node, _attention_openness(logits.softmax(-1)), detail="attention")
            masks = (saved_tensor(node, name) for name in ("attn_mask", "attn_bias"))
            for mask in (m for m in masks if m is not None and m.is_floating_point()):
                self.attentions.append((node, mask.exp()))
                self._read_sides(node, (mask[:1] if mask.dim() > 2 else mask).float().exp())
        elif kind in NORMALIZERS:
            self._read_normalizer(node)
        elif kind == "IndexPut" and not node._saved_accumulate:
            self._read_assignment(node)
        elif kind in ("Max", "Topk"):
            self._read_choice(node, kind)
        elif kind in ROOTS:
            self._read_root(node, kind)
        elif kind == "Embedding":
            words, padding = saved_tensor(node, "indices"), node._saved_padding_idx
            if words is not None and words.dim() == 2:
                node.register_prehook(partial(self._add_word_gradient, words.data_ptr()))
                if 0 <= padding < 2**63:
                    self.paddings.append(words == padding)

    def _add_word_gradient(self, words: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the size of the gradient that each word gets by any table, while the backward pass runs."""
        if (gradient := gradients[0]) is not None:
            size = gradient.detach().abs().amax(-1)
            self.word_gradients[words] = size + self.word_gradients.get(words, 0)

    def _read_normalizer(self, node: Any) -> None:
        """Look for groups of one or two values, and note epsilon over the variance plus epsilon."""
        rate = saved_tensor(node, "result2")
        if group_size(node) in (1, 2):
            self._note(f"normalizer of {'one value' if group_size(node) == 1 else 'two values'}", node, near=8)
        eps = getattr(node, "_saved_eps", None)
        eps = eps or getattr(self.parts.modules.get(place_of(node, self.names, 8)), "eps", None)
        if rate is not None and eps:
            self._note(EPSILON, node, sample_values(rate).square().mean() * eps, detail=repr(float(eps)), near=8)

    def _read_assignment(self, node: Any) -> None:
        """Note the share of the items that others overwrite, because their indices are the same."""
        indices = [i for i in node._saved_indices if i is not None]
        if indices and all(i.dtype == torch.long for i in indices):
            rows = torch.stack(torch.broadcast_tensors(*indices)).flatten(1)
            self._note("items overwritten", node, torch.tensor(1 - rows.unique(dim=1).shape[1] / max(1, rows.shape[1])))

    def _read_choice(self, node: Any, kind: str) -> None:
        """Look for a choice among the outputs of a layer of zeros, directly or behind a softmax."""
        layer = first_function(node.next_functions[0][0])
        if function_name(layer) == "Softmax":
            layer = first_function(layer.next_functions[0][0])
        elif kind == "Max":
            return
        inputs = [] if layer is None or node in self.ends else [first_function(f) for f, _ in layer.next_functions]
        weights = [f.variable for f in inputs if id(getattr(f, "variable", None)) in self.names]
        if weights and not any(map(is_sharded, weights)):
            self._note("choice by ties", node, ~torch.stack([w.any() for w in weights]).any())

    def _read_root(self, node: Any, kind: str) -> None:
        """Look for an overflow of float16 that a root or a division hides: 1 / √∞ = 0."""
        value = saved_tensor(node, ROOTS[kind])
        near = [m.dtype for n in walk([node], most=ROOT_NEAR) for m in getattr(n, "_input_metadata", ())]
        if value is not None and value.numel() > 1 and torch.float16 in near:
            values = sample_values(value)
            self._note("overflow", node, (values == (0 if kind == "Rsqrt" else math.inf)).any())

    def _read_paddings(self) -> None:
        """Look for attentions that give all of their weight to padding."""
        for node, weights in self.attentions:
            wrong = []
            for padding in self.paddings:
                count, length = padding.shape
                if weights.shape[-1] == length and len(weights) % count == 0:
                    few = padding[:PADDED]
                    used = weights[: len(few) * (len(weights) // count)].reshape(len(few), -1, length).amax(1) > 0
                    both = few.any(1, keepdim=True) & ~few.all(1, keepdim=True)
                    wrong.append((used & few & both).any() & ~(used & ~few & both).any())
            if wrong:
                self._note("padding attended to", node, torch.stack(wrong).all())

    def _read_mask(self, node: Any) -> None:
        """Note the share of zeros of a factor that is zero or 1 / (1 - p), as dropout's is."""
        for (source, _), name in zip(node.next_functions, ("self", "other"), strict=False):
            mask = None if source is not None else saved_tensor(node, name)
            if mask is not None and mask.numel() >= 64:
                y = sample_values(mask)
                top, zero = y.max(), (y == 0).float().mean()
                is_dropout = ((y == 0) | (y == top)).all() & ((top * (1 - zero) - 1).abs() < 0.5) & (top > 1)
                self._note("dropout", node, zero * is_dropout)

    def _read_product(self, node: Any, kind: str) -> None:
        """Look for factors that are plain tensors of a module, and for attention weights that do not add up to 1."""
        for name in ("self", "mat2", "weight") if self.plain else ():
            factor = saved_tensor(node, name)
            if factor is not None and factor.data_ptr() in self.plain:
                self.unknown.add(self.plain[factor.data_ptr()])
        if kind != "Bmm":
            self._read_input(node, kind)
            return
        for (source, _), name, dim in zip(node.next_functions, ("self", "mat2"), (-1, -2), strict=True):
            softmax = first_function(source, (*VIEWS, "Expand"))
            weights = saved_tensor(node, name) if function_name(softmax) == "Softmax" else None
            if weights is not None and weights.shape[dim] > 1:
                if _is_cut_along_its_axis(source, softmax):  # the column of a sink was dropped
                    continue
                total = weights[:8].float().sum(dim)
                self._note("softmax over the wrong axis", softmax, ((total - 1).abs() > 0.01).any())

    def _read_input(self, node: Any, kind: str) -> None:
        """Look for a layer that reads the output of another one several times, concatenated along the features."""
        inputs = list(node.next_functions)
        source, _ = inputs.pop(1 if kind == "Addmm" else 0)
        cat = first_function(source, ("View", "UnsafeView", "Reshape", "Clone", "ToCopy", "Alias"))
        if function_name(cat) != "Cat":
            return
        read = [f for f in cat.next_functions if f[0] is not None]
        dims = len(cat._input_metadata[0].shape)
        if dimension(cat._saved_dim) in ((1,) if kind == "Convolution" else (-1, dims - 1)):
            again = next((f for f, number in read if read.count((f, number)) > 1), None)
            place = next((p for f, _ in inputs if (p := place_of(first_function(f), self.names, 1))), "")
            if place and again is not None and place_of(again, self.names):
                self._note("concatenated with itself", node)
                self.noted[-1] = replace(self.noted[-1][0], place=place), (), node

    def _read_softmax(self, node: Any, result: Tensor) -> None:
        """Look for a wrong axis or mask, and note how evenly an attention weighs the positions."""
        before = first_function(node.next_functions[0][0])
        dim = dimension(getattr(node, "_saved_dim", -1))
        size = result.shape[dim] if result.dim() else 1
        from_layer = before is not None and function_name(before) not in PRODUCTS and _reads_parameter(before)
        if size == 1 and from_layer and place_of(node, self.names):
            self._note("softmax of one value", node)
        if dim % max(result.dim(), 1) == 0 and result.dim() > 2 and len(result) == self.batch > 1:
            if result.shape[1] != self.batch:  # else it may be a sequence with the positions first
                self._note("softmax over the batch", node)
        elif size >= 4 and function_name(before) in (*PRODUCTS, "Div", "Mul", *MASKINGS):
            last = result.movedim(dim, -1)
            if last.dim() > 2:
                self.attentions.append((node, last))
            some = last[: max(1, MOST_SAMPLES * 4 // max(1, last[0].numel()))].float()
            self._note("openness", node, _attention_openness(some), detail="attention")
            self._note("even attention", node, (some == some[..., :1]).all())
            if some.dim() > 2 and function_name(before) in (*MASKINGS, "Baddbmm"):
                self._read_sides(node, some)

    def _read_sides(self, node: Any, weights: Tensor) -> None:
        """Look at a mask that leaves each position the later ones only, or itself only."""
        if weights.shape[-1] == weights.shape[-2] >= 4:
            inner = weights[..., 1:-1, :]
            past, future = inner.tril().sum(), inner.triu(2).sum()
            self._note("mask of the wrong side", node, (past == 0) & (future > 0))
            own = weights.diagonal(dim1=-2, dim2=-1)
            self._note("mask of the diagonal", node, (weights.sum() == own.sum()) & (own > 0).all())


def _is_identity(node: Any, kind: str) -> bool:
    """Whether an activation passes everything on, as nn.LeakyReLU(True) does, whose argument is the slope."""
    if kind == "PreluKernel":
        slope = saved_tensor(node, "weight")
        return slope is not None and bool((slope == 1).all())
    return kind == "LeakyRelu" and node._saved_negative_slope == 1


def _multiplies_signals(node: Any) -> bool:
    """Whether both factors have a gradient, and none is a parameter."""
    factors = [first_function(f, (*VIEWS, "Expand")) for f, _ in node.next_functions]
    return len(factors) == 2 and all(f is not None and function_name(f) != "AccumulateGrad" for f in factors)


def _is_cut_along_its_axis(source: Any, softmax: Any) -> bool:
    """Whether a part of a softmax is left out along the axis that it runs over, so that the rest adds up to less."""
    path = []
    while source is not softmax:
        path.append(source)
        source = source.next_functions[0][0]
    for view in reversed(path):
        if function_name(view) == "Slice":
            if (view._saved_dim - softmax._saved_dim) % len(softmax._input_metadata[0].shape) == 0:
                return True
        elif function_name(view) not in ("Clone", "ToCopy", "Alias"):
            return False
    return False


def _attention_openness(weights: Tensor) -> Tensor:
    """A softmax passes 1 - Σp² of the gradient, which is largest if all weights are equal."""
    return ((1 - weights.square().sum(-1)) / (1 - 1 / weights.shape[-1])).mean().square()


def _plain_tensors(modules: Mapping[str, nn.Module]) -> dict[int, int]:
    """The matrices that are plain attributes of modules, by the address of their values."""
    held = [t for m in modules.values() for t in vars(m).values() if isinstance(t, Tensor)]
    return {t.data_ptr(): id(t) for t in held if t.dim() >= 2 and t.is_floating_point() and not t.requires_grad}


def _reads_parameter(node: Any) -> bool:
    """Whether a node multiplies by a parameter, as a weight layer does."""
    inputs = [first_function(f) for f, _ in node.next_functions]
    return any(function_name(f) == "AccumulateGrad" for f in inputs)


def _loss_functions(start: Any, end: Any) -> tuple[str, ...]:
    """The functions from the loss to the output, the loss first."""
    found: list[str] = []
    waiting, seen = deque([start]), {end}
    while waiting and len(found) < NEAR and end is not None:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(function_name(node))
        waiting.extend(f for f, _ in node.next_functions)
    return tuple(found) if start is not end else ()
