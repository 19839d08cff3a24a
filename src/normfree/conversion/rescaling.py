"""Keep the scale of the signal without normalizers.

Embeddings, learned tokens and layer scales are rescaled when the normalizers are removed; layers outside the branches
and weightless branches while the converted model runs for the first time (`rescaling_`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Record, Rescaled
from normfree.conversion.forward_passes import root_mean_square
from normfree.conversion.inspection import Inspection
from normfree.errors import listed
from normfree.graph.convertibility import recurrent_layers
from normfree.graph.discovery import WeightlessBranch
from normfree.graph.experts import same_in_others
from normfree.graph.flow import Flow
from normfree.graph.observer import FunctionCall, Observer, operands_of
from normfree.nn.model_state import hooked
from normfree.nn.scalars import add_scalar_
from normfree.nn.weight_layers import WEIGHT_LAYERS, is_computed, set_weight_, weight_kind
from normfree.plan import Layer, ResidualPlan


@dataclass
class Rescaling:
    """The scales that a pass through the converted model set.

    Attributes:
        rescaled: A record of each rescaled weight.
        skipped: The weights that were not rescaled, since no module returns just their product with the signal.
        multipliers: The values of the multipliers of weightless branches, by the names of their parameters.
        growing: The modules in which a weightless branch without a multiplier is added and enlarges the signal.
    """

    rescaled: list[Rescaled] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    multipliers: dict[str, float] = field(default_factory=dict)
    growing: list[str] = field(default_factory=list)

    def with_value(self, record: Record) -> Record:
        """The record of an added multiplier with the value that the pass has set; any other record as it is."""
        if isinstance(record, Added) and record.name in self.multipliers:
            return replace(record, value=self.multipliers[record.name])
        return record

    def parameters(self, model: nn.Module) -> list[Tensor]:
        """The parameters of the rescaled layers."""
        names = {record.name.rpartition(".")[0] for record in self.rescaled}
        return [p for name in names for p in model.get_submodule(name).parameters()]

    def notes(self) -> list[str]:
        """Notes on the layers that were not rescaled and the sums that enlarge the signal, one sentence each."""
        skipped = "not rescaled to unit variance, as no single module returns their output"
        return [*([f"{skipped}: {listed(self.skipped)}"] if self.skipped else []), *self.growth()]

    def growth(self) -> list[str]:
        """A note on the sums that enlarge the signal, if there are any."""
        if not self.growing:
            return []
        return [
            "the signal grows at sums of a weightless branch, which no multiplier can scale: "
            f"{listed(dict.fromkeys(self.growing))}; make that branch a module of its own"
        ]


class _WeightlessScaling(Observer):
    """Sets the multipliers of weightless branches while the model runs inside `following`.

    With N such sums, a branch that is larger than 1/N of the stream that it is added to becomes 1/N of it. If each
    branch returns nearly what it reads, as pooling does, N sums then multiply the signal by (1 + 1/N)^N, at most e.

    A sum whose branch has no multiplier is noted if it makes the signal larger by more than a fifth.
    """

    def __init__(self, model: nn.Module, branches: Sequence[WeightlessBranch], found: Rescaling) -> None:
        super().__init__()
        self._model = model
        self._found = found
        self._branches = {(branch.addition.home, branch.addition.ordinal): branch for branch in branches}
        self.homes = {home for home, _ in self._branches}

    @torch.no_grad()
    def on_function(self, call: FunctionCall) -> Any:
        """Scale the branch if the function is one of the sums."""
        branch = self._branches.get((self.home, call.addition))
        if branch is None:
            return call.run()
        first, second = operands_of(call.args, call.kwargs)
        branch_first = branch.addition.first_operand is branch.end
        output, stream = (first, second) if branch_first else (second, first)
        size = root_mean_square(stream) or 1.0
        ratio = root_mean_square(output) / size
        if branch.holder is None:
            out = call.run()
            if root_mean_square(out) > 1.2 * size:
                self._found.growing.append(self.home)
            return out
        name, value = f"{branch.holder}.beta", min(1.0, 1 / (len(self._branches) * max(ratio, 1e-12)))
        self._found.multipliers[name] = value
        self._model.get_parameter(name).fill_(value)
        scaled = (first * value, second) if branch_first else (first, second * value)
        return call.function(*scaled, **{key: v for key, v in call.kwargs.items() if key not in ("input", "other")})


def _divide_(module: nn.Module, layer: Layer, divisor: float) -> Rescaled:
    """Divide the weight of a layer, or the gain of a reparametrized one. Returns a record of it."""
    if weight_kind(module) != "plain":
        module.gain.div_(divisor)  # type: ignore[operator]
    else:
        set_weight_(module, getattr(module, layer.parameter) / divisor, layer.parameter, name=layer.path)
    return Rescaled(layer.path, 1 / divisor)


@torch.no_grad()
def divide_shared_ends_(model: nn.Module, plan: ResidualPlan) -> list[Rescaled]:
    """Divide the last layer of a branch that runs n times by √n.

    n branches with weights of their own add up like random numbers: their sum is √n times as large as one of them. With
    one weight they add up like one number, n times as large.
    """
    uses = Counter(layer for branch in plan.branches for layer in dict.fromkeys(branch.last_layers) if not layer.tied)
    modules = dict(model.named_modules())
    return [_divide_(modules[layer.name], layer, n**0.5) for layer, n in uses.items() if n > 1]


@torch.no_grad()
def reset_layer_scales_(model: nn.Module, plan: ResidualPlan) -> list[Rescaled]:
    """Set layer scales (ConvNeXt's and CaiT's factor per channel, initially 1e-6) to 1, since β is the scale now."""
    rescaled = []
    for name in dict.fromkeys(name for branch in plan.branches for name in branch.layer_scales):
        parameter = model.get_parameter(name)
        before = parameter.mean().item()
        parameter.fill_(1.0)
        if before != 1.0:
            rescaled.append(Rescaled(name, 1 / before if before else 0.0))
    return rescaled


@torch.no_grad()
def scale_embeddings_(
    model: nn.Module, plan: ResidualPlan, layers: Iterable[Layer], called: Container[str]
) -> list[Rescaled | Added]:
    """Scale the embeddings that start the residual stream to unit variance, which a normalizer did until now.

    Embeddings with the same parent are added, so their sum has unit variance. The weight itself is scaled, or the
    output of the embedding if one of the `layers` of the plan shares the weight.
    """
    modules = dict(model.named_modules())
    width = _width(modules, plan)
    groups: dict[str, list[tuple[str, nn.Embedding]]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and name in called and module.embedding_dim == width:
            groups.setdefault(name.rpartition(".")[0], []).append((name, module))
    tied = {id(getattr(modules[layer.name], layer.parameter)) for layer in layers}
    records: list[Rescaled | Added] = []
    done: set[int] = set()
    for group in groups.values():
        scales = [float(getattr(e, "embed_scale", 1.0) or 1.0) for _, e in group]  # which multiply the rows
        power = sum(e.weight.square().mean().item() * s**2 for (_, e), s in zip(group, scales, strict=True))
        if not power or 0.7 < (factor := power**-0.5) < 1.4:
            continue
        for name, embedding in group:
            if id(embedding.weight) in tied:
                add_scalar_(embedding, "beta", factor, learnable=False)
                records.append(Added(f"{name}.beta", "multiplier of an embedding", factor, False))
            elif id(embedding.weight) not in done:
                embedding.weight.mul_(factor)
                records.append(Rescaled(f"{name}.weight", factor))
            done.add(id(embedding.weight))
    return records


def _width(modules: dict[str, nn.Module], plan: ResidualPlan) -> int:
    """The number of channels at the start of the residual stream."""
    for branch in plan.branches[:1]:
        for layer in branch.first_layers[:1]:
            weight = getattr(modules[layer.name], layer.parameter)
            assert isinstance(weight, Tensor)
            return weight.shape[0 if layer.transposed else 1]
    return -1


@torch.no_grad()
def draw_tokens_(model: nn.Module, plan: ResidualPlan, flow: Flow, generator: torch.Generator | None) -> list[Rescaled]:
    """Draw learned tokens from N(0, 1): libraries initialize them near 0 and leave the scale to a normalizer.

    Learned tokens are parameters that are concatenated to the sequence, or that a layer reads.
    """
    width = _width(dict(model.named_modules()), plan)
    rescaled = []
    for name in plan.other_parameters:
        token = dict(model.named_parameters()).get(name)
        joined = token is not None and "joined" in flow.weights.uses[name]
        if token is None or not joined or token.dim() < 2 or token.shape[-1] != width:
            continue
        before = token.square().mean().sqrt().item()
        draw = torch.empty(token.shape, device=generator.device if generator else "cpu")
        token.copy_(draw.normal_(generator=generator))
        rescaled.append(Rescaled(name, 1 / before if before else 0.0))
    return rescaled


@contextmanager
def rescaling_(
    model: nn.Module, inspection: Inspection, weightless: Sequence[WeightlessBranch], *, layers: bool
) -> Iterator[Rescaling]:
    """Scale weightless branches, and with `layers` the layers outside the branches, while the model runs inside.

    Each layer outside the branches is scaled to unit variance, and so is each layer of a branch that merges signals.
    A layer of a recurrence is not: it reads another signal at each step, and at the first step hardly any.
    Without that, a network with blocks that are not residual (MobileNet, EfficientNet) would lose its signal at each
    gate and each activation other than ReLU. The first layer and the classifier are not rescaled.

    The layers of gates are not rescaled either: the next layer corrects the scale. The input of a gate is pooled and
    hardly varies. If a gate's layer were scaled to unit variance, gates would learn so fast that EfficientNet diverges
    at learning rates at which it trains otherwise.

    A layer that modulates (adaptive layer norm) is scaled to a variance of 1/L, so that L branches, each multiplied by
    1 + s with such an s, multiply the variance by at most e.

    An expert that gets no samples is scaled by the average divisor of the others in its group.

    If a ReLU inside a gate is off for all samples, the sign of the weights before it is changed. Both signs are equally
    likely draws. Otherwise the gate would stay off, because its pooled inputs hardly vary.
    """
    plan, modules = inspection.plan, dict(model.named_modules())
    done: dict[str, float] = {}
    found = Rescaling()

    def divide(module: nn.Module, layer: Layer, std: float) -> None:
        done[layer.path] = std
        found.rescaled.append(_divide_(module, layer, std))

    def hook(layer: Layer) -> Callable[..., Tensor | None]:
        @torch.no_grad()
        def rescale(module: nn.Module, _args: Any, out: Any) -> Tensor | None:
            if not isinstance(out, Tensor) or layer.path in done or not out.numel():
                return None
            std: float = out.std(unbiased=False).item()
            if not 1e-12 < std < 1e12:
                return None
            std *= float(layer.parallel_paths**0.5)  # parallel layers share the variance of their sum
            std *= max(len(plan.branches), 1) ** 0.5 if layer.modulates else 1.0
            divide(module, layer, std)
            return out / std  # the layers that follow read the signal at its new scale already

        return rescale

    @torch.no_grad()
    def revive(module: nn.Module, _args: Any, out: Any) -> Tensor | None:
        if not isinstance(out, Tensor) or not out.numel() or out[:2].max() >= 0:  # the images that the check uses
            return None
        module.weight.neg_()  # type: ignore[operator]
        return -out

    inside = [layer for branch in plan.branches for layer in branch.layers]
    merging = [layer for branch in plan.branches if branch.merges_signals for layer in branch.layers]
    candidates = (*plan.stem[1:], *plan.body, *merging) if layers else ()
    steps = recurrent_layers(plan)
    outside = [layer for layer in candidates if not layer.tied and not layer.gate and layer.path not in steps]
    own = [layer for layer in outside if _is_whole_module(layer, modules[layer.name])]
    found.skipped = [layer.path for layer in outside if layer not in own]
    gates = [layer for layer in (*plan.stem, *plan.body, *inside) if layers and layer.gate]
    gates = [gate for gate in gates if gate.name in inspection.rectified and not is_computed(modules[gate.name])]
    with (
        hooked({modules[layer.name]: hook(layer) for layer in reversed(own)}),  # the first of a name counts
        hooked({modules[gate.name]: revive for gate in gates if _is_whole_module(gate, modules[gate.name])}),
        _WeightlessScaling(model, weightless, found).following(modules) if weightless else nullcontext(),
    ):
        yield found
    with torch.no_grad():
        for layer in own:
            beside = [done[name] for name in same_in_others(layer.path, inspection.experts) if name in done]
            if beside and layer.path not in done:
                divide(modules[layer.name], layer, sum(beside) / len(beside))


def _is_whole_module(layer: Layer, module: nn.Module) -> bool:
    """Whether the module's output is exactly this layer's output."""
    single = isinstance(module, WEIGHT_LAYERS) or next(module.children(), None) is None
    return single and bool(layer.name) and layer.parameter == "weight"
