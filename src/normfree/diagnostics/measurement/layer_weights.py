"""Weight layers in the backward pass: norms of weights and gradients, dead units, equal filters, learning branches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normfree.diagnostics.measurement.moments import HALF, concatenate, norms
from normfree.diagnostics.signals import NUMBERS, Fact, LayerSignal
from normfree.nn.model_state import ModelParts, full_tensor, is_sharded
from normfree.nn.normalizers import is_norm
from normfree.nn.scalars import ScalarBias
from normfree.plan import Branch, Layer, ResidualPlan
from normfree.report.tables import Column, Table, compact

BYTES_AT_ONCE = 2**28  # of gradients that are reduced together; a reduction costs about 0.3 ms on a GPU
EQUAL = 1e-4  # relative difference of gradients that is rounding
COMPARED = 8  # numbers of a filter that are compared first: filters that differ in these are not equal


class LayerWeights:
    """The parameters behind the weight layers of a plan, each layer once; tied weights have the name of the first.

    Attributes:
        names: For each layer, the names of the parameters that compose its weight.
        outputs: For each parameter that is a whole weight, the dimension of its outputs.
    """

    def __init__(self, parts: ModelParts, plan: ResidualPlan) -> None:
        self.parts = parts
        self.frozen = {name for name, p in parts.parameters.items() if not p.requires_grad}
        self.names: dict[str, list[str]] = {}
        self.outputs: dict[str, int] = {}
        first_names = {id(p): name for name, p in parts.parameters.items()}
        for layer in plan.layers():
            name = layer.name if layer.parameter == "weight" else layer.path
            if name in self.names:
                continue
            module = parts.modules[layer.name]
            plain = module._parameters.get(layer.parameter)
            composed = [plain] if plain is not None else [p for n, p in module.named_parameters() if n != "bias"]
            self.names[name] = [first_names[id(p)] for p in composed]
            if plain is not None and plain.dim() >= 2 and not layer.tied:
                self.outputs[self.names[name][0]] = _output_dimension(module, layer)

        self.alike = [n for n in plan.other_parameters if n in parts.parameters and _holds_equal_vectors(parts, n)]
        self.outputs |= {name: parts.parameters[name].dim() - 2 for name in self.alike}

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Let every parameter require a gradient, but for sharded ones, of which FSDP2 keeps a copy."""
        floats = (p for p in self.parts.parameters.values() if p.is_floating_point() or p.is_complex())
        frozen = [p for p in floats if not p.requires_grad and not is_sharded(p)]
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)

    @contextmanager
    def gradient_norms(self) -> Iterator[dict[str, Tensor]]:
        """Collect the norm of each parameter's gradient by the end of the context, and discard the gradients.

        A whole weight has one norm for each of its outputs. Gradients arrive roughly in the reverse order of the
        parameters. They are reduced at the end, and for a large model also every `BYTES_AT_ONCE` on the way, which
        bounds the memory that they take.
        """
        parameters = self.parts.parameters
        found: dict[str, Tensor] = {}
        handles = []

        def reduce_arrived(names: Iterable[str]) -> None:
            arrived = {name: g for name in names if (g := parameters[name].grad) is not None}
            found.update(norms({name: g for name, g in arrived.items() if name not in self.outputs}))
            found.update(
                {name: _norms_by_output(g, self.outputs[name]) for name, g in arrived.items() if name in self.outputs}
            )
            for name in arrived:
                parameters[name].grad = None

        try:
            for names, last in _portions(parameters):
                handles.append(last.register_post_accumulate_grad_hook(lambda _p, names=names: reduce_arrived(names)))
            yield found
            reduce_arrived(parameters)
        finally:
            for handle in handles:
                handle.remove()

    def signals(self, gradients: Mapping[str, Tensor]) -> tuple[tuple[LayerSignal, ...], dict[str, float]]:
        """The weight layers in the order of the plan, and the norm of every parameter's gradient as a number."""
        parameters = self.parts.parameters
        weights = norms({name: parameters[name] for names in self.names.values() for name in names})
        starts = {name: _filter_starts(parameters[name], dim) for name, dim in self.outputs.items()}
        tensors = [*weights.values(), *gradients.values(), *starts.values()]
        values = concatenate([full_tensor(t.detach()).flatten() for t in tensors])  # one wait for the device
        pieces = np.split(values, np.cumsum([t.numel() for t in tensors])[:-1])
        sizes = dict(zip(weights, (float(p[0]) for p in pieces), strict=False))
        rows = dict(zip(gradients, pieces[len(weights) :], strict=False))
        slopes = {name: float(np.linalg.norm(piece)) for name, piece in rows.items()}
        filters = dict(zip(starts, pieces[len(weights) + len(gradients) :], strict=True))
        found = []
        for layer, names in self.names.items():
            if not names:
                continue
            norm = math.hypot(*(sizes[n] for n in names))
            slope = math.hypot(*(slopes.get(n, 0.0) for n in names))
            units, dead, equal = 0, 0.0, 0.0
            if (name := names[0]) in self.outputs:
                units = parameters[name].shape[self.outputs[name]]
                dead = float(np.mean(rows[name] == 0)) if name in rows and slope > 0 else 0.0
                equal = self._equal_filters(name, filters[name].reshape(units, -1))
            found.append(LayerSignal(layer, norm, slope, units, dead, equal, names[0] in self.frozen))
        self.alike = [n for n in self.alike if n in rows and rows[n].min() > (1 - EQUAL) * rows[n].max() > 0]
        return tuple(found), slopes

    def copies(self, gradients: Mapping[str, float]) -> Iterator[Fact]:
        """The weights of a list that are equal, and get gradients of equal norms, so that they may stay equal.

        Copies in series get different gradients, and so do parallel ones that read different tensors.
        """
        parameters = self.parts.parameters
        alike: dict[Any, list[str]] = {}
        for name, norm in gradients.items():
            if norm > 0 and name not in self.frozen and NUMBERS.search(name) and parameters[name].dim() > 1:
                alike.setdefault((NUMBERS.sub("", name), tuple(parameters[name].shape)), []).append(name)
        for names in alike.values():
            close = [n for n in names if math.isclose(gradients[n], gradients[names[0]], rel_tol=EQUAL)]
            weights = [parameters[n].detach() for n in close]
            if len(close) > 1 and not is_sharded(weights[0]) and bool(weights[0].any()):
                same = [n for n, w in zip(close, weights, strict=True) if torch.equal(w, weights[0])]
                modules = [n.rpartition(".")[0] for n in same] if len(same) > 1 else []
                yield from (Fact("copies of one module", m, ", ".join(same)) for m in modules)
        yield from (Fact("equal vectors", name) for name in self.alike)

    def gradient_facts(self, gradients: Mapping[str, float]) -> dict[str, Any]:
        """Whether only frozen parameters get a gradient, and who would learn; `gradients` are their norms."""
        moving = {name for name, norm in gradients.items() if norm > 0}
        learning = (name for name in self.parts.parameters if name not in self.frozen)
        return {
            "only_frozen_used": bool(moving) and moving <= self.frozen,
            "unreached": tuple(dict.fromkeys(name.rpartition(".")[0] for name in learning)),
        }

    def modules_without_gradient(self, learning: set[str], classes: int) -> tuple[list[str], set[str]]:
        """The outermost modules with weights that could learn, none of which has a part in the loss or an output.

        Args:
            learning: The names of the parameters that the loss, or an output, depends on.
            classes: The number of outputs. A module with as many may be another head; these are returned again.
        """
        parts = self.parts
        used = {prefix for name in learning for prefix in _above(name)}
        filled = {prefix for name, p in parts.parameters.items() if p.requires_grad for prefix in _above(name)}
        unused = filled - used
        silent = [name for name in parts.modules if name in unused and name.rpartition(".")[0] in used]
        silent = [name for name in silent if not _is_replaced_table(name, parts)]
        patterns = {NUMBERS.sub("", name) for name in used}
        single = [name for name in silent if NUMBERS.sub("", name) not in patterns]
        return silent, {name for name in single if _is_head(name, parts, classes)}

    def _equal_filters(self, name: str, starts: np.ndarray) -> float:
        """The fraction of filters that equal another one; filters of zeros do not count."""
        if not _equal_rows(starts):
            return 0.0
        weight = full_tensor(self.parts.parameters[name].detach()).movedim(self.outputs[name], 0).flatten(1)
        module = self.parts.modules.get(name.rpartition(".")[0])
        if getattr(module, "groups", 1) > 1 or min(weight.shape) < 2:
            return 0.0  # equal filters of different inputs differ in their outputs, and so do those of one number
        return _equal_rows(weight.to("cpu", torch.float64).numpy())


