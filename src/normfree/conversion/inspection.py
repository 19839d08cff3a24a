"""Look at a model before it is converted: its residual plan, its normalizers, and how its own code uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, permutations
from typing import Any

import torch
from torch import nn

from normfree.errors import listed, quoted
from normfree.graph.convertibility import recurrent_branches
from normfree.graph.discovery import WeightlessBranch, plan_from_flow, unaccounted, weightless_branches
from normfree.graph.experts import add_uncalled_experts, expert_groups
from normfree.graph.flow import Flow, Node
from normfree.graph.observer import ATTENTION, DIVISIONS, GATES, PRODUCTS, RECTIFIERS, REDUCTIONS, VIEWS, tensors_of
from normfree.graph.recorder import record_evaluation, record_training
from normfree.graph.residual_sums import latest_common_ancestor
from normfree.nn.model_state import preserve_model_state
from normfree.nn.normalizers import ProbedModules, find_norms, unknown_norms
from normfree.plan import ResidualPlan
from normfree.report.tables import compact

_RAW_DATA_SIZE, _USUAL_DATA_SIZE = 30.0, 3.0  # the root mean square of data; standardized data have 1
_POWERS = frozenset({"pow", "pow_", "__pow__", "__ipow__", "square", "square_"})
NO_SUMS = (
    "no residual sum was found: the model is sequential, concatenates or gates its layers, adds parallel layers that "
    "form one (re-parametrizable blocks), or adds by functions other than + and - (lerp, stack)"
)


@dataclass(frozen=True)
class NormUse:
    """How a model uses one of its normalizers.

    Attributes:
        kind: The class of the normalizer.
        shape: The shape of its output; None if it is not called.
        several_inputs: Whether it is called with more than one tensor.
        overwritten: Whether its output is written to in place.
        tensor_read: The name of its parameter or buffer that other code reads, '' if none. Such code usually reads the
            dtype of the weight.
    """

    kind: str
    shape: tuple[int, ...] | None
    several_inputs: bool
    overwritten: bool
    tensor_read: str


@dataclass(frozen=True)
class Inspection:
    """The facts about an original that do not depend on a method. Modules are given by name.

    Attributes:
        plan: The residual plan.
        flow: The recorded flow.
        norms: The normalizers.
        unknown_norms: The modules whose class is named like a normalizer but is not one that can be removed.
        functional_norms: The calls of normalizing functions outside of normalizers, by module and function.
        inline_norms: The modules whose own code divides the signal by its scale.
        unaccounted: The weights that the plan does not list.
        parameters: The number of parameters.
        weightless: The weightless branches, such as pooling.
        recurrent: The recurrent layers whose output is added to their input, each with the module that adds it.
        found_norms: The normalizers of unknown classes, found by what they do, each with its class.
        norm_like: The modules of unknown classes that behave like a normalizer and stay, each with its class.
        squares: The modules that return a power of the signal to a layer, such as a squared ReLU.
        powers: The branches that grow as the third or a higher power of the stream, such as linear attention.
        experts: The groups of experts, of which the model chooses some by values.
        uncalled: The experts that the example does not reach.
        rectified: The layers whose output a ReLU reads.
        data_size: The largest root mean square of a tensor of the example that a first layer or normalizer reads.
        has_training_code: Whether a module with parameters runs other functions in training mode, as far as is known.
        standardized: The layers whose own forward pass standardizes their weight, each with the class of torch that it
            extends, or None if that returns another shape.
    """

    plan: ResidualPlan
    flow: Flow
    norms: Mapping[str, NormUse]
    unknown_norms: Mapping[str, str]
    functional_norms: Sequence[tuple[str, str]]
    inline_norms: Sequence[str]
    unaccounted: Sequence[str]
    parameters: int
    weightless: Sequence[WeightlessBranch] = ()
    squares: Sequence[str] = ()
    powers: Sequence[str] = ()
    experts: Sequence[Sequence[str]] = ()
    uncalled: Sequence[str] = ()
    rectified: Collection[str] = ()
    data_size: float = 0.0
    has_training_code: bool = False
    recurrent: Mapping[str, str] = field(default_factory=dict)
    found_norms: Mapping[str, str] = field(default_factory=dict)
    norm_like: Mapping[str, str] = field(default_factory=dict)
    standardized: Mapping[str, type[nn.Module] | None] = field(default_factory=dict)

    def with_probed(self, probed: ProbedModules) -> Inspection:
        """Add what a pass showed about the modules of other libraries."""
        unknown = {name: kind for name, kind in self.unknown_norms.items() if name not in probed.affine}
        return replace(
            self,
            unknown_norms=unknown,
            found_norms=probed.norms,
            norm_like=probed.norm_like,
            inline_norms=[home for home in self.inline_norms if home not in probed.norm_like],
            standardized=probed.standardized,
        )

    def obstacles(self, model: nn.Module) -> dict[str, str]:
        """The reasons why no method can convert the model, each with a remedy."""
        found: dict[str, str] = {}
        for name, kind in self.unknown_norms.items():
            remedy = "replace it with batch, layer, group, instance or RMS norm of torch.nn, or with nn.Identity"
            found[f"{quoted(name)}: {kind} is not a normalizer that can be removed"] = remedy
        for home, function in self.functional_norms:
            # L2 normalization (`normalize`) is intended in cosine attention and in heads that compare images.
            if function != "normalize" and home not in self.unknown_norms:
                remedy = "make it a module, which can be removed"
                found[f"{quoted(home)}: its own forward pass computes {function}"] = remedy
        for name, norm in self.norms.items():
            if norm.several_inputs:
                remedy = "give what it does besides normalizing, such as gating, a module of its own"
                found[f"{quoted(name)}: {norm.kind} is called with several tensors"] = remedy
        for name, norm in self.norms.items():
            if norm.tensor_read not in ("", "weight"):
                remedy = "call the normalizer there, which can be removed"
                found[f"{quoted(name)}: other code reads its {norm.tensor_read}"] = remedy
        for name, base in self.standardized.items():
            if base is None:
                layer = type(model.get_submodule(name)).__name__
                remedy = "replace it with a layer of torch.nn"
                found[f"{quoted(name)}: {layer} standardizes its weight, and does more than its base class"] = remedy
        if "" in self.norms:
            found[f"{quoted('')}: the model itself is a normalizer"] = "convert the model that holds it"
        return found

    @property
    def has_usual_data(self) -> bool:
        """Whether the data have about the size of standardized data."""
        return self.data_size <= _USUAL_DATA_SIZE

    def data_scale_remedy(self) -> str:
        """The advice to standardize the data, if a first layer or normalizer reads values as large as raw data."""
        if self.data_size <= _RAW_DATA_SIZE or not self.norms:
            return ""
        return (
            f"standardize the data first: their size is {compact(self.data_size)}, and no normalizer reduces it any "
            "more"
        )

    def notes(self, *, keeps_layers: bool) -> list[str]:
        """Notes on unchanged parts, and on what needs care, one sentence each."""
        notes = [] if self.plan.branches else [NO_SUMS]
        notes += outer_skip_notes(self.plan)
        if self.uncalled and not keeps_layers:
            notes.append(
                f"the example does not reach {listed(self.uncalled)}, so they were converted as the experts beside them"
            )
        if self.unaccounted:
            notes.append(f"not part of the plan and left as they were: {', '.join(self.unaccounted)}")
        if units := [home for home, function in self.functional_norms if function == "normalize"]:
            notes.append(f"the signal is still divided by its length (normalize) in {listed(units)}")
        if self.inline_norms:
            notes.append(
                f"the signal is still divided by its own scale in the code of {listed(self.inline_norms)}; make that a "
                "module, such as nn.RMSNorm, to have it removed"
            )
        if self.norm_like:
            notes.append(
                f"left in place, though it behaves like a normalizer: {listed(self.norm_like, self.norm_like)}; to "
                "have it removed, put a normalizer of torch.nn in its place"
            )
        if self.found_norms:
            notes.append(f"taken for normalizers by what they do: {listed(self.found_norms, self.found_norms)}")
        scales = dict.fromkeys(
            name for branch in self.plan.branches for name in branch.layer_scales if not keeps_layers
        )
        if scales:
            notes.append(f"layer scales were set to 1, because the method scales the branches: {listed(scales)}")
        for product, places in (("squared", self.squares), ("multiplied with itself twice or more", self.powers)):
            if places and self.norms and not keeps_layers:  # tanh limits the signal
                notes.append(
                    f"no normalizer limits the signal before it is {product} any more, in {listed(places)}, so that "
                    "the signal explodes at high learning rates; use the rate that find_lr finds, and adaptive "
                    "clipping (clip_grad_agc_)"
                )
        notes += filter(None, [self.data_scale_remedy()])
        if not self.norms and not self.inline_norms and not self.norm_like:
            notes.append(
                "no normalizer was found: none was removed, and any normalization in the model's own code remains"
            )
        return notes


def outer_skip_notes(plan: ResidualPlan) -> list[str]:
    """A note on outer skips, x + blocks(x), if there are any: branches without layers of their own."""
    if bare := [branch.name for branch in plan.branches if not branch.layers]:
        return [
            f"the signal may still grow at outer skips, x + blocks(x), which have no layer to scale: {listed(bare)}"
        ]
    return []


def inspect_model(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan | None,
    heads: Collection[str],
    found_norms: Collection[str] = (),
) -> Inspection:
    """Record a model once, without values if its code does not read them; the model is left unchanged.

    Args:
        model: The model.
        example: Its example.
        plan: Its plan. Default: the one that the flow shows.
        heads: The names of layers that are known to be output layers.
        found_norms: The names of normalizers that only a pass shows, since their class does not.

    Raises:
        ValueError: If the model does not run on the example.
    """
    norms = find_norms(model) | {name: model.get_submodule(name) for name in found_norms}
    flow = record_evaluation(model, example, norms)
    training = record_training(model, example, norms) if plan is None else None
    flows = [flow, training] if training else [flow]
    returned = {node.name: [node] for node in flow.nodes if node.is_module}
    returned |= {name: [call.out for call in calls if call.out] for name, calls in flow.calls.items()}
    steps = [node for each in flows for node in each.nodes] if plan is None else []
    inline = dict.fromkeys(node.home for node in steps if _divides_by_own_scale(node))
    recurrent = recurrent_branches(flow) if plan is None else {}
    plan = plan_from_flow(model, flow, heads) if plan is None else plan
    experts = expert_groups(model, plan) if flow.chooses_by_values() else []
    plan, uncalled = add_uncalled_experts(plan, flow, experts) if experts else (plan, [])
    return Inspection(
        plan=plan,
        flow=flow,
        norms={name: _norm_use(name, norm, flows, returned.get(name, [])) for name, norm in norms.items()},
        unknown_norms=unknown_norms(model),
        functional_norms=[
            call for call in dict.fromkeys(chain(*(f.normalizing for f in flows))) if call[0] not in norms
        ],
        has_training_code=training is not None and _has_training_code(model, flow, training),
        inline_norms=[home for home in inline if home not in norms],
        unaccounted=unaccounted(model, plan),
        parameters=sum(p.numel() for p in model.parameters()),
        weightless=weightless_branches(flow, plan),
        recurrent=recurrent,
        squares=_squares(model, flow),
        powers=_powers(flow, plan),
        experts=experts,
        uncalled=uncalled,
        rectified={w.module for n in flow.nodes for w in n.weights if any(u.function in RECTIFIERS for u in n.users)},
        data_size=_data_size(flow, norms, example),
    )


def _norm_use(name: str, norm: nn.Module, flows: Sequence[Flow], returned: Sequence[Node]) -> NormUse:
    """How the model uses a normalizer; `returned` are its outputs in the first flow, that of evaluation."""
    read = [each.norm_tensors_read[name] for each in flows if name in each.norm_tensors_read]
    return NormUse(
        kind=type(norm).__name__,
        shape=returned[0].shape if returned else None,
        several_inputs=any(name in each.several_inputs for each in flows),
        overwritten=not flows[0].overwritten.isdisjoint(returned),
        tensor_read=next((tensor for tensor in reversed(read) if tensor != "weight"), "weight" if read else ""),
    )


def _has_training_code(model: nn.Module, flow: Flow, training: Flow) -> bool:
    """Whether a module with parameters runs other functions in training mode; a dropout has none."""
    run, trained = (Counter((node.home, node.function) for node in each.nodes) for each in (flow, training))
    homes = {home for home, _ in (run - trained) + (trained - run)}
    return any(next(model.get_submodule(home).parameters(), None) is not None for home in homes)


def _data_size(flow: Flow, norms: Container[str], example: Any) -> float:
    """The largest root mean square of a tensor of the example that a first layer or normalizer reads."""
    inputs = [node for node in flow.nodes if node.kind == "input"]  # the tensors of the example come first
    size = 0.0
    for node, tensor in zip(inputs, tensors_of(example), strict=False):
        readers = list(node.users)
        for reader in readers:
            readers += reader.users if reader.function in VIEWS | {"identity"} else []
        if tensor.is_floating_point() and any(n.kind == "weight" or n.name in norms for n in readers):
            size = max(size, float(tensor.double().square().mean().sqrt()))
    return size


def _squares(model: nn.Module, flow: Flow) -> list[str]:
    """The modules that pass a square or higher power of the signal to a layer, each once."""
    modules = dict(model.named_modules())
    found = []
    for node in flow.nodes:
        if node.is_module and node.kind == "activation":
            squares = not type(modules[node.name]).__module__.startswith("torch.") and _is_square(modules[node.name])
        else:
            squares = node.function in _POWERS
        step = node
        while squares and step.kind != "weight":
            followers = [user for user in step.users if len(user.inputs) == 1 and user.function not in REDUCTIONS]
            if not followers:
                break
            step = followers[0]
            found += [node.name if node.is_module else node.home] if step.kind == "weight" else []
    return list(dict.fromkeys(found))


def _powers(flow: Flow, plan: ResidualPlan) -> list[str]:
    """The branches that grow as the third or a higher power of the stream: a product of three signals is such a power.

    A bounded factor, an index and the weights of a softmax do not count; a quotient has the difference of both powers.
    """
    names = {(branch.home, branch.addition): branch.name for branch in plan.branches}
    found = []
    for addition in (node for node in flow.nodes if (node.home, node.ordinal) in names):
        ancestor, sides = latest_common_ancestor(addition, {})
        power: dict[Node | None, int] = {ancestor: 1}
        for node in sorted(chain(*sides), key=lambda node: node.index):
            read = [power.get(source, 0) for source in node.inputs]
            if node.bounded or node.discrete or node.divides_itself or node.function == "softmax":
                power[node] = 0
            elif node.function == ATTENTION:
                power[node] = power.get(node.factors[-1], 0)
            elif node.function in DIVISIONS and len(node.inputs) == 2:
                power[node] = max(read[0] - read[1], 0)
            else:
                product = sum(power.get(factor, 0) for factor in node.factors)
                power[node] = product or max(read, default=0)
        if max(power.get(operand, 0) for operand in addition.inputs) > 2:
            found.append(names[addition.home, addition.ordinal])
    return list(dict.fromkeys(found))


def _is_square(activation: nn.Module) -> bool:
    """Whether an activation returns more than three times as much for a large input twice as large."""
    try:
        with preserve_model_state(activation, attributes=True), torch.no_grad():
            small, large = activation(torch.tensor([[32.0], [64.0]])).flatten().abs().tolist()
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False
    return bool(large > 3 * small)


def _divides_by_own_scale(node: Node) -> bool:
    """Whether a step normalizes a signal in the model's own code: x · rsqrt(mean(x²) + ε), or (x - mean) / std."""
    if node.divides_itself:  # a router divides the probabilities of its experts by their sum
        return node.function in DIVISIONS and not _is_share(node.inputs[0])
    for factor, other in permutations(node.factors, 2) if node.function in PRODUCTS else ():
        step, roots = factor, False
        while len(step.inputs) == 1 and step is not other and step.kind != "weight":
            roots = roots or step.function in ("rsqrt", "rsqrt_")
            step = step.inputs[0]
        if roots and (step is other or step in other.inputs):
            return True
    return False


def _is_share(node: Node) -> bool:
    """Whether a value comes from a softmax or a sigmoid, by steps with one input."""
    while len(node.inputs) == 1 and node.kind != "weight":
        if node.function in GATES | {"softmax"}:
            return True
        node = node.inputs[0]
    return False
