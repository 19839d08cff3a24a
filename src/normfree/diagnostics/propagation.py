"""Signal propagation: one forward and one backward pass, measured at every residual sum, weight layer and both ends.

`diagnostics/measurement/moments.py` defines the statistics.

Reference: normdead, section 4.2 and Listing 1; robust, section 4 (the same for gradients).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normfree.arguments import check_plan, explained_failures
from normfree.diagnostics.measurement.autograd_graph import GraphReader
from normfree.diagnostics.measurement.backward_pass import (
    backward_starts,
    gradients_by_sample,
    is_flat,
    outputs_without_loss,
    random_gradient,
    run_backward,
)
from normfree.diagnostics.measurement.inputs_and_outputs import (
    IgnoredInput,
    first_tensor,
    ignored_inputs,
    input_facts,
    large_targets,
    loss_of,
    output_facts,
    target_facts,
    unseen_samples,
    watch_inputs,
)
from normfree.diagnostics.measurement.layer_weights import LayerWeights, learning_branches
from normfree.diagnostics.measurement.losses import broadcasts, check_loss, loss_facts
from normfree.diagnostics.measurement.module_facts import BlocksWithoutSums, module_facts, parameter_facts, watch_gates
from normfree.diagnostics.measurement.sum_hooks import MISSING, NoLayersError, SumObserver
from normfree.diagnostics.passes.fault_localization import OpenQuestions, locate_faults
from normfree.diagnostics.signals import CONSTANT, Fact, OutputFacts, Signal
from normfree.graph import discover
from normfree.graph.observer import tensors_of
from normfree.models import BaseModel
from normfree.nn.model_state import (
    ModelParts,
    call_arguments,
    full_tensor,
    hooked,
    is_sharded,
    parts_of,
    preserve_model_state,
    reshard_,
)
from normfree.nn.normalizers import is_norm
from normfree.nn.residual import Residual
from normfree.plan import ResidualPlan, kept_plan, remembered_plan, unwrapped

Loss = Callable[[Any, Any], Tensor]

_STATED_PLANS: WeakKeyDictionary[nn.Module, tuple[Any, ResidualPlan]] = WeakKeyDictionary()


def propagate(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    plan: ResidualPlan | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Signal:
    """Measure the signal of any model in one forward and one backward pass.

    A network with residual sums is measured at these, any other at the outputs of its hidden weight layers. If a value
    is not finite, a second forward pass finds the module that made it.

    The backward pass starts from the loss if there are `targets` or a `loss`, or if the model returns a loss of its
    own, and otherwise from a random gradient with unit variance at every output that feeds no other output. If the
    classifier's weight is zero, as at the start of Fixup, a random gradient is injected at its input instead; if all
    attentions over an encoder's output return zero, one is injected there, too. `Signal.injected` names these places.
    Frozen parameters get gradients as well, since they carry the signal too.

    Hooks, modes, gradients, buffers and random states are restored, also if the model raises. Only numbers are kept,
    so that memory does not grow beyond one plain pass.

    Args:
        model: Any model.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        targets: The second argument of the loss.
        plan: The residual plan (default: the model's own, or the discovered one).
        loss: A function of the output and the targets (default: cross-entropy).
        generator: The source of random gradients (default: seed 0).

    Returns:
        The statistics at every residual sum or weight layer, of the weights, and of the input and output.

    Raises:
        ValueError: if the model has no layers to measure, is on the meta device or returns no tensor, if the plan
            belongs to another model, or if the batch is too small for a variance or has the wrong type.
    """
    try:
        return _measure(model, inputs, targets, plan, loss, generator)
    except NoLayersError:  # the weights are used by functions
        return _measure(model, inputs, targets, plan, loss, generator, by_functions=True)
    except RuntimeError as error:  # a model may ask for the gradient of its input, but only if that has none yet
        if "requires_grad flags of leaf" not in str(error):
            raise
        return _measure(model, inputs, targets, plan, loss, generator, watch=False)


def _measure(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    plan: ResidualPlan | None,
    loss: Loss | None,
    generator: torch.Generator | None,
    watch: bool = True,
    by_functions: bool = False,
) -> Signal:
    """Measure the signal.

    Args:
        watch: Whether to look for parts of the input that the model ignores.
        by_functions: Whether to measure products with weights in place of modules.
    """
    reshard_(model.modules())
    parts = parts_of(model)
    args, kwargs = tree_map(_copy_input, call_arguments(inputs))
    shapes = [tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if shapes and not any(map(math.prod, shapes)):
        raise ValueError(f"expected a batch of at least one sample, got one of shape {shapes[0]}; pass more")
    plan = plan_of(model, args or kwargs, plan, parts)
    weights = LayerWeights(parts, plan)
    reader = GraphReader(parts)
    observer = SumObserver(parts.modules, plan, {id(p): n for n, p in parts.parameters.items()} if by_functions else {})
    blocks = BlocksWithoutSums(parts, plan, observer.labels.values())
    given = input_facts((args, kwargs))  # before the model can write into them
    features: list[Tensor] = []
    read: defaultdict[str, list[Tensor]] = defaultdict(list)
    readers = _memory_readers(plan)
    zero = zero_classifier(model, plan)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(preserve_model_state(model, parts))
        stack.enter_context(weights.unfrozen())
        stack.enter_context(observer.observing())
        seen = {parts.modules[layer]: read[layer] for both in readers.values() for layer in both}
        seen |= {} if zero is None else {zero: features}
        hooks = {module: lambda _m, a, inputs=inputs: inputs.extend(a[:1]) for module, inputs in seen.items()}
        gradients = stack.enter_context(weights.gradient_norms())
        (args, kwargs), watched = watch_inputs((args, kwargs), images=by_functions) if watch else ((args, kwargs), [])
        with (
            explained_failures(model, (args, kwargs)),
            blocks.watching(),
            hooked(hooks, before=True),
            watch_gates(parts) as gates,
        ):
            output = model(*args, **kwargs)
        observer.stop()  # the backward pass runs the modules of a checkpointed network again
        observer.leave_out_head(_tensor_or_none(output))
        observer.require_points()
        source = generator or torch.Generator().manual_seed(0)
        starts, injected, value, zero_loss = backward_starts(output, features, targets, loss, source)
        memories = {b: read[k][0] for b, (k, v) in readers.items() if read[k] and read[v] and read[k][0] is read[v][0]}
        memory = next(iter(memories.values()), None)
        if memory is not None and memory.requires_grad and observer.are_zero(memories):
            starts[memory] = random_gradient(memory, source)
            injected = ", ".join(filter(None, [injected, "memory"]))
        size = _tensor_or_none(output)
        result = None if value is None else next(iter(starts))
        outputs = tensors_of(output)
        graph, functions = reader.read(size, result, outputs)
        functions += loss_facts(result, outputs, targets, reader.names)
        by_sample = gradients_by_sample(size if result is not None else None)
        finite = [torch.isfinite(start.detach()).all() for start in starts]
        starts = {start: gradient for start, gradient in starts.items() if start.requires_grad}
        if starts:  # else the loss is cut off from the network, so that all gradients are zero
            run_backward(parts, starts)
        checks = list(unseen_samples(by_sample, targets, size))
        checks += outputs_without_loss(output) if loss is None and targets is not None else ()
        checks += () if loss is None else check_loss(loss, output, targets)
        checks += [Fact("input changed in place", "the input")] if any(w.read._version for w in watched) else []
        ignored = list(ignored_inputs(watched, reader.word_gradients))
    observer.moments.reduce()  # before the first wait for the device
    layers, gradient_sizes = weights.signals(gradients)
    sums = observer.result(learning_branches(parts, plan, gradient_sizes))
    missing = blocks.found()
    flat = not any(gradient_sizes.values())  # else another output has a gradient
    head = OutputFacts() if size is None else output_facts(size, targets)
    signal = Signal(
        sums,
        layers,
        injected,
        math.nan if value is None else float(value),
        observer.plan,
        output=head.mean_square,
        missing_sums=tuple(name for name, constant in missing.items() if not constant),
        constant_sums=tuple(name for name, constant in missing.items() if constant),
        inputs=given,
        head=head,
        half=observer.half,
        normalized=2 * sum(map(_normalizes, parts.modules.values())) >= len(layers),
        graph=graph,
        facts=(
            *parameter_facts(parts, plan.classifier, reader.unknown - {id(w.leaf) for w in watched}),
            *functions,
            *gates,
            *checks,
            *weights.copies(gradient_sizes),
            *large_targets(output, targets, loss),
        ),
        modules=module_facts(parts),
        broadcast=broadcasts(size, targets, graph.loss),
        targets=target_facts(targets),
        **weights.gradient_facts(gradient_sizes),
        zero_loss=zero_loss,
        loss_cut=result is not None and (not result.requires_grad or (flat and is_flat(by_sample, head))),
        steps=max((shape[1] for shape in shapes if len(shape) > 1), default=0),
        outputs=sum(t.grad_fn is not None for t in outputs),
    )
    signal = _without_artefacts(signal, output_is_finite=all(map(bool, finite)))
    modules, heads = weights.modules_without_gradient(
        set(gradients) | (graph.reached if value is None else set()), head.classes
    )
    asked = _open_questions(signal, parts, modules, ignored, silence_is_fault=zero is None)
    if asked is None:
        return signal
    return locate_faults(
        signal, model, parts, inputs, asked._replace(heads=heads), lambda output: loss_of(output, targets, loss)
    )


def plan_of(
    model: nn.Module, inputs: Any, plan: ResidualPlan | None = None, parts: ModelParts | None = None
) -> ResidualPlan:
    """Return the given plan, else the plan that the model provides, else the discovered one.

    A model of this library derives its plan from the names and types of its modules and two settings of its residual
    modules; the plan is cached as long as these are the same. Discovery depends on code that cannot be compared, so
    its plan is not cached here: pass it on to measure again, as `Monitor` does.

    Raises:
        ValueError: if the model is on the meta device.
    """
    parts = parts or parts_of(model)
    if any(p.is_meta for p in parts.parameters.values()):
        raise ValueError("expected a model with values, got parameters on the meta device; initialize the model first")
    if plan is not None:
        check_plan(plan, parts.modules)
        return plan
    if not isinstance(model, BaseModel) or kept_plan(model):
        remembered = remembered_plan(model) if unwrapped(model) is model else None  # else its names are other ones
        if remembered is None and any(map(is_sharded, parts.parameters.values())):
            raise ValueError(
                f"expected a plan for {type(model).__name__}, whose parameters are sharded; pass plan=, from "
                "normfree.discover before fully_shard"
            )
        if remembered is not None:
            check_plan(remembered, parts.modules, remembered=True)
        return remembered or discover(model, inputs)
    blocks = [(m.shortcut_reads_entry, m.transition) for m in parts.modules.values() if isinstance(m, Residual)]
    structure = (list(parts.modules), [type(m) for m in parts.modules.values()], blocks)
    cached = _STATED_PLANS.get(model)
    if cached is None or cached[0] != structure:
        cached = _STATED_PLANS[model] = structure, model.plan
    return cached[1]


def _without_artefacts(signal: Signal, *, output_is_finite: bool) -> Signal:
    """Set gradients to NaN if they passed through non-finite values."""
    lost = [s.name for s in signal.sums if not math.isfinite(s.sum.variance)]
    if output_is_finite and not lost:
        return signal
    lost_names = set(lost)
    sums = tuple(
        replace(s, sum_gradient=MISSING, branch_gradient=MISSING, shortcut_gradient=MISSING)
        if not output_is_finite or s.name in lost_names
        else s
        for s in signal.sums
    )
    layers = signal.layers
    if not output_is_finite:
        layers = tuple(replace(layer, gradient_norm=math.nan) for layer in layers)
    return replace(signal, sums=sums, layers=layers, unmeasured=lost[0] if lost else "the output")


def _open_questions(
    signal: Signal, parts: ModelParts, modules: list[str], ignored: list[IgnoredInput], *, silence_is_fault: bool
) -> OpenQuestions | None:
    """What further passes have to find out; None for a sound signal. `silence_is_fault`: for a signal of zeros."""
    ended = next((s.name for s in signal.sums if s.level == 0 or (s.layer and s.variation < CONSTANT)), "")
    if signal.unmeasured:
        return OpenQuestions(ended, False, [], [], [])
    if silence_is_fault and (signal.head.mean_square == 0 or ended):
        return OpenQuestions(ended, True, [], modules, [])
    outside = {layer.name for layer in (*signal.plan.stem, *signal.plan.body)} & parts.modules.keys()
    layers = [layer.name for layer in signal.layers if layer.gradient_norm == 0 and layer.weight_norm > 0]
    layers = [name for name in layers if name in outside][-3:]
    return OpenQuestions(ended, False, layers, modules, ignored) if layers or modules or ignored else None


def _memory_readers(plan: ResidualPlan) -> dict[str, tuple[str, str]]:
    """The branches that may attend over another sequence, with the layers that would make their keys and values.

    In such a branch of four layers only the query reads the branch's input. The same holds for a chain of four
    layers, so the caller checks that key and value read the same tensor.
    """
    found: dict[str, tuple[str, str]] = {}
    for b in plan.branches:
        inner = [layer.name for layer in b.layers if layer not in b.first_layers and layer not in b.last_layers]
        if b.degree == 4 and len(b.layers) == 4 and len(inner) == 2:
            found[b.name] = inner[0], inner[1]
    return found


def zero_classifier(model: nn.Module, plan: ResidualPlan) -> nn.Module | None:
    """Return the classifier if all its weights are zero, so that no gradient passes through it.

    Only layers that are called count, because a hook must see their input.
    """
    for layer in plan.classifier:
        module = model.get_submodule(layer.name)
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not torch.any(full_tensor(module.weight) != 0):
            return module
    return None


def _normalizes(module: nn.Module) -> bool:
    """Whether a module normalizes; a frozen batch norm, as in a detector, only scales."""
    return is_norm(module) and not type(module).__name__.startswith("Frozen")


def _tensor_or_none(output: Any) -> Tensor | None:
    """The tensor in a model's output; None if only the caller's loss can read the output."""
    try:
        return first_tensor(output)
    except ValueError:
        return None


def _copy_input(value: Any) -> Any:
    """Copy a tensor: the model may write into it, the caller's graph must get no gradient, and tensors made in
    inference mode cannot take part in a backward pass.
    """
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):
        return value.detach().clone().requires_grad_(value.requires_grad)
