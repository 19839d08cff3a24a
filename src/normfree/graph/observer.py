"""Observe a forward pass: which module is running, which torch functions its code calls, and of which kind they are.

Functions are classified by the names that `__torch_function__` reports: sums, products, changes of shape, activations,
bounded functions. Any other function passes the signal on. Recording a flow and measuring residual sums are two
subclasses of `Observer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NodeKind = Literal["input", "weight", "activation", "sum", "gate", "scaling", "other"]

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
SUBTRACTIONS = frozenset({"sub", "sub_", "__sub__", "__isub__", "subtract", "subtract_"})
SUMS = ADDITIONS | SUBTRACTIONS  # x - f(x) is as residual as x + f(x)
# Functions that add, too, but are not followed as sums.
OTHER_SUMS = frozenset({"lerp", "lerp_", "index_add", "index_add_", "scatter_add", "scatter_add_"})
# These are followed as the sum and the product that they compute, by the same name with `_` in place, too.
COMPOSED: dict[str, Callable[..., tuple[Any, Any]]] = {
    "addcmul": lambda input, tensor1, tensor2, *, value=1: (input, _times(value, tensor1 * tensor2)),
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: (input, _times(value, tensor1 / tensor2)),
    "rsub": lambda input, other, *, alpha=1: (other, -_times(alpha, input)),
}
RECURRENT_FUNCTIONS = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})
REDUCTIONS = frozenset({"sum", "mean"})
PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
MATRIX_PRODUCTS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm",
    "einsum", "tensordot", "dot", "inner",
}  # fmt: skip
ATTENTION = "scaled_dot_product_attention"
MULTIHEAD_ATTENTION = "multi_head_attention_forward"

TRANSPOSITIONS = frozenset({"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"})
SPLITS = frozenset({"chunk", "split", "tensor_split", "unbind", "split_with_sizes"})
VIEWS = TRANSPOSITIONS | {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "detach", "to", "float",
    "half", "bfloat16", "double", "type", "type_as", "view_as", "reshape_as", "dropout", "data",
}  # fmt: skip
DIVISIONS = frozenset({"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"})
SCALINGS = VIEWS | PRODUCTS | DIVISIONS
# These compute numbers that leave torch, so that the flow of the signal ends there.
LEAVES_TORCH = frozenset({"numpy", "__array__", "tolist", "item"})

NORMALIZATIONS = frozenset({
    "layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize",
    "native_layer_norm", "native_batch_norm", "native_group_norm", "cudnn_batch_norm", "batch_norm_elemt",
})  # fmt: skip
ACTIVATIONS = frozenset({
    "relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "selu", "gelu", "silu", "silu_", "elu", "leaky_relu",
    "leaky_relu_", "relu6", "hardswish", "hardsigmoid", "hardtanh", "softplus", "mish", "softmax", "celu", "prelu",
    "elu_", "selu_", "celu_", "rrelu", "threshold", "_threshold", "softsign", "logsigmoid",
})  # fmt: skip
CLAMPS = frozenset({"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"})
# As a ReLU, these are constant below 0. Their derivative at 0 is 0; that of `maximum` is 1/2, that of a clamp 1.
RECTIFIERS = frozenset({"relu", "relu_", "relu6", "threshold", "_threshold", "maximum", *CLAMPS})
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
MAXIMA = frozenset({"maximum", "max"})
GATES = frozenset({"sigmoid", "sigmoid_", "hardsigmoid", "tanh", "tanh_", "hardtanh", "relu6", "erf"})
# As factors, these are bounded for any input: gates, and a signal's division by its own scale.
BOUNDED = GATES | {"rsqrt", "rsqrt_"}
# Pointwise functions that do not return twice as much for a signal twice as large.
NONLINEAR = GATES | {"pow", "pow_", "__pow__", "square", "square_", "exp", "exp_", "log", "log1p", "softplus"}
# Pointwise functions, from which an activation may be composed.
POINTWISE = NONLINEAR | SUMS | PRODUCTS | {"neg", "__neg__", "rsub", "__rsub__", "weighted_add"}
# The result does not depend on the values of the argument. Except for `new_` functions, it has the argument's shape.
VALUELESS = frozenset({
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like", "randint_like",
})  # fmt: skip
# These use only the shape or type of their second argument.
LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
# A parameter that meets the signal in one of these becomes a part of it, as a class token does.
JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "__setitem__"})
# A parameter that meets the signal in one of these does not multiply its vectors: it is looked up, added, concatenated
# or used as an elementwise factor.
BESIDE = SUMS | PRODUCTS | {
    "embedding", "embedding_bag", "index_select", "gather", "take_along_dim", "__getitem__", "__setitem__", "__rsub__",
    "cat", "concat", "stack", "where", "expand_as", "type_as", "to", "lerp", "masked_fill", "index_put", "index_put_",
    "div", "__truediv__", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "prelu", "addcmul",
    "copy_", "masked_scatter", "scatter", ATTENTION,
}  # fmt: skip


def _times(number: float, tensor: Any) -> Any:
    return tensor if number == 1 else number * tensor


def _in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the attribute that it reads (`x.T`)."""
    name = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree of arguments or results, also in dataclasses, distributions and attributes of objects."""
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return []
    if type(tree) in (tuple, list, dict):  # much faster than `tree_leaves`, and nearly all trees are of this kind
        return [tensor for part in (tree.values() if type(tree) is dict else tree) for tensor in tensors_of(part)]
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__") or isinstance(leaf, SimpleNamespace | Distribution):
            found += tensors_of(list(vars(leaf).values()))
        elif not isinstance(leaf, nn.Module):  # objects may hold one another, so only their own tensors count
            found += [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor)]
    return found


def writes_into(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a function writes its result into (`copy_`, `b[i] = x`, `out=b`); None if it makes a new one."""
    in_place = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
    return args[0] if args and (in_place or name == "__setitem__") else kwargs.get("out")


