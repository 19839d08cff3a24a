"""The registry of methods: by name, with options, open to methods from outside."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from normfree.methods.method import Method
from normfree.theory.errors import unknown_name

Factory = Callable[..., Method]
_T = TypeVar("_T", Method, Factory)
_FACTORIES: dict[str, Factory] = {}


def register(method: _T) -> _T:
    """Add a method: a record, or a function that returns one and whose keyword arguments are the method's options.

    Works as a decorator. Raises `ValueError` when the name is taken.
    """
    factory: Factory = (lambda: method) if isinstance(method, Method) else method
    name = factory().name
    if name in _FACTORIES:
        raise ValueError(f"expected a new method name, got '{name}', which is registered; choose another name")
    if not name.isidentifier():
        raise ValueError(f"expected a method name of letters, digits and underscores, got '{name}'")
    _FACTORIES[name] = factory
    return method


def unregister(name: str) -> None:
    """Take a method out again, so that a plug-in or a test can clean up after itself."""
    if name not in _FACTORIES:
        raise unknown_name("method", name, _FACTORIES)
    del _FACTORIES[name]


def names() -> list[str]:
    """The names of all methods, in the order of the table."""
    return list(_FACTORIES)


def description(name: str) -> str:
    """What the function that makes a method says of it; '' of one that was registered as a record."""
    return inspect.getdoc(_FACTORIES[name]) or ""


def get(spec: str | Method) -> Method:
    """The method that a string such as 'hanin:r=0.9' names; a record is returned as it is.

    >>> get("hanin:r=0.5").options
    {'r': 0.5}
    """
    if isinstance(spec, Method):
        return spec
    name, _, text = spec.partition(":")
    if name not in _FACTORIES:
        error = unknown_name("method", name, _FACTORIES)
        if "did you mean" in str(error):
            raise error
        raise ValueError(f"{error}; one of your own is known once its module is imported (--plugin MODULE)")
    factory = _FACTORIES[name]
    defaults = {key: p.default for key, p in inspect.signature(factory).parameters.items()}
    options: dict[str, object] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"expected options as 'name:key=value,…' in '{spec}', got '{pair}'")
        if key not in defaults:
            raise unknown_name(f"option of method '{name}'", key, defaults)
        if key in options:
            raise ValueError(f"expected each option once in '{spec}', got '{key}' twice")
        options[key] = _convert(f"option '{key}' of method '{name}'", value, defaults[key])
    return replace(factory(**options), options={**defaults, **options})


def _convert(where: str, text: str, default: object) -> object:
    """Read an option's text as the type of its default."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"expected true or false for {where}, got '{text}'")
        return text.lower() == "true"
    if isinstance(default, float | int):
        try:
            number = type(default)(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            kind = "a number" if isinstance(default, float) else "a whole number"
            raise ValueError(f"expected {kind} for {where}, got '{text}'")
        return number
    return text
