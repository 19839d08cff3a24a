"""Record the flow of any model while it runs on meta tensors: shapes are computed, values are not.

Every call of a weight layer, activation or other leaf module is one node, and so is every function of tensors outside
them. Recording needs no tracing and no export, so every model that runs can be recorded. A model that looks at values
is recorded on a copy that has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normfree.arguments import explain_failure
from normfree.errors import brief
from normfree.graph.flow import Flow, Node, self_gated
from normfree.graph.observer import (
    ACTIVATIONS,
    ADDITIONS,
    ATTENTION,
    CLAMPS,
    LEAVES_TORCH,
    LIKE_ANOTHER,
    MATRIX_PRODUCTS,
    MAXIMA,
    MULTIHEAD_ATTENTION,
    NORMALIZATIONS,
    PRODUCTS,
    SUMS,
    VALUELESS,
    ZEROS,
    FunctionCall,
    NodeKind,
    Observer,
    clamps_at_zero,
    kind_of,
    operands_of,
    tensors_of,
    writes_into,
)
from normfree.graph.weight_uses import Weight
from normfree.nn.model_state import (
    call_arguments,
    eagerly,
    eval_pass,
    on_meta,
    preserve_model_state,
    preserve_random_state,
)
from normfree.nn.normalizers import ACTIVATION_TYPES, NORM_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS

DIFFERENTIATES = (
    "its forward pass differentiates, and runs without gradients here: pass the network that it differentiates instead "
    "of the whole model"
)
_PASSING = (ScalarBias, ScalarMultiplier, nn.Identity, nn.Dropout, nn.AlphaDropout)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_ATTENTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_SAME_SHAPE = NORMALIZATIONS | ACTIVATIONS - {"softmax"}  # which may be given a type
_SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def record(model: nn.Module, args: Any, kwargs: Any, norms: Collection[str] = ()) -> Flow:
    """Run a model on meta copies of its parameters and inputs, and return its flow.

    If that fails because the model looks at values, a copy of the model runs on the example itself. Either way the
    model and the random states are as they were.

    Args:
        model: Any model.
        args: Positional arguments of an example that it accepts.
        kwargs: Keyword arguments of the example.
        norms: The names of normalizers. The flow notes which of their parameters and buffers other code reads.

    Returns:
        The nodes in the order they ran, the calls of modules and the uses of parameters.

    Raises:
        ValueError: If the model does not run on the example.
    """
    kept = _identities(model)
    try:
        return _record_meta(model, args, kwargs, kept, norms)
    except Exception as without_values:  # whatever the model's own code raises
        try:
            return _record_values(model, args, kwargs, kept, norms, differentiates(without_values))
        except Exception as error:
            # On an example without values the second run adds no information.
            shapes = "".join(f", {tuple(t.shape)}" for t in tensors_of((args, kwargs)))
            valueless = any(t.is_meta for t in tensors_of((args, kwargs)))
            cause = without_values if valueless else error
            if (message := explain_failure(model, (args, kwargs), cause)) is not None:
                raise ValueError(message) from cause
            remedy = f"check the shape of the example{shapes}, and pass one that the model accepts"
            if valueless:
                remedy = "pass an example with values, or a ResidualPlan as plan="
            if differentiates(cause):
                remedy = DIFFERENTIATES
            failed = f"{type(model).__name__} failed: {brief(cause)}"
            raise ValueError(f"expected a model that runs on the example, but {failed}; {remedy}") from cause


def record_evaluation(model: nn.Module, example: Any, norms: Collection[str]) -> Flow:
    """Record the flow of a model in evaluation mode; in training mode it may skip blocks at random."""
    with eval_pass(model):
        return record(model, *call_arguments(example), norms)


def record_training(model: nn.Module, example: Any, norms: Collection[str]) -> Flow | None:
    """Record the flow of a model in training mode, where normalizers written by hand use the statistics of the batch.

    Returns None if the model does not run without values. The model and the random states are as they were.
    """
    with preserve_model_state(model, attributes=True), preserve_random_state(()):
        model.train()
        try:
            return _record_meta(model, *call_arguments(example), set(), norms)
        except Exception:  # whatever the model's own code raises
            return None


def differentiates(error: Exception) -> bool:
    """Whether a model failed without gradients because its forward pass takes a derivative."""
    return "does not require grad" in str(error)


def _identities(model: nn.Module) -> set[str]:
    """The parameters outside of weight layers that are an identity matrix, which mixes streams: no method draws it."""
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, p in (() if isinstance(module, WEIGHT_LAYERS) else module._parameters.items())
        if p is not None and p.dim() == 2 and p.shape[0] == p.shape[1] and not p.is_meta
        if torch.equal(p.detach(), torch.eye(len(p)).to(p))
    }


def _record_meta(model: nn.Module, args: Any, kwargs: Any, kept: set[str], norms: Collection[str]) -> Flow:
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with on_meta(model):
        return _run_recorded(model, args, kwargs, kept, norms)


def _record_values(
    model: nn.Module, args: Any, kwargs: Any, kept: set[str], norms: Collection[str], gradients: bool
) -> Flow:
    if any(t.is_meta for t in (*model.parameters(), *tensors_of((args, kwargs)))):
        raise ValueError("a model or example without values")
    twin = deepcopy(model)
    args, kwargs = deepcopy((args, kwargs))  # a model may write into its input
    with preserve_random_state((*twin.parameters(), *tensors_of((args, kwargs)))):
        return _run_recorded(twin, args, kwargs, kept, norms, gradients)


def _run_recorded(
    model: nn.Module, args: Any, kwargs: Any, kept: set[str], norms: Collection[str], gradients: bool = False
) -> Flow:
    modules = dict(model.named_modules())
    flow = Flow({name: p for name, p in model.named_parameters() if name not in kept})
    flow.add("input", "input", (), (args, kwargs))
    recorder = _Recorder(flow, modules)
    recorder.watch_norms_(norms)
    with eagerly(), torch.set_grad_enabled(gradients), recorder.following(modules):
        flow.finish(model(*args, **kwargs))
    flow.release_tensors()
    return flow


class _Recorder(Observer):
    """Adds a node to the flow for every leaf module and for every function call outside leaf modules."""

    def __init__(self, flow: Flow, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.flow = flow
        flow.call_counts = self.calls
        self._modules = modules
        self._leaves = {name for name, module in modules.items() if is_leaf(module)}
        self._leaf_depth = 0
        self._zeros: list[Tensor] = []

    def watch_norms_(self, norms: Collection[str]) -> None:
        """Note the parameters and buffers of normalizers that are read while these do not run.

        Their classes change. They are restored with the other attributes, or belong to a copy.
        """
        names = {id(self._modules[name]): name for name in norms}
        reporting: dict[type[nn.Module], type[nn.Module]] = {}

        def subclass(plain: type[nn.Module]) -> type[nn.Module]:
            def attribute(module: nn.Module, key: str) -> Any:
                name = names.get(id(module), "")
                found = plain.__getattr__(module, key)
                if isinstance(found, Tensor) and name not in self.running:
                    self.flow.norm_tensors_read.setdefault(name, key)
                    if key != "weight":
                        self.flow.norm_tensors_read[name] = key
                return found

            return type(plain.__name__, (plain,), {"__getattr__": attribute, "__module__": plain.__module__})

        for module in map(self._modules.__getitem__, norms):
            kind = type(module)
            reporting.setdefault(kind, subclass(kind))
            module.__class__ = reporting[kind]

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Move into a module."""
        self.flow.home = self.home
        self._leaf_depth += name in self._leaves

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note the call of a module: a node for a leaf."""
        flow = self.flow
        flow.home = self.home
        leaf = name in self._leaves
        self._leaf_depth -= leaf
        tensors = tensors_of((args, kwargs))
        if len(tensors) > 1:
            flow.several_inputs.add(name)
        if self._leaf_depth:
            return
        if not leaf:
            flow.add_call(name, args, kwargs, out)
            return
        kind = _module_kind(module)
        inputs = flow.read(tensors)
        if not inputs and (kind == "weight" or isinstance(module, NORM_TYPES)):
            inputs = flow.start_at_token(args)
        weighted = kind == "weight" and bool(inputs)
        flow.weights.use(
            module.parameters(), "weight" if weighted else "embedding" if isinstance(module, _LOOKUPS) else "beside"
        )
        if inputs:
            weights = (Weight(name, convolution=not isinstance(module, nn.Linear)),) if weighted else ()
            function = type(module).__name__.lower()
            flow.add(kind, name, inputs, out, function=function, weights=weights, is_module=True)

    def on_function(self, call: FunctionCall) -> Any:
        """Note a function call: a node outside of leaf modules, a write or a normalization anywhere."""
        flow, name, args, kwargs = self.flow, call.name, call.args, call.kwargs
        written = writes_into(name, args, kwargs)
        if getattr(self._modules[self.home], "inplace", False) is not True:
            flow.overwritten.update(flow.read([args[0] if args and kwargs.get("inplace") else written]))
        tensors = tensors_of((args, {key: value for key, value in kwargs.items() if key != "out"}))
        if name in LIKE_ANOTHER:
            tensors = tensors[:1]
        operands = flow.read(tensors)
        made_inside = self._leaf_depth and not flow.weights.is_made_from_parameters(next(iter(tensors), None))
        if name in NORMALIZATIONS and (operands or made_inside):
            flow.normalizing[self.home, name] = None
        if self._leaf_depth:
            out = _run(call)
            if tensors and all(t.dim() < 2 or flow.weights.is_made_from_parameters(t) for t in tensors):
                flow.weights.derive(name, tensors, out)
            return out
        first = next(iter(flow.read(operands_of(args, kwargs)[:1])), None)
        if operands and name in LEAVES_TORCH:
            flow.lost[self.home, name] = None
        out = _run(call)
        if name in ZEROS:
            self._zeros.append(out)
        if name in VALUELESS:
            return out
        if not operands:
            flow.weights.derive(name, tensors, out)
            return out
        if name == MULTIHEAD_ATTENTION:
            _add_attention(flow, args, kwargs, out)
            return out
        if weights := flow.weights.meet(name, args, tensors):
            node = flow.add("weight", name, operands, out, weights=weights)
        else:
            shape = tuple(out.shape) if isinstance(out, Tensor) else ()
            scale = flow.weights.scale_in(name, tensors, operands[0].shape, shape)
            node = flow.add(
                "scaling" if scale and len(operands) == 1 else self._kind(name, args, kwargs, operands),
                _name_in_flow(name, args, kwargs),
                operands,
                args[0] if name == "__setitem__" else out,  # which writes in place and returns nothing
                ordinal=call.addition,
                first_operand=first,
                factors=self._factors(name, tensors),
                scale=scale,
            )
        if node is not None and isinstance(written, Tensor):
            flow.write_through(written, node)
        return out

    def _kind(self, name: str, args: Any, kwargs: Any, operands: Sequence[Node]) -> NodeKind:
        """Classify a function by its operands in the flow and by the numbers among its arguments."""
        if name in ADDITIONS and any(type(value) in (int, float) and not value for value in operands_of(args, kwargs)):
            return "scaling"  # 0 + x, the first addition of Python's `sum`
        if name in CLAMPS and clamps_at_zero(args, kwargs):
            return "activation"
        if name in MAXIMA and any(value is zero for value in operands_of(args, kwargs) for zero in self._zeros):
            return "activation"
        if name in PRODUCTS and (steps := self_gated(operands)):
            for step in steps:  # no sum in there is a residual one
                step.kind = "other" if step.kind in ("sum", "gate") else step.kind
            return "activation"
        return kind_of(name, [node.shape for node in dict.fromkeys(operands)])

    def _factors(self, name: str, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The operands that a function multiplies with one another; an attention adds its mask, so that is not one."""
        if name in PRODUCTS or name in MATRIX_PRODUCTS:
            return self.flow.read(tensors)
        return self.flow.read(tensors[:3]) if name == ATTENTION else ()


