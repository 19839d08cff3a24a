"""The command line: one file a verb, each loading what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ctrl-C ends it quietly, also while modules are imported."""
    try:
        from normfree.cli.verbs import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says it
