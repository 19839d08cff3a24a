"""Third-party models by name: 'torchvision:resnet50', 'timm:convnext_atto', 'package.module:factory'."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from normfree.errors import install_command, unknown_name
from normfree.models.builder import is_foreign

_LIBRARIES = ("torchvision", "timm")


def require_trusted(name: Any, folder: str | Path, trust: bool) -> None:
    """Refuse a model's name that a stored folder gives, unless it is ours, of torchvision or timm, or trusted.

    Args:
        name: The stored name.
        folder: The folder, for the message.
        trust: Whether the user trusts the folder.

    Raises:
        ValueError: If building the model would import a module that the folder chose.
    """
    if not isinstance(name, str):
        raise ValueError(f"expected the name of a model in '{folder}', got {name!r}; pass a factory")
    source, _, target = name.partition(":")
    if is_foreign(name) and source not in _LIBRARIES and not trust:
        raise ValueError(
            f"expected a stored model of torchvision or timm, but '{folder}' names {name!r}: loading it would import "
            f"{source!r} and call {target!r}; pass a factory, or trust=True (--trust) if you trust the folder"
        )


def create_model(name: str, *, classes: int | None = None) -> nn.Module:
    """Build a model with random weights from torchvision, timm, or a factory function of any module.

    Args:
        name: 'torchvision:' or 'timm:' and a model's name, or 'package.module:factory' with a function that takes no
            arguments and returns a model.
        classes: The number of classes of a torchvision or timm model; the default is the model's own.

    Raises:
        ValueError: If the package, module or name is not found, if it raises, or if the result is not a model.
    """
    source, _, target = name.partition(":")
    if not source or not target:
        raise ValueError(f"expected a model such as 'torchvision:resnet50' or 'package.module:factory', got '{name}'")
    asked = {} if classes is None else {"num_classes": classes}
    if source in _LIBRARIES:
        library = _import("timm" if source == "timm" else "torchvision.models", name, install_command("vision"))
        known = library.list_models()
        if target not in known:
            raise unknown_name(f"model of {source}", target, known)
        if source == "timm":
            model = library.create_model(target, pretrained=False, **asked)
        else:
            taken = signature(library.get_model_builder(target)).parameters
            none = dict.fromkeys({"weights", "weights_backbone"} & {*taken})  # else it downloads those of a backbone
            model = library.get_model(target, **none, **asked)
    else:
        factory = import_object(name)
        model = call_factory(factory, name) if callable(factory) and not isinstance(factory, nn.Module) else factory
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected '{name}' to give a torch.nn.Module, got {type(model).__name__}")
    return model


def import_object(name: str, what: str = "model") -> Any:
    """Return the object that 'package.module:name' names; modules of the current folder come first.

    Args:
        name: The module and the name in it.
        what: The kind of object, for messages.

    Raises:
        ValueError: If there is no such module or name, or if the import raises.
    """
    source, _, target = name.partition(":")
    if not target or source.endswith(".py") or not all(part.isidentifier() for part in source.split(".")):
        meant = os.path.splitext(os.path.basename(source))[0]
        instead = f"; write {meant}:{target}" if source.endswith(".py") and target and meant.isidentifier() else ""
        raise ValueError(
            f"expected the name of a module before ':', such as 'package.module:factory', got '{source}'; "
            f"leave out folders and the ending .py{instead}"
        )
    with _current_folder_first():
        found = _import(source, name, "run in its folder or install it", what)
    for part in target.split("."):
        if not hasattr(found, part) and (source == "__main__" or part == "<locals>"):
            raise ValueError(
                f"expected a {what} that other programs can import, got '{name}', which is defined in a script or "
                "inside a function; pass model= to load the run, or use an importable factory"
            )
        if not hasattr(found, part):
            own = [n for n in dir(found) if not n.startswith("_") and not isinstance(getattr(found, n), ModuleType)]
            raise unknown_name("name", part, own, where=f" in '{source}'")
        found = getattr(found, part)
    return found


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Put the current folder first in `sys.path` for a while."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def call_factory(factory: Callable[[], Any], name: str) -> Any:
    """Call a user's function, which `name` names in messages.

    Raises:
        ValueError: If it needs arguments, or raises.
    """
    try:
        signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"expected '{name}' to need no arguments, but calling it failed: {error}; wrap it in a function without any"
        ) from error
    except ValueError:  # it has no signature
        pass
    try:
        return factory()
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"expected '{name}' to run, but it stopped: {describe_error(error)}; call it in Python to see where"
        ) from error


def _import(module: str, name: str, remedy: str, what: str = "model") -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected to import '{error.name}' for {what} '{name}', but it was not found; {remedy}"
        ) from error
    except Exception as error:  # the user's code may raise anything
        if "torchvision::nms does not exist" in str(error) and not _DECLARED:
            _declare_torchvision_operators()
            return _import(module, name, remedy, what)
        raise ValueError(
            f"expected to import '{module}' for {what} '{name}', but it stopped: {describe_error(error)}; "
            "import it in Python to see where"
        ) from error


def describe_error(error: Exception) -> str:
    """Return a third-party error in one line, with its type, because some have no message.

    >>> describe_error(KeyError("width"))
    "KeyError: 'width'"
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_DECLARED: list[torch.library.Library] = []  # a declaration lasts as long as its library lives


def _declare_torchvision_operators() -> None:
    """Declare the two operators without which a torchvision built for GPUs cannot be imported beside a CPU torch.

    They are for object detection; the models themselves never call them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)
    for half_imported in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[half_imported]


# Settings of transformers that fetch weights or kernels, or name code outside the package.
_FETCHING = {
    "auto_map", "custom_pipelines", "trust_remote_code", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation", "use_kernels", "use_pretrained_backbone",
    "quantization_config", "_name_or_path",
}  # fmt: skip


def _without_fetching(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {name: _without_fetching(value) for name, value in config.items() if name not in _FETCHING}


def transformers_model(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """Build a model of transformers from its class name and configuration, with random weights; runs no stored code.

    Raises:
        ValueError: If transformers is not installed, or has no such model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a model of transformers needs that package; run: pip install transformers") from error
    made: Any = getattr(transformers, architecture, None)
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        raise ValueError(
            f"expected the name of a model of transformers, got '{architecture}'; pass a factory of the original model"
        )
    kind: Any = made
    try:
        model: nn.Module = kind(kind.config_class.from_dict(_without_fetching(config)))
    except Exception as error:  # transformers has classes of its own
        raise ValueError(f"expected settings of '{architecture}', got others: {describe_error(error)}") from error
    return model
