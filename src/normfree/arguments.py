"""Checks of the arguments of public functions: one table of what is expected, by the name of the argument.

A function calls `check_arguments` first, so that a wrong argument is one sentence instead of an error of torch later.

    check_arguments(model=model, loss=loss)
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.errors import brief, wrong_argument
from normfree.plan import ResidualPlan

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)
_IGNORED = -100  # the class that torch's cross-entropy leaves out


@dataclass(frozen=True)
class _Expected:
    """What an argument must be, in words and as a test, and a remedy; `optional` arguments may be None."""

    words: str
    accepts: Callable[[Any], bool]
    remedy: str
    optional: bool = False


def _is_input(value: Any) -> bool:
    arrays = (isinstance(leaf, np.ndarray) for leaf in tree_leaves(value))
    return not (value is None or isinstance(value, str | bytes | type | nn.Module) or any(arrays))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and all(isinstance(item, str) for item in value)


def _is_batches(value: Any) -> bool:
    single = isinstance(value, Tensor | Mapping | str)
    pair = isinstance(value, tuple) and len(value) == 2 and any(isinstance(part, Tensor) for part in value)
    return isinstance(value, Iterable) and not single and not pair


def _is_number(value: Any) -> bool:
    return (isinstance(value, Real) and not isinstance(value, bool)) or (isinstance(value, Tensor) and not value.dim())


_INPUTS = _Expected(
    "a tensor, a tuple of arguments or a mapping of keyword arguments",
    _is_input,
    "pass a batch that the model reads, torch.from_numpy(…) of an array",
)
_NAMES = _Expected("a list of names", _is_list_of_texts, "write a list even for a single name, such as ['…']")
_NUMBER = _Expected("a number", _is_number, "pass a float")
_EXPECTED: dict[str, _Expected] = {
    "model": _Expected(
        "a torch.nn.Module",
        lambda value: isinstance(value, nn.Module),
        "pass the model itself; normfree.build('resnet20') and "
        "normfree.models.third_party.create_model('timm:resnet18') make one from a name",
    ),
    "parameters": _Expected(
        "a torch.nn.Module or its parameters",
        lambda value: isinstance(value, nn.Module | Iterable) and not isinstance(value, str),
        "pass the model",
    ),
    "inputs": _INPUTS,
    "example": _INPUTS,
    "batches": _Expected(
        "a list of batches or a DataLoader", _is_batches, "write a single batch as a list, [(inputs, targets)]"
    ),
    "loss": _Expected(
        "a function of the output and the targets",
        lambda value: callable(value) and not isinstance(value, type),
        "pass a function such as torch.nn.functional.mse_loss, or an object such as torch.nn.MSELoss()",
        optional=True,
    ),
    "plan": _Expected(
        "a ResidualPlan",
        lambda value: isinstance(value, ResidualPlan),
        "pass the plan that normfree.convert or normfree.discover returned",
        optional=True,
    ),
    "methods": _NAMES,
    "models": _NAMES,
    "heads": _NAMES,
    "config": _Expected(
        "a TrainConfig",
        lambda value: hasattr(value, "with_changes") and not isinstance(value, type),
        "pass normfree.recipe('spirals') for a recipe, or normfree.TrainConfig(…)",
    ),
    "folder": _Expected("the path of a folder", lambda value: isinstance(value, str | os.PathLike), "pass a path"),
    "lr": _NUMBER,
    "weight_decay": _NUMBER,
    "clipping": _NUMBER,
    "every": _NUMBER,
}


def check_arguments(**given: Any) -> None:
    """Refuse arguments that are not what their names stand for, with one sentence.

    >>> check_arguments(heads="fc")
    Traceback (most recent call last):
    ValueError: expected a list of names as heads, got the text 'fc'; write a list even for a single name, such as ['…']

    Raises:
        ValueError: With the expected kind, the argument that was given, its name and a remedy.
    """
    for name, value in given.items():
        expected = _EXPECTED[name]
        if not (value is None and expected.optional) and not expected.accepts(value):
            raise wrong_argument(name, expected.words, value, expected.remedy)


def check_python_modules(model: nn.Module) -> None:
    """Refuse TorchScript, whose modules run no hooks.

    Raises:
        ValueError: With the place.
    """
    scripted = next((name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        place = f" at '{scripted}'" if scripted else ""
        raise ValueError(
            f"expected Python modules, got TorchScript{place} in the model; pass the original torch.nn.Module, before "
            "torch.jit.script or torch.jit.trace"
        )


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile`, `DataParallel`, `DistributedDataParallel` or `AveragedModel` wraps.

    Their forward passes only call that model. Anything else is returned as it is, since it may do more; `unwrapped` of
    `plan.py` looks into any wrapper, for what the model inside remembers.

    Raises:
        ValueError: For TorchScript.

    >>> model = nn.Linear(2, 2)
    >>> model_inside(nn.DataParallel(model)) is model
    True
    """
    check_python_modules(model)
    while "_orig_mod" in model._modules or isinstance(model, _WRAPPERS):
        model = model.get_submodule("_orig_mod" if "_orig_mod" in model._modules else "module")
    return model


