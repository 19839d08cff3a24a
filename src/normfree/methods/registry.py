"""The registry of methods: look them up by name and options, and add your own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from normfree.methods.method import Method
from normfree.theory.errors import unknown_name

Factory = Callable[..., Method]
_T = TypeVar("_T", Method, Factory)
_FACTORIES: dict[str, Factory] = {}


def register(method: _T) -> _T:
    """Add a method to the registry, so that its name works wherever normfree takes a method.

    Works as a decorator.

    Args:
        method: A `Method`, or a function that returns one. The function's keyword arguments are the method's options,
            and their defaults set the options' types: with `def mine(*, r: float = 0.9)`, `"mine:r=0.5"` works.

    Returns:
        The argument.

    Raises:
        ValueError: If the name is taken or not an identifier.
    """
    factory: Factory = (lambda: method) if isinstance(method, Method) else method
    name = factory().name
    if name in _FACTORIES:
        raise ValueError(f"expected a new method name, got '{name}', which is registered; choose another name")
    if not name.isidentifier():
        raise ValueError(f"expected a method name of letters, digits and underscores, got '{name}'")
    _FACTORIES[name] = cache(factory)  # so that one spec gives equal methods, even if their functions are lambdas
    return method


def unregister(name: str) -> None:
    """Remove a method from the registry, so that a plug-in or a test can clean up after itself."""
    if name not in _FACTORIES:
        raise unknown_name("method", name, _FACTORIES)
    del _FACTORIES[name]


def names() -> list[str]:
    """Return the names of all methods, in the order of the table."""
    return list(_FACTORIES)


def description(name: str) -> str:
    """Return the docstring of the function that makes a method, or '' if a record was registered."""
    return inspect.getdoc(_FACTORIES[name]) or ""


def get(spec: str | Method) -> Method:
    """Return the method for a string such as 'hanin:r=0.9'.

    >>> get("hanin:r=0.5").options
    {'r': 0.5}

    Args:
        spec: A registered name, with options after a colon; a `Method` is returned unchanged.

    Raises:
        ValueError: If the name or an option is unknown, or an option's value is invalid.
    """
    if isinstance(spec, Method):
        return spec
    name, options = parse_spec(spec)
    return replace(_FACTORIES[name](**options), options=options)


def parse_spec(spec: str) -> tuple[str, dict[str, object]]:
    """Return the name of a method and all its options, those at their defaults too, without making the method.

    Raises:
        ValueError: If the name or an option is unknown, or a value has the wrong type.
    """
    name, _, text = spec.partition(":")
    if name not in _FACTORIES:
        error = unknown_name("method", name, _FACTORIES)
        if "did you mean" in str(error):
            raise error
        raise ValueError(f"{error}; import your own method's module first (--plugin MODULE)")
    defaults = {key: p.default for key, p in inspect.signature(_FACTORIES[name]).parameters.items()}
    given: dict[str, object] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"expected options as 'name:key=value,…' in '{spec}', got '{pair}'")
        if key not in defaults:
            raise unknown_name(f"option of method '{name}'", key, defaults)
        if key in given:
            raise ValueError(f"expected each option once in '{spec}', got '{key}' twice")
        given[key] = _convert(f"option '{key}' of method '{name}'", value, defaults[key])
    return name, {**defaults, **given}


def _convert(where: str, text: str, default: object) -> object:
    """Convert an option's text to the type of its default."""
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
