"""Connect to a Ray cluster or start one on this machine, and leave this process as it was.

Ray changes environment variables, the handler of SIGTERM, `sys.excepthook`, the fault handler and its log.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 10.0  # for an answer from a cluster; Ray itself would try for minutes
_ATTEMPTS = 2  # a busy head may start the server of a client too late
_LETTERS = 200  # of an error of Ray


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster until the end of the `with` block.

    Args:
        address: 'ray://HOST:PORT', or '' for the cluster that RAY_ADDRESS names or that runs on this machine. If there
            is none, Ray starts one, which ends with the block or with this process.

    Raises:
        ValueError: if the cluster cannot be reached.
    """
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    require_reachable(address)
    with _state_restored():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the workers of a cluster that starts here
        with _signal_handlers_kept(), _quiet():
            import ray

            if ray.is_initialized():
                raise ValueError("expected a process without a Ray connection of its own; call ray.shutdown() first")
            options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
            if not wanted.startswith("ray://"):
                options["include_dashboard"] = False
            for attempt in range(_ATTEMPTS):
                try:
                    ray.init(address=address or None, **options)
                    break
                except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
                    if attempt + 1 < _ATTEMPTS and isinstance(error, ConnectionError):
                        continue
                    raise ValueError(
                        f"expected a Ray cluster {_place(wanted)}, but the connection failed: {first_line(error)}; "
                        "start one with `ray start --head`, and use the same releases of Ray and Python on all nodes"
                    ) from error
        with _messages_hidden():  # until Ray has ended, because some of them come late
            try:
                yield
            finally:
                with _quiet():
                    ray.shutdown()


def _place(address: str) -> str:
    return f"at '{address}'" if address else "on this machine"


def require_reachable(address: str) -> None:
    """Raise `ValueError` if nothing listens at an address, or at that of RAY_ADDRESS; Ray itself would try for minutes.

    Args:
        address: 'ray://HOST:PORT', or '' for the cluster that Ray finds.
    """
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    sample = "ray://HOST:10001" if address.startswith("ray:") else "HOST:6379"
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path or parts.query:
        raise ValueError(f"expected the address of a cluster such as {sample}, got '{address}'")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"expected a Ray cluster at '{address}', but nothing answers there ({error.strerror or error}); check the "
            "address, or start one with `ray start --head`"
        ) from error


@contextmanager
def _state_restored() -> Iterator[None]:
    """Restore the environment variables, `sys.excepthook` and the fault handler."""
    environment, hook, faults = dict(os.environ), sys.excepthook, faulthandler.is_enabled()
    try:
        yield
    finally:
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        sys.excepthook = hook
        if not faults:
            faulthandler.disable()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which the caller may have set to let its runs save."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's log from the terminal; its errors are exceptions, and its own log files have the rest."""
    log = logging.getLogger("ray")
    handlers, propagates, level = list(log.handlers), log.propagate, log.level
    log.handlers[:], log.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        log.handlers[:], log.propagate = handlers, propagates
        log.setLevel(level)


@contextmanager
def _messages_hidden() -> Iterator[None]:
    """Keep the lines of Ray about lost nodes and workers from stdout, where a table or JSON belongs.

    Ray has no public switch for them; in a release without this one, they are printed.
    """
    from ray._private import worker

    shown = getattr(worker, "_worker_logs_enabled", None)
    if shown is None:
        yield
        return
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = shown


def first_line(error: BaseException) -> str:
    """Return the text of an error in one line of moderate length."""
    return shorten(str(error) or type(error).__name__, _LETTERS, placeholder=" …")
