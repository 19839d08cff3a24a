"""Facts about modules: scales, embeddings, gates, recurrences, normalizers, shared modules, blocks without a sum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from normfree.diagnostics.measurement.moments import adds_constant, concatenate, norms
from normfree.diagnostics.signals import NUMBERS, Fact, ModuleFact
from normfree.nn.model_state import ModelParts, full_tensor, hooked, is_sharded
from normfree.nn.normalizers import is_norm
from normfree.plan import Layer, ResidualPlan


def parameter_facts(parts: ModelParts, classifier: Iterable[Layer], unknown: set[int]) -> Iterator[Fact]:
    """The dropouts that are on, the sizes of embeddings, scales and the classifier's biases, and the recurrences.

    Also whether all batch norms use their running statistics.

    Args:
        unknown: The identities of tensors that are used like weights, but are no parameters.
    """
    norms = {n: m for n, m in parts.modules.items() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    if norms and not any(m.training for m in norms.values()):
        yield Fact("running statistics", next(iter(norms)), value=len(norms))
    yield from _sizes(parts)
    yield from _unregistered_weights(parts, unknown)
    for layer in classifier:
        parameter = parts.modules[layer.name]._parameters.get("bias")
        if parameter is not None:
            bias = full_tensor(parameter.detach())
            yield Fact("bias", layer.name, value=float(bias.float().square().mean().sqrt()))
            yield Fact("largest bias", layer.name, value=float((bias - bias.mean()).abs().max()))
    for name, module in parts.modules.items():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training:
            yield Fact("dropout", name, value=module.p)
        if isinstance(module, nn.modules.batchnorm._NormBase) and _never_moves(module):
            yield Fact("statistics never move", name)
        yield from _gates(name, module)
        for n, p in module._parameters.items() if isinstance(module, nn.RNN) else ():
            if p is not None and n.startswith("weight_hh") and not is_sharded(p) and bool(torch.isfinite(p).all()):
                radius = float(torch.linalg.eigvals(p.detach().float()).abs().max())
                yield Fact("recurrence", name, str(module.nonlinearity), radius)


def _never_moves(norm: nn.modules.batchnorm._NormBase) -> bool:
    """Whether a normalizer keeps the running statistics that it was built with, mean 0 and variance 1, forever."""
    mean, variance = norm.running_mean, norm.running_var
    if not norm.training or norm.momentum != 0 or mean is None or variance is None:
        return False
    return not bool(mean.any()) and bool((variance == 1).all())


def _sizes(parts: ModelParts) -> Iterator[Fact]:
    """The root mean square of each embedding, and of each vector or number that is no bias, after one transfer.

    The detail of a scale is 'norm' if it is the gain of a normalizer, which has its mean, too.
    """
    gains = {f"{n}.weight" for n, m in parts.modules.items() if is_norm(m)}
    tensors: dict[tuple[str, str], Tensor] = {
        ("scale", n): p.detach()
        for n, p in parts.parameters.items()
        if 0 < p.numel() == max(p.shape, default=1) and not n.endswith("bias")
    }
    for name, module in parts.modules.items():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not is_sharded(module.weight):
            tensors["embedding", name] = module.weight.detach()
    lengths = norms(tensors)
    means = {key: full_tensor(tensors[key]).float().mean().to(lengths[key]) for key in lengths if key[1] in gains}
    numbers = [full_tensor(t).flatten() for t in (*lengths.values(), *means.values())]
    values: list[float] = concatenate(numbers).tolist() if numbers else []
    mean_of = dict(zip(means, values[len(lengths) :], strict=True))
    for (kind, place), length in zip(lengths, values, strict=False):
        size = length / math.sqrt(max(tensors[kind, place].numel(), 1))
        mean = mean_of.get((kind, place), math.nan)
        yield Fact(kind, place, "norm" if place in gains else "", size, mean)


def _gates(name: str, module: nn.Module) -> Iterator[Fact]:
    """The gates of a recurrent layer, and the mean of the sigmoid of their biases.

    With a gate of g, one time step leaves g² of the squared gradient. The gates stand in torch's order: input, forget,
    cell and output in an LSTM; reset, update and new in a GRU, whose update gate keeps the old state.
    """
    gates: tuple[str, ...]
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        gates = ("input", "forget", "", "output")
    elif isinstance(module, nn.GRU | nn.GRUCell):
        gates = ("", "update", "")
    else:
        return
    for inner in [n for n in module._parameters if n.startswith("bias_ih")]:
        pair = [module._parameters[n] for n in (inner, inner.replace("_ih", "_hh"))]
        biases = [b.detach().double() for b in pair if b is not None and not is_sharded(b)]
        if len(biases) == 2:
            opened = (biases[0] + biases[1]).sigmoid().chunk(len(gates))
            found = {g: float(o.mean()) for g, o in zip(gates, opened, strict=True) if g}
            if "update" in found:  # which lets nothing new in where it keeps the old state
                found["input"] = 1 - found["update"]
            yield from (Fact("gate", name, g, value) for g, value in found.items())


FEW_STEPS = 16  # of a sequence, whose gates are computed


@contextmanager
def watch_gates(parts: ModelParts) -> Iterator[list[Fact]]:
    """Collect how open the gates of each LSTM and GRU are; torch computes them in one function, without a trace."""
    found: list[Fact] = []

    def hook(name: str) -> Any:
        return lambda module, args, out: found.extend(_measure_gates(name, module, args, out))

    with hooked({m: hook(name) for name, m in parts.modules.items() if isinstance(m, nn.RNNBase)}):
        yield found


@torch.no_grad()
def _measure_gates(name: str, module: Any, args: Any, out: Any) -> Iterator[Fact]:
    """Compute the gates of the first layer for a few samples and steps."""
    x = args[0] if args and isinstance(module, nn.LSTM | nn.GRU) else None
    if not isinstance(x, Tensor) or x.dim() != 3 or any(map(is_sharded, module.parameters())):
        return
    x, states = (t.detach() if module.batch_first else t.detach().transpose(0, 1) for t in (x, out[0]))
    x, states = x[:8, :FEW_STEPS], states[:8, :FEW_STEPS]
    read = nn.functional.linear(x, module.weight_ih_l0, getattr(module, "bias_ih_l0", None))
    if module.num_layers == 1 and states.shape[2] == module.hidden_size:  # else only the part of the input is known
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        read = read + nn.functional.linear(before, module.weight_hh_l0, getattr(module, "bias_hh_l0", None))
    pieces = read.chunk(4 if isinstance(module, nn.LSTM) else 3, -1)
    gates = torch.cat([piece for i, piece in enumerate(pieces) if i != 2], -1).sigmoid().float()  # 2 is the candidate
    openness = (4 * gates * (1 - gates)).square().mean()
    yield Fact("openness", name, "sigmoid", float(openness), float(gates.mean()))


def module_facts(parts: ModelParts) -> tuple[ModuleFact, ...]:
    """The innermost modules, those with parameters that stand in a list several times, and frozen ones of two names."""
    owners: dict[int, str] = {}
    found = []
    for name, module in parts.modules.items():
        children = list(module._modules.items())
        first: dict[int, str] = {}
        for key, child in children if isinstance(module, nn.ModuleList | nn.Sequential) else ():
            place = f"{name}.{key}" if name else key
            if child is not None and id(child) in first and next(child.parameters(), None) is not None:
                found.append(ModuleFact(place, type(child).__name__, "list", child.training, first[id(child)]))
            first.setdefault(id(child), place)
        weight = module._parameters.get("weight")
        same = "" if weight is None else owners.setdefault(id(weight), name)
        if not children:
            kind = type(module)
            active = kind.__module__ == nn.ReLU.__module__ and "Softm" not in kind.__name__
            role = "activation" if active else "normalizer" if is_norm(module) else "layer"
            found.append(ModuleFact(name, kind.__name__, role, module.training, "" if same == name else same))
    return (*found, *_shared_and_frozen(parts))


def _shared_and_frozen(parts: ModelParts) -> list[ModuleFact]:
    """The frozen modules with weights that two names of the model stand for."""
    names = {id(module): name for name, module in parts.modules.items()}
    found: list[ModuleFact] = []
    for name, module in parts.modules[""].named_modules(remove_duplicate=False):
        if names.get(id(module), name) == name or any(name.startswith(f"{f.name}.") for f in found):
            continue
        weights = list(module.parameters())
        if weights and not any(p.requires_grad for p in weights):
            found.append(ModuleFact(name, type(module).__name__, "shared", module.training, names[id(module)]))
    return found


def _unregistered_weights(parts: ModelParts, tensors: set[int]) -> Iterator[Fact]:
    """The plain attributes of modules that hold these tensors, by their identity, or layers with them."""
    if any(map(is_sharded, parts.parameters.values())):  # then the graph holds gathered copies
        return
    for prefix, module in parts.modules.items() if tensors else ():
        for name, value in vars(module).items():
            inner = tree_leaves(value) if isinstance(value, list | tuple | dict | Tensor) and name[0] != "_" else ()
            held = [p for m in inner if isinstance(m, nn.Module) for p in m.parameters()]
            if any(id(p) in tensors for p in (*held, *inner)):
                yield Fact("weights not registered", f"{prefix}.{name}" if prefix else name)


FIRSTS = 3  # blocks that begin a list and have no sum: a design, as in networks with a skip from the second block on


class BlocksWithoutSums:
    """Modules without a residual sum that are like most others with one, and return the shape that they get.

    Modules are alike if they have the same class, and the same name but for numbers.
    """

    def __init__(self, parts: ModelParts, plan: ResidualPlan, labels: Iterable[str]) -> None:
        self.parts = parts
        blocks = [name for name in labels if name in parts.modules]  # in a loop of another forward pass
        homes = {b.home for b in plan.branches}
        homes |= {n for n in blocks if any(True for _ in parts.modules[n].children())}
        layers = [(b, layer.name) for b in plan.branches for layer in b.layers]
        inside = {p for b, n in layers for p in accumulate(n.split("."), "{}.{}".format) if len(p) > len(b.home)}
        self._kinds = {n: (NUMBERS.sub("", n), type(m)) for n, m in parts.modules.items() if n}
        self._with_sum = Counter(self._kinds[home] for home in homes if home in self._kinds)
        self._firsts = Counter(kind for n, kind in self._kinds.items() if n.endswith(".0") and n not in homes)
        other = homes | inside
        self._watched = [name for name, kind in self._kinds.items() if self._with_sum[kind] and name not in other]
        self._stages = set(map(_innermost_list, homes))  # which have a block with a sum
        self._adds_constant: dict[str, bool] = {}  # by module

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare what the modules read and return."""

        def hook(name: str) -> Any:
            def compare(_m: nn.Module, args: Any, out: Any) -> None:
                if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and args[0].shape == out.shape:
                    self._adds_constant[name] = adds_constant(args[0].detach(), out.detach())

            return compare

        with hooked({self.parts.modules[name]: hook(name) for name in self._watched}):
            yield

    def found(self) -> dict[str, bool]:
        """The blocks without a sum, and whether they add a constant.

        Several first blocks of lists are a design, and so is a list of blocks without any sum, beside other lists.
        """
        without = Counter(self._kinds[name] for name in self._adds_constant)
        found = {}
        for name, constant in self._adds_constant.items():
            kind = self._kinds[name]
            by_design = name.endswith(".0") and self._firsts[kind] >= FIRSTS
            by_design = by_design or _innermost_list(name) not in self._stages
            if self._with_sum[kind] > without[kind] and not by_design:
                found[name] = constant
        return found


def _innermost_list(name: str) -> str:
    """The list that a module is an item of, or a part of one: `layers` for `layers.3.output`; '' for none."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1]]) if numbers else ""