def operands_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The operands of a sum or product, given by position or by name."""
    return (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))[:2]


def clamps_at_zero(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of a clamp make it a ReLU: a lower bound of 0 and no upper bound."""
    low, high, *_ = (*args[1:], None, None)
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    return isinstance(low, int | float) and low == 0 and high is None


def kind_of(name: str, shapes: list[tuple[int, ...]]) -> NodeKind:
    """The kind of a function with operands of these shapes, all of which depend on the input.

    A sum with broadcasting is not residual: position embeddings and biases are added that way.
    """
    if name in ACTIVATIONS:
        return "activation"
    if len(shapes) == 2 and name in SUMS and shapes[0] == shapes[1]:
        return "sum"
    if len(shapes) == 2 and name in PRODUCTS:
        return "gate"
    return "scaling" if len(shapes) == 1 and name in SCALINGS else "other"


class FunctionCall(NamedTuple):
    """A call of a torch function in a forward pass.

    `name` is the function's name. `addition` numbers the sums in a module's own code from 0, over all calls of the
    module; it is -1 for any other function.
    """

    function: Callable[..., Any]
    name: str
    addition: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


class Observer(TorchFunctionMode):
    """Base class of everything that follows a model while it runs.

    Inside `with observer.following(modules)` it keeps the stack of modules that are running and counts the calls of
    each. Subclasses override `on_enter`, `on_leave` and `on_function`, and set `homes` to save time.

    Attributes:
        running: The names of the modules whose forward passes are running, the innermost last.
        calls: The number of calls of each module.
        homes: The names of the modules whose own functions are observed, None for all functions. Every observed call
            costs time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.calls: Counter[str] = Counter()
        self.homes: Set[str] | None = None
        self._additions: Counter[str] = Counter()
        self._listening = False
        self._inside = 0
        self._hooked: list[tuple[dict[Any, Any], object]] = []

    @property
    def home(self) -> str:
        """The name of the module whose own forward pass is running, '' for the model itself."""
        return self.running[-1] if self.running else ""

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Act when a module is called; it is on the stack already."""

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Act when a module returns; it is off the stack already."""

    def on_function(self, call: FunctionCall) -> Any:
        """Run the function, and return its result."""
        return call.run()

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observe until the context ends; only calls of these modules change the stack."""
        try:
            for name, module in modules.items():
                self._follow(name, module)
            self._switch(self._listens())
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """End the observation. Call it before a backward pass, in which gradient checkpointing runs modules again."""
        self.running.clear()
        self._switch(False)
        self.remove_hooks()

    def add_hook(self, table: dict[Any, Any], hook: Callable[..., None], *more: dict[Any, Any]) -> None:
        """Put a hook into one of a module's tables, `_forward_hooks` for example, until `remove_hooks`.

        This is `register_forward_hook` without the handle: hundreds of handles cost as much as some layers.
        Tables in `more` turn on an option for the hook, for example `_forward_hooks_with_kwargs`. The hook does not run
        in a backward pass, in which gradient checkpointing runs modules again, and leaves them before they return.
        """
        key = object()
        table[key] = lambda *given: None if _in_backward() else hook(*given)
        self._hooked.append((table, key))
        for marks in more:
            marks[key] = True
            self._hooked.append((marks, key))

    def remove_hooks(self) -> None:
        """Remove every hook that was added."""
        for table, key in self._hooked:
            table.pop(key, None)
        self._hooked.clear()

    def _follow(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.running.append(name)
            self.calls[name] += 1
            self._switch(self._listens())
            self.on_enter(name, module, args)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            while self.running and self.running.pop() != name:
                pass  # a module inside raised an error that the model caught
            self._switch(self._listens())
            self.on_leave(name, module, args, kwargs, out)

        self.add_hook(module._forward_pre_hooks, enter)
        self.add_hook(module._forward_hooks, leave, module._forward_hooks_with_kwargs)

    def _listens(self) -> bool:
        """Whether functions are observed now."""
        return self.homes is None or bool(self.running and self.running[-1] in self.homes)

    def _switch(self, on: bool) -> None:
        if on is not self._listening and not self._inside:  # torch sets the mode aside during an observed call
            self._listening = on
            if on:
                self.__enter__()  # type: ignore[no-untyped-call]
            else:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if (operands := COMPOSED.get(name.removesuffix("_"))) is not None and "out" not in kwargs:
            with self:
                first, second = operands(*args, **kwargs)
                return first.add_(second) if name.endswith("_") else first + second
        addition = -1
        if name in SUMS:
            addition = self._additions[self.home]
            self._additions[self.home] += 1
        self._inside += 1
        try:
            return self.on_function(FunctionCall(func, name, addition, args, kwargs))
        finally:
            self._inside -= 1
