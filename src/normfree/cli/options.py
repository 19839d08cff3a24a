"""The option that means the same to every verb, and the refusal of options that would be ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

DEVICE = typer.Option("--device", metavar="NAME", help="cpu, cuda, …; auto takes the best there is.")


class Verb(TyperCommand):
    """A command that takes each option once, but for those that may come again: of two the last alone would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As for any command; raises `ValueError` for an option that comes again."""
        found: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option in found:
            if found.count(option) > 1 and not (option.multiple or option.is_flag):
                names = " or ".join(name for name in option.opts if name.startswith("--"))
                raise ValueError(f"expected {names} once, got it {found.count(option)} times; leave all but one out")
        return super().parse_args(ctx, args)


def given(context: typer.Context) -> list[str]:
    """What was typed: the arguments, and the options by their first names."""
    typed: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[str(parameter.name)]
        values = map(str, value) if isinstance(value, list | tuple) else [str(value)]
        typed += [parameter.opts[0]] if parameter.param_type_name == "option" else values
    return typed


def require_alone(context: typer.Context, option: str, beside: Sequence[str] = ()) -> None:
    """Refuse all but `beside` where `option` was typed, which would leave it without effect."""
    typed = given(context)
    if option in typed and (others := [name for name in typed if name not in (option, *beside)]):
        raise ValueError(f"expected {option} alone, got also {', '.join(others)}; leave one of them out")


def require_either(context: typer.Context, option: str, others: Sequence[str], why: str) -> None:
    """Refuse `others` where `option` was typed, too; `why` says which of them would be left without effect."""
    for name in others:
        if {option, name} <= set(given(context)):
            raise ValueError(f"expected {option} or {name}, got both; {why}")
