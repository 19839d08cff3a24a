"""The command line: all verbs in one app, and each error in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from normfree import __version__
from normfree.cli.compare import compare_methods, make_demo
from normfree.cli.convert import convert_model
from normfree.cli.data import get_data, list_data, prepare_text_files
from normfree.cli.diagnose import diagnose_model
from normfree.cli.lists import list_methods, list_models
from normfree.cli.lr import find_rate
from normfree.cli.reproduce import reproduce_claims
from normfree.cli.runs import check_folders, evaluate_run, watch_runs
from normfree.cli.text import continue_lines, translate_lines
from normfree.cli.train import train_model
from normfree.cli.tune import tune_settings
from normfree.report.terminal import printable


class Verb(TyperCommand):
    """A command that refuses an empty value, and an option given twice unless it may be repeated.

    An unset variable of the shell gives an empty value, and an empty folder name would mean the current folder. Of an
    option given twice the last one would count, and the first would be silently ignored.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ValueError: if a value is empty, or an option that may not be repeated is given twice.
        """
        if ctx.resilient_parsing:  # a shell completes a command that is not finished
            return super().parse_args(ctx, args)
        parsed: tuple[dict[str, Any], list[str], list[Any]] = self.make_parser(ctx).parse_args(args=list(args))
        typed, _, found = parsed
        for option in found:
            value = typed.get(option.name)
            values = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(one, str) and not one.strip() for one in values):
                is_option = option.param_type_name == "option"
                name = max(option.opts, key=len) if is_option else option.metavar or option.name
                rest = "give one, or leave the option out" if is_option else "give one"
                raise ValueError(f"expected a value for {name}, got an empty one; {rest}")
            if found.count(option) > 1 and not (option.multiple or option.is_flag):
                names = " or ".join(name for name in option.opts if name.startswith("--"))
                raise ValueError(f"{names} was given {found.count(option)} times; give it once")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="normfree",
    help="Train deep residual networks without normalization layers, and see why it works.",
    epilog="An error is one line; set NORMFREE_TRACEBACK=1 to see where it came from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(verbs: typer.Typer, name: str, function: Callable[..., None], *, alone_is_help: bool = False) -> None:
    """Add a verb; its help is the docstring, with paragraphs wrapped to the width of the terminal."""
    text = "\n\n".join(" ".join(part.split()) for part in cleandoc(function.__doc__ or "").split("\n\n"))
    verbs.command(name, cls=Verb, help=text, no_args_is_help=alone_is_help)(function)


_add(app, "methods", list_methods)
_add(app, "models", list_models)
_add(app, "diagnose", diagnose_model)
_add(app, "convert", convert_model)
_add(app, "lr", find_rate)
_add(app, "train", train_model)
_add(app, "watch", watch_runs)
_add(app, "evaluate", evaluate_run)
_add(app, "check", check_folders, alone_is_help=True)
_add(app, "translate", translate_lines)
_add(app, "continue", continue_lines)
_add(app, "compare", compare_methods, alone_is_help=True)
_add(app, "tune", tune_settings, alone_is_help=True)
_add(app, "reproduce", reproduce_claims)
_add(app, "demo", make_demo)
data_app = typer.Typer(help="Fetch data sets, list them, and prepare text.", no_args_is_help=True)
_add(data_app, "get", get_data)
_add(data_app, "list", list_data)
_add(data_app, "prepare", prepare_text_files)
app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normfree {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; an error of the library or of usage is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # for terminals without √ and α
    try:
        sys.exit(app(arguments, prog_name="normfree", standalone_mode=False))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # without arguments the help is the answer
            if error.format_message():  # not shown yet
                error.show()
            sys.exit(error.exit_code)
        sentence = _usage_sentence(error)
    except typer.Abort as error:  # typer raises it at the end of a file and, in older versions, at ctrl-C
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        sentence = str(error.__cause__ or "stopped")
    except (ValueError, OSError) as error:
        if os.environ.get("NORMFREE_TRACEBACK"):
            raise
        sentence = " ".join(str(error).split())
    print("error:", printable(sentence), file=sys.stderr)
    sys.exit(2)


_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's copy of click


def _usage_sentence(error: Any) -> str:
    """Describe a usage error in one sentence, with the remedy."""
    sentence = str(error.format_message()).rstrip(".")
    if error.ctx is None:
        return sentence
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    if any("--set" in parameter.opts for parameter in error.ctx.command.params):
        from normfree.train.config import TrainConfig

        if option in TrainConfig.__dataclass_fields__:
            return f"No such option: {error.option_name}; a setting is given as --set {option}=…"
        if "unexpected extra argument" in sentence and "=" in sentence:
            return f"{sentence}; a setting is given as --set NAME=VALUE"
        if "unexpected extra argument" in sentence and any("--recipe" in p.opts for p in error.ctx.command.params):
            return f"{sentence}; a recipe is given as --recipe NAME, a model as --model NAME"
    return f"{sentence}{' See' if sentence.endswith('?') else '; see'} {error.ctx.command_path} -h"
