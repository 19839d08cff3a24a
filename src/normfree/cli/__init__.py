"""The command line: one file a verb, each loading what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from normfree import __version__
from normfree.cli.compare import compare_methods
from normfree.cli.convert import convert_model
from normfree.cli.data import data_app
from normfree.cli.demo import make_demo
from normfree.cli.diagnose import diagnose_model
from normfree.cli.methods import list_methods
from normfree.cli.models import list_models
from normfree.cli.reproduce import reproduce_claims
from normfree.cli.text import continue_lines, prepare_text_files, translate_lines
from normfree.cli.train import evaluate_run, train_model

app = typer.Typer(
    name="normfree",
    help="Train deep residual networks without normalization layers, and see why it works.",
    epilog="An error is one line; set NORMFREE_TRACEBACK=1 to see where it came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("methods")(list_methods)
app.command("models")(list_models)
app.command("diagnose")(diagnose_model)
app.command("convert")(convert_model)
app.command("train")(train_model)
app.command("evaluate")(evaluate_run)
app.command("translate")(translate_lines)
app.command("continue")(continue_lines)
app.command("compare")(compare_methods)
app.command("reproduce")(reproduce_claims)
data_app.command("prepare")(prepare_text_files)
app.add_typer(data_app, name="data")
app.command("demo")(make_demo)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of the library becomes one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # √ and α on a terminal that lacks them
    try:
        app(arguments, prog_name="normfree")
    except (ValueError, OSError) as error:
        if os.environ.get("NORMFREE_TRACEBACK"):
            raise
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
