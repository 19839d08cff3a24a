"""Settings as a dataclass: help and range beside each field, values from 'name=value', and TOML.

A field has the type str, int, float, bool, a `Literal` of strings or a tuple of numbers; each may be optional.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from normfree.errors import unknown_name
from normfree.storage.reading import read_limited

RANGES: dict[str, Callable[[Any], bool]] = {
    "not to be empty": bool,
    "above 0": lambda x: x > 0,
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: all(0 <= part < 1 for part in (x if isinstance(x, tuple) else (x,))),
    "at least 0 and below 2^63": lambda x: 0 <= x < 2**63,
    "at least 0 and at most 100 million": lambda x: 0 <= x <= 100_000_000,
    "as at least 0 operations and a magnitude of 0 to 30": lambda pair: pair[0] >= 0 and 0 <= pair[1] <= 30,
    "as rising fractions of the run between 0 and 1": (
        lambda points: all(0 <= point <= 1 for point in points) and list(points) == sorted(points)
    ),
}
"""The ranges of settings, in the words of their errors; each tests a value that is not None."""


def setting(default: Any, help: str, range: str | None = None, *, remedy: str = "") -> Any:
    """Declare a dataclass field with its default, its meaning in one line, and the range of its values.

    The range is one of `RANGES`; the remedy ends the error of a value outside of it.
    """
    return field(default=default, metadata={"help": help, "range": range, "remedy": remedy})


def require_in_range(setting: Field[Any], value: Any) -> None:
    """Raise `ValueError` if a value is outside the range of its setting."""
    words = setting.metadata["range"]
    if words is not None and value is not None and not RANGES[words](value):
        got = list(value) if isinstance(value, tuple) else value
        remedy = f"; {setting.metadata['remedy']}" if setting.metadata["remedy"] else ""
        raise ValueError(f"expected '{setting.name}' {words}, got {got!r}{remedy}")


def field_types(settings: Any) -> dict[str, Any]:
    """Return the type of every field by its name."""
    return _cached_types(settings)


_cached_types = cache(get_type_hints)  # behind a function, because mypy considers no dataclass hashable


def require_known(names: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise `ValueError` with the closest known name if one of the names is unknown."""
    known = list(known)
    for name in names:
        if name not in known:
            raise unknown_name("setting", name, known, where)


def require_fields(given: Iterable[str], settings: type) -> None:
    """Raise `TypeError`, as Python does, if a constructor of settings gets an unknown name; name the closest field."""
    try:
        require_known(given, field_types(settings))
    except ValueError as error:
        raise TypeError(str(error)) from None


def coerce(name: str, hint: Any, value: Any) -> Any:
    """Return `value` in the type `hint`; a whole number becomes a float and a list a tuple where the type asks for it.

    >>> coerce("lr", float, 1), coerce("betas", tuple[float, float], [0.9, 0.99])
    (1.0, (0.9, 0.99))

    Raises `ValueError` if the value has another type, is not finite, or is not among the choices.
    """
    hint, optional = _without_none(hint)
    if value is None and optional:
        return None
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise unknown_name(f"value of '{name}'", str(value), get_args(hint))
        return value
    if get_origin(hint) is tuple:
        return _coerce_tuple(name, get_args(hint), value)
    if isinstance(value, bool):
        if hint is bool:
            return value
    elif hint is float and isinstance(value, Real) and (number := _finite(value)) is not None:
        return number
    elif hint is int and isinstance(value, Integral):
        return int(value)
    if hint is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    noun = (
        "a finite number" if hint is float and isinstance(value, Real) and not isinstance(value, bool) else _NOUN[hint]
    )
    raise ValueError(f"expected {noun} for '{name}', got {value!r}")


def _finite(value: Real) -> float | None:
    """Return a number of any type, NumPy's included, as a float; None if that is not finite."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_NOUN = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether None is allowed."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (other,) = (h for h in get_args(hint) if h is not NoneType)
    return other, True


def _coerce_tuple(name: str, kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    any_length = kinds[-1] is Ellipsis
    if not isinstance(value, list | tuple) or not (any_length or len(value) == len(kinds)):
        expected = "a list of numbers" if any_length else f"a list of {len(kinds)} numbers"
        raise ValueError(f"expected {expected} for '{name}', got {value!r}")
    return tuple(coerce(name, kinds[0], item) for item in value)


def parse_changes(settings: type, texts: Iterable[str]) -> dict[str, Any]:
    """Parse strings such as 'lr=0.2' or 'milestones=[0.5,0.75]' into values of the fields of `settings`.

    Raises `ValueError` if a string has no '=', a name is unknown or repeated, or a value has the wrong type.
    """
    types = field_types(settings)
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ValueError(f"expected a change as 'name=value', such as 'lr=0.2', got '{text}'")
        require_known([name], types)
        if name in changes:
            raise ValueError(f"expected each setting once, got '{name}' twice; leave one out")
        changes[name] = coerce(name, types[name], _value(types[name], value))
    return changes


def _value(hint: Any, text: str) -> Any:
    """Parse a string as a type; a string that cannot be parsed is returned unchanged, and `coerce` refuses it."""
    hint, optional = _without_none(hint)
    if optional and text.lower() == "none":
        return None
    if get_origin(hint) is tuple:
        inner = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
        return [_value(get_args(hint)[0], part.strip()) for part in inner.split(",") if part.strip()]
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file of settings; raise `FileNotFoundError`, or `ValueError` if it is not TOML."""
    try:
        return parse_toml(read_limited(Path(path)), path)
    except FileNotFoundError:
        raise FileNotFoundError(f"expected a file of settings at '{path}', found none; check the name") from None


def parse_toml(raw: bytes, path: str | Path) -> dict[str, Any]:
    """Parse TOML that a file holds; raise `ValueError` with its path if it is damaged."""
    try:
        return tomllib.loads(raw.decode())
    except RecursionError:
        raise ValueError(f"the file '{path}' is not valid TOML (it is nested too deeply); correct it there") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the file '{path}' is not valid TOML ({error}); correct it there") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Render a flat mapping of strings, numbers, booleans and lists of these as TOML; None is left out.

    >>> print(to_toml({"lr": 0.1, "form": None, "betas": (0.9, 0.99), "flip": True}), end="")
    lr = 0.1
    betas = [0.9, 0.99]
    flip = true
    """
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items() if value is not None)


def explained_toml(settings: Any) -> str:
    """Render settings as TOML with the choices and the help of each as a comment; one that is None is commented out."""
    given = asdict(settings)
    lines = []
    for setting in fields(settings):
        value = given[setting.name]
        line = f"# {setting.name} = …" if value is None else f"{setting.name} = {_toml_value(value)}"
        hint, _ = _without_none(field_types(type(settings))[setting.name])
        choices = ", ".join(map(_toml_value, get_args(hint))) if get_origin(hint) is Literal else ""
        lines.append(f"{line:32}  # {choices}{': ' if choices else ''}{setting.metadata['help']}\n")
    return "".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON escapes a string as TOML does, except DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