def _run(call: FunctionCall) -> Any:
    """Run a function; without values, normalizations and activations keep the shape, for which torch takes long."""
    signal = call.args[0] if call.args else None
    if call.name in _SAME_SHAPE and isinstance(signal, Tensor) and signal.is_meta and signal.is_floating_point():
        return signal if call.name.endswith("_") or call.kwargs.get("inplace") else torch.empty_like(signal)
    return call.run()


def _add_attention(flow: Flow, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Add the steps of `F.multi_head_attention_forward`: project query, key and value, multiply them, project.

    A fused `in_proj_weight` is one layer of three parts, even where query and key come from different signals.
    """
    given = _ATTENTION_SIGNATURE.bind(*args, **kwargs).arguments
    sources = [given[name] for name in ("query", "key", "value")]
    separate = bool(given.get("use_separate_proj_weight"))
    if separate:
        projected = [_project(flow, given[n], (s,), 1) for n, s in zip(_SEPARATE_WEIGHTS, sources, strict=True)]
    else:
        projected = [_project(flow, given["in_proj_weight"], sources, 3)] * 3
    flow.weights.use((given["bias_k"], given["bias_v"]), "beside")
    factors = tuple(node for node in projected if node is not None)
    attended, *maps = tensors_of(out)
    shape = tuple(attended.shape)
    product = flow.step("other", ATTENTION, tuple(dict.fromkeys(factors)), shape, factors=factors)
    weights = flow.weights.meet("linear", (), [given["out_proj_weight"]])
    flow.add("weight", "linear", (product,), attended, weights=weights)
    flow.add("other", MULTIHEAD_ATTENTION, factors[:2], maps, factors=factors[:2])


def _project(flow: Flow, matrix: Any, sources: Sequence[Any], parts: int) -> Node | None:
    """Add one projection of its sources; None if no source depends on the input."""
    inputs = flow.read(sources)
    if not inputs:
        flow.weights.use([matrix], "beside")
        return None
    weights = tuple(replace(w, parts=parts) for w in flow.weights.meet("linear", (), [matrix]))
    return flow.step("weight", "linear", tuple(dict.fromkeys(inputs)), inputs[0].shape, weights=weights)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one step of the flow: weight layers, activations, normalizers, modules of torch.

    Other modules of torch that hold matrices (a transposed convolution, a recurrent layer) are recorded function by
    function, so that their weights are found or reported as unaccounted for.
    """
    if isinstance(module, (*WEIGHT_LAYERS, *ACTIVATION_TYPES)):
        return True
    if next(module.children(), None) is not None:
        return False
    if isinstance(module, (*NORM_TYPES, *_LOOKUPS)) or _is_activation(module):
        return True
    matrices = any(p.dim() >= 2 for p in module.parameters())
    known = type(module).__module__.startswith(("torch.nn.", "normfree.nn."))
    return not matrices and (known or "norm" in type(module).__name__.lower())


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation of torch, or is defined in a Python module named 'activation…'."""
    library = type(module).__module__.rpartition(".")[2].startswith("activation")
    return isinstance(module, ACTIVATION_TYPES) or (library and next(module.children(), None) is None)


def _name_in_flow(name: str, args: Any, kwargs: Any) -> str:
    """The name of a call's node; 'select' or 'weighted_add' where the arguments change the function's meaning."""
    index = args[1] if name == "__getitem__" else ()
    if any(isinstance(part, int) for part in (index if isinstance(index, tuple) else (index,))):
        return "select"  # one entry of a dimension, so that the dimension is removed
    return "weighted_add" if name in SUMS and kwargs.get("alpha", 1) != 1 else name  # x + alpha · f


def _module_kind(module: nn.Module) -> NodeKind:
    if isinstance(module, WEIGHT_LAYERS):
        return "weight"
    if _is_activation(module):
        return "activation"
    return "scaling" if isinstance(module, _PASSING) else "other"