def check_plan(plan: ResidualPlan, modules: Mapping[str, nn.Module], *, remembered: bool = False) -> None:
    """Refuse a plan that names modules which the model does not have.

    Args:
        plan: The plan.
        modules: The modules of the model by name.
        remembered: Whether the model itself remembered the plan.

    Raises:
        ValueError: With the first name.
    """
    homes = (f"a sum in '{b.home}'" for b in plan.branches if b.home not in modules)
    layers = (f"the layer '{layer.name}'" for layer in plan.layers() if layer.name not in modules)
    strange = next(homes, None) or next(layers, None)
    if strange is None:
        return
    if remembered:
        raise ValueError(
            f"expected the model that its remembered plan describes, got one without {strange}; its modules were "
            "changed since, so pass plan=normfree.discover(model, inputs)"
        )
    raise ValueError(
        f"expected a plan of this model, got one with {strange}, which the model does not have; leave the plan out to "
        "have it discovered"
    )


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that do not match the arguments of a model's `forward`.

    Raises:
        ValueError: With the names that `forward` takes.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a compiled function may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        got = f"the keyword arguments {', '.join(map(repr, kwargs))}" if kwargs else f"{len(args)} arguments"
        raise ValueError(
            f"expected inputs that {type(model).__name__}.forward{signature} takes, got {got}: {error}; pass a tensor, "
            "a tuple of its arguments, or a mapping of its keyword arguments, and the targets of the loss apart"
        ) from error


_WRONG_TYPE = re.compile("dtype|scalar type|data type|Input type|not implemented for '")
_TARGETS = re.compile(r"\b(targets?|labels?|gt_\w+)\b.*\b(none|missing|training|required|train)\b", re.IGNORECASE)


def explain_failure(model: nn.Module, arguments: Any, error: Exception) -> str | None:
    """Explain an error of a forward pass by arguments of a wrong kind, in one sentence; None if it has another cause.

    Args:
        model: The model that raised it.
        arguments: The positional and keyword arguments.
        error: What it raised.
    """
    text, leaves = str(error), tree_leaves(arguments)
    given = [t for t in leaves if isinstance(t, Tensor)]
    if any(hasattr(leaf, "batch_sampler") for leaf in leaves) or re.search(r"not (tuple|list)\b", text):
        return (
            "expected the inputs of one batch as tensors, got a tuple, a list or a DataLoader in their place; "
            "of several batches take one, inputs, targets = next(iter(batches)), and pass the inputs alone"
        )
    if "indices" in text and "Long" in text and not any(t.dtype == torch.int64 for t in given):
        got = _name(given[0].dtype) if given else "others"
        return f"expected inputs of type int64, the numbers that an embedding looks up, got {got}; pass inputs.long()"
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    others = sorted((t.dtype for t in given if t.dtype not in kinds), key=lambda dtype: dtype == torch.bool)
    if others and len(kinds) == 1 and _WRONG_TYPE.search(text):  # a mask is boolean beside the inputs
        wanted, got = _name(*kinds), _name(others[0])
        scale = ", and scale bytes to about unit variance" if others[0] == torch.uint8 else ""
        return (
            f"expected inputs of type {wanted}, as the weights have, got {got}; convert them with "
            f"inputs.to(torch.{wanted}){scale}"
        )
    if model.training and _TARGETS.search(text):
        return (
            f"expected the targets that {type(model).__name__} reads in training mode among the inputs, got none "
            f"({brief(error)}); pass (inputs, targets) as its arguments, or call model.eval()"
        )
    return None


@contextmanager
def explained_failures(model: nn.Module, arguments: Any) -> Iterator[None]:
    """Turn an error of a forward pass by arguments of a wrong kind into one sentence; other errors stay."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        if (message := explain_failure(model, arguments, error)) is None:
            raise
        raise ValueError(message) from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_targets(scores: Tensor, targets: Any) -> None:
    """Refuse targets that the cross-entropy of these scores (N, classes, …) cannot use.

    Raises:
        ValueError: With the shape, type and range that are expected.
    """
    if scores.dim() == 0:
        return
    axis = min(1, scores.dim() - 1)
    classes, shape = scores.shape[axis], (*scores.shape[:axis], *scores.shape[axis + 1 :])
    if isinstance(targets, Tensor):
        if targets.is_floating_point() and targets.shape == scores.shape:  # probabilities
            return
        one_hot = targets.shape == scores.shape
        numbers = targets.dtype in (torch.int64, torch.uint8) and targets.shape == shape
        got = f"{_name(targets.dtype)} of shape {tuple(targets.shape)}"
        if numbers:
            counted = targets if targets.is_meta else targets[targets != _IGNORED]
            if counted.is_meta or not counted.numel() or bool(((counted >= 0) & (counted < classes)).all()):
                return
            got = f"numbers from {int(counted.min())} to {int(counted.max())}"
    else:
        one_hot, got = False, f"a {type(targets).__name__}"
    remedy = "loss= for other targets, such as loss=torch.nn.functional.mse_loss, or a model with an output per class"
    raise ValueError(
        f"expected targets of cross-entropy for an output of shape {tuple(scores.shape)}: an int64 tensor of shape "
        f"{tuple(shape)} with classes from 0 to {classes - 1}, or probabilities of the output's shape, got {got}; pass "
        f"{f'targets.argmax({axis})' if one_hot else remedy}"
    )


def call_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> Tensor:
    """Call a loss of the user.

    Raises:
        ValueError: If it fails without targets. With targets, its own error is raised.
    """
    try:
        return loss(output, targets)
    except (TypeError, AttributeError, ValueError) as error:
        if targets is not None:
            raise
        raise ValueError(
            f"expected targets for the loss {getattr(loss, '__name__', type(loss).__name__)}, got None, with which it "
            f"failed: {error}; pass targets, or a loss that ignores its second argument"
        ) from error
