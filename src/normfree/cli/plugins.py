"""Modules of the user that add methods, imported before a verb runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE", help="Import a module that registers methods; may be repeated."),
]


def load_plugins(modules: Sequence[str] | None) -> None:
    """Import modules by name, from the current folder or the environment.

    Raises:
        ValueError: if a name is not a module's, the module or one that it imports is not found, or it stops.
    """
    if not modules:
        return
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the installed script does not look in the current folder
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(
                f"--plugin: expected the name of a module such as 'my_methods', got {module!r}; "
                "leave out folders and the ending .py"
            )
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module == missing or module.startswith(f"{missing}."):
                raise ValueError(
                    f"--plugin: expected a module that can be imported, got {module!r}, which was not found; "
                    "run in its folder or install it"
                ) from error
            raise ValueError(f"--plugin: {module!r} imports {missing!r}, which was not found; install it") from error
        except ValueError:
            raise  # as the library says what is wrong with a method
        except Exception as error:  # whatever the user's own code raises
            from normfree.models.foreign import describe_error

            raise ValueError(
                f"--plugin: expected a module that can be imported, but {module!r} stopped: {describe_error(error)}; "
                "import it in Python to see where"
            ) from error
