"""Settings as text: values of a dataclass checked against its types, read from 'name=value', written as TOML.

Works on any dataclass whose fields are str, int, float, bool, a choice of texts, a tuple of numbers, or None beside one
of these.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def hints(settings: Any) -> dict[str, Any]:
    """The type of every field, by name."""
    return _hints(settings)


_hints = cache(get_type_hints)  # behind a function, since mypy takes no dataclass for hashable


def require_known(name: str, known: Iterable[str], where: str = "") -> None:
    """Raise `ValueError` for a name that is not among the known ones, with the closest that is."""
    known = list(known)
    if name not in known:
        from normfree.theory.errors import unknown_name

        raise unknown_name("setting", name, known, where)


def checked(name: str, hint: Any, value: Any) -> Any:
    """`value` as the type `hint`, with whole numbers taken for numbers and lists for tuples.

    >>> checked("lr", float, 1), checked("betas", tuple[float, float], [0.9, 0.99])
    (1.0, (0.9, 0.99))

    Raises `ValueError` when it is of another type, is not finite, or is not among the choices.
    """
    hint, optional = _without_none(hint)
    if value is None and optional:
        return None
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            from normfree.theory.errors import unknown_name

            raise unknown_name(f"value of '{name}'", str(value), get_args(hint))
        return value
    if get_origin(hint) is tuple:
        return _checked_tuple(name, get_args(hint), value)
    if isinstance(value, bool):
        if hint is bool:
            return value
    elif hint is float and isinstance(value, Real) and (number := _finite(value)) is not None:
        return number
    elif hint is int and isinstance(value, Integral):
        return int(value)
    if hint is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ValueError(f"expected {_NOUN[hint]} for '{name}', got {value!r}")


def _finite(value: Real) -> float | None:
    """A number of any kind, NumPy's too, as a float; None where it is not finite as one."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_NOUN = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type beside None, and whether None is allowed."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (other,) = (h for h in get_args(hint) if h is not NoneType)
    return other, True


def _checked_tuple(name: str, kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    any_length = kinds[-1] is Ellipsis
    if not isinstance(value, list | tuple) or not (any_length or len(value) == len(kinds)):
        expected = "a list of numbers" if any_length else f"a list of {len(kinds)} numbers"
        raise ValueError(f"expected {expected} for '{name}', got {value!r}")
    return tuple(checked(name, kinds[0], item) for item in value)


def parsed(settings: type, texts: Iterable[str]) -> dict[str, Any]:
    """Read texts such as 'lr=0.2' or 'milestones=[0.5,0.75]' as values of the fields of `settings`.

    Raises `ValueError` for a text without '=', an unknown or repeated name, and a value that is not of the type.
    """
    types = hints(settings)
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ValueError(f"expected a change as 'name=value', such as 'lr=0.2', got '{text}'")
        require_known(name, types)
        if name in changes:
            raise ValueError(f"expected each setting once, got '{name}' twice; leave one out")
        changes[name] = checked(name, types[name], _value(types[name], value))
    return changes


def _value(hint: Any, text: str) -> Any:
    """What a text means for a type; where it means nothing, the text itself, for `checked` to refuse."""
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


def toml(values: Mapping[str, Any]) -> str:
    """A flat mapping of texts, numbers, truth values and lists of these as TOML; None is left out.

    >>> print(toml({"lr": 0.1, "form": None, "betas": (0.9, 0.99), "flip": True}), end="")
    lr = 0.1
    betas = [0.9, 0.99]
    flip = true
    """
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items() if value is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON escapes a text as TOML does, but for DEL, which TOML does not allow as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