MOST_VECTORS = 2**18  # numbers of a table of vectors that is looked at


def _holds_equal_vectors(parts: ModelParts, name: str) -> bool:
    """Whether a parameter beside the layers, such as the latent array of a Perceiver, holds one vector in all rows."""
    p = parts.parameters[name].detach()
    embedding = isinstance(parts.modules[name.rpartition(".")[0]], nn.Embedding | nn.EmbeddingBag)
    if embedding or is_sharded(p) or p.dim() < 2 or p.shape[-2] < 2 or p.numel() > MOST_VECTORS:
        return False
    return bool((p == p[..., :1, :]).all())


def _is_replaced_table(name: str, parts: ModelParts) -> bool:
    """Whether a table of word vectors has no reader because its model takes the vectors themselves, too."""
    model = parts.modules[name.rpartition(".")[0]]
    table = isinstance(parts.modules[name], nn.Embedding)
    return table and "inputs_embeds" in inspect.signature(model.forward).parameters


def _trunk(parts: ModelParts) -> str:
    """The model inside of wrappers, which have a single child."""
    name = ""
    while len(children := list(parts.modules[name].named_children())) == 1 and list(children[0][1].children()):
        name = f"{name}.{children[0][0]}".lstrip(".")
    return name


def _is_head(name: str, parts: ModelParts, classes: int) -> bool:
    """Whether a module may be another head of the model: it ends in as many units as the output, or is one layer.

    A layer of as many inputs as outputs is none, and no embedding is, which reads indices.
    """
    weights = [p for n, p in parts.parameters.items() if f"{n}.".startswith(f"{name}.") and p.dim() > 1]
    if not weights or isinstance(parts.modules[name], nn.Embedding):
        return False
    layer = name.rpartition(".")[0] == _trunk(parts) and "weight" in parts.modules[name]._parameters
    return (layer and weights[0].shape[0] != weights[0].shape[1]) or weights[-1].shape[0] == classes


