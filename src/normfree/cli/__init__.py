"""The command line: one file per verb; each imports the library when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ctrl-C ends it without a traceback, even while modules are imported."""
    try:
        from normfree.cli.verbs import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)  # as in a shell
