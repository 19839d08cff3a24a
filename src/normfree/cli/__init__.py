"""The command line: one file per verb; `verbs` lists them. A verb imports the library when it runs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ctrl-C ends it without a traceback, even while modules are imported or the process ends.

    Args:
        arguments: The words after `normfree`. By default those of this process; ctrl-C is then handled until it ends.
    """
    ours = arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupt = _Interrupt()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from normfree.cli.verbs import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)  # as in a shell
    finally:
        if ours:
            # From here the process only ends, and Python would answer ctrl-C with a traceback.
            with suppress(OSError, ValueError):  # Python reports a closed pipe when the process ends
                sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            interrupt.forget()


class _Interrupt:
    """Raises `KeyboardInterrupt` at ctrl-C, and again at each later import.

    torch imports NumPy from C and drops any error of it, so that the first one may be lost.
    """

    def __call__(self, *_: Any) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        raise KeyboardInterrupt

    def find_spec(self, *_: Any) -> None:
        """Raise `KeyboardInterrupt` in the main thread; others may end their work."""
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Let modules be imported again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