def _above(name: str) -> list[str]:
    """The names of the modules around a parameter, and '' for the model."""
    pieces = name.split(".")[:-1]
    return [".".join(pieces[:i]) for i in range(len(pieces) + 1)]


def _equal_rows(rows: np.ndarray) -> float:
    """The fraction of rows, other than rows of zeros, that another row equals."""
    some = np.ascontiguousarray(rows[rows.any(1)])
    firsts = np.sort(some[:, 0])
    if not (firsts[1:] == firsts[:-1]).any():  # much faster than a comparison of whole rows
        return 0.0
    _, counts = np.unique(some.view([("", some.dtype)] * some.shape[1]), return_counts=True)
    return float(counts[counts > 1].sum() / len(rows))


def _output_dimension(module: nn.Module, layer: Layer) -> int:
    """The dimension of the outputs in a layer's weight."""
    return 1 if layer.transposed and getattr(module, "groups", 1) == 1 else 0


def _norms_by_output(gradient: Tensor, outputs: int) -> Tensor:
    dims = [i for i in range(gradient.dim()) if i != outputs]
    wide = torch.float32 if gradient.dtype in HALF else None
    found: Tensor = torch.linalg.vector_norm(full_tensor(gradient.detach()), dim=dims, dtype=wide)
    return found


def _filter_starts(weight: Tensor, outputs: int) -> Tensor:
    """The first numbers of each filter, as one vector."""
    return full_tensor(weight.detach()).movedim(outputs, 0).flatten(1)[:, :COMPARED].flatten()


def _portions(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Per device, in reverse order: yield a parameter every `BYTES_AT_ONCE`, with all names so far."""
    names: dict[torch.device, list[str]] = {}
    waiting: dict[torch.device, int] = {}
    for name, parameter in reversed(list(parameters.items())):
        device = parameter.device
        names.setdefault(device, []).append(name)
        waiting[device] = waiting.get(device, 0) + parameter.nbytes
        if waiting[device] > BYTES_AT_ONCE and parameter.requires_grad:
            yield names[device].copy(), parameter
            waiting[device] = 0


def learning_branches(parts: ModelParts, plan: ResidualPlan, gradients: Mapping[str, float]) -> set[str]:
    """The branches in which a weight or multiplier, or one of their block, has a nonzero gradient.

    A bias does not count: its gradient does not reach the layers before it.
    """
    owners: dict[str, list[str]] = {}
    homes: dict[str, list[Branch]] = {}
    for branch in plan.branches:
        homes.setdefault(branch.home, []).append(branch)
        for layer in branch.layers:
            owners.setdefault(layer.name, []).append(branch.name)  # several if a block is called several times
    outside = {layer.name for layer in (*plan.stem, *plan.body, *plan.classifier)}
    outside |= {layer.name for branch in plan.branches for layer in branch.shortcut_layers}
    normalizers = {name for name, module in parts.modules.items() if is_norm(module)}
    found: set[str] = set()
    for name, gradient in gradients.items():
        module = name.rpartition(".")[0]
        is_bias = name.endswith(("bias", ".shift", ".delta")) or isinstance(parts.modules[module], ScalarBias)
        if gradient == 0.0 or is_bias:
            continue
        if module in owners:
            found.update(owners[module])
        elif module not in outside:
            prefix = module
            while prefix and prefix not in homes:
                prefix = prefix.rpartition(".")[0]
            inside = homes.get(prefix, ())
            if len(inside) < 2 or module not in normalizers:
                found.update(branch.name for branch in inside)
            if module in normalizers and name.endswith("weight"):  # it may end the branch around these
                starts_at_zero = not bool(full_tensor(parts.parameters[name].detach()).any())
                found.update(branch.outer_branch or branch.name for branch in inside if starts_at_zero)
    return found


def layer_table(model: str, layers: Iterable[LayerSignal]) -> Table:
    """Make a table of weight layers: norms, the update-to-weight ratio, dead units and equal filters."""
    names = ("weight", "gradient", "gradient / weight", "dead units", "equal filters")
    rows = tuple(
        (
            layer.name,
            compact(layer.weight_norm),
            compact(layer.gradient_norm),
            compact(layer.ratio),
            f"{100 * layer.dead:.0f} %" if layer.units else "–",
            f"{100 * layer.equal:.0f} %" if layer.units else "–",
        )
        for layer in layers
    )
    caption = "norms of the weight and its gradient; their ratio is the relative size of an SGD step at learning rate 1"
    columns = (Column("layer"), *(Column(name, "right") for name in names))
    return Table(f"weight layers of {model}", columns, rows, caption)
