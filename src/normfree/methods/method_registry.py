"""Methods by name: `register` and `get`, options in a name such as 'hanin:r=0.8', and names of earlier releases."""

from __future__ import annotations

import copyreg
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from normfree.errors import unknown_name, wrong_argument
from normfree.methods.method import Method, options_text
from normfree.storage.provenance import RELEASE

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
    if not isinstance(method, Method) and not callable(method):
        expected = "a Method or a function that returns one"
        raise wrong_argument("registered", expected, method, "decorate a function that returns a Method")
    factory: Factory = (lambda: method) if isinstance(method, Method) else method
    name = factory().name
    if name in _FACTORIES:
        raise ValueError(f"expected a new method name, got '{name}', which is registered; choose another name")
    if not name.isidentifier():
        raise ValueError(f"expected a method name of letters, digits and underscores, got '{name}'")
    _FACTORIES[name] = cache(factory)  # so that one spec gives equal methods, even if their functions are lambdas
    return method


def _reduce(method: Method) -> tuple[Any, ...]:
    """Pickle a registered method as its spec, since a plug-in's functions may be lambdas; any other by value."""
    try:
        registered = get(method.spec) == method
    except ValueError:  # unknown name or option
        registered = False
    return (get, (method.spec,)) if registered else method.__reduce_ex__(2)  # type: ignore[return-value]


copyreg.pickle(Method, _reduce)


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
    if not isinstance(spec, str):
        raise wrong_argument(
            "method", "a method or its name", spec, "pass a name such as 'fixup'; see normfree methods"
        )
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
            raise unknown_name("option", key, defaults, where=f" of method '{name}'")
        if key in given:
            raise ValueError(f"expected each option once in '{spec}', got '{key}' twice")
        given[key] = _convert(f"option '{key}' of method '{name}'", value, defaults[key])
    return name, {**defaults, **given}


def short_spec(spec: str) -> str:
    """Return a method as a person writes it, with those options only that differ from their defaults.

    >>> short_spec("hanin:r=0.9"), short_spec("hanin:r=0.8")
    ('hanin', 'hanin:r=0.8')

    A method that is not registered here is returned unchanged.
    """
    try:
        name, options = parse_spec(spec)
        defaults = parse_spec(name)[1]
    except ValueError:
        return spec
    shown = options_text({key: value for key, value in options.items() if value != defaults[key]}, ",")
    return f"{name}:{shown}" if shown else name


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


FIRST_RELEASE = "0.1"
"""The release of stored runs and conversions that do not name theirs."""


class Earlier(NamedTuple):
    """An earlier definition of a method: the options that restore it, and a pattern of the models that it differs for.

    The names of third-party models, which a method converts, are '' or have a colon.
    """

    method: str
    options: str
    models: str = ".*"


_TRANSFORMERS = r"(transformer|encoder|decoder)-.*|.*:.*|"  # and third-party models, which may be Transformers
CHANGES: dict[str, tuple[Earlier, ...]] = {  # by the release that brought the new definition
    "0.2": (
        Earlier("nf", "bias=false"),
        Earlier("nf_he", "bias=false"),
        Earlier("wn", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_data", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_hanin", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_default", "stem_relu=true", r"resnet\d+"),
        Earlier("wn_default", "directions=he"),
        Earlier("fixup", "slow_biases=false"),
        Earlier("fixup", "scalar_lr=0.1", _TRANSFORMERS),
        Earlier("fixup", "transformer=biased", _TRANSFORMERS),
        Earlier("fixup_bounded", "scalar_lr=0.1", _TRANSFORMERS),
        Earlier("fixup_bounded", "transformer=biased", _TRANSFORMERS),
        Earlier("lsuv", "by=layer", r"(?!(mlp|cnn|dense|highway)-).*"),
    ),
}


def as_of(spec: str, release: str, model: str = "") -> str:
    """Return today's spelling of a method of an earlier release, for a model; other options stay.

    >>> as_of("nf:beta=1", "0.1"), as_of("wn", "0.1", "resnet56"), as_of("wn", "0.1", "wrn-40-10")
    ('nf:beta=1,bias=false', 'wn:stem_relu=true', 'wn')

    Args:
        spec: The method, as that release wrote it.
        release: The release, such as '0.1'.
        model: The name of the model; '' for one without a name, which the method converted.

    Raises:
        ValueError: If the release is unknown.
    """
    known = [FIRST_RELEASE, *CHANGES]
    if release not in known:
        raise ValueError(
            f"expected a release of normfree up to {RELEASE}, got '{release}'; install that release to read its files"
        )
    name, _, text = spec.partition(":")
    options = [part for part in text.split(",") if part]
    given = {option.partition("=")[0].strip() for option in options}
    for changed in known[known.index(release) + 1 :]:
        for earlier in CHANGES[changed]:
            key = earlier.options.partition("=")[0]
            if earlier.method == name and key not in given and re.fullmatch(earlier.models, model):
                options.append(earlier.options)
                given.add(key)
    return f"{name}:{','.join(options)}" if options else name
