"""Faults of a process at one of its calls: a kill, half a write, an error, a full disk, a stop.

The calls are those that change files, those that open files to read them, or the messages of torch.distributed. A small
C library, made from faulty_calls.c, is loaded before the C library and counts the first two, so that Python, torch and
safetensors all meet it. `forked_runs` starts processes with it.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("recorded", "killed", "killed in a write", "input/output error", "disk full", "killed later", "stopped")
MESSAGES = (
    "init_process_group", "new_group", "all_reduce", "broadcast", "barrier", "broadcast_object_list",
    "all_gather_object", "gather_object", "scatter_object_list",
)  # fmt: skip


class Fault(NamedTuple):
    """A fault at one call."""

    kind: str  # one of KINDS; "recorded" is none, and "killed later" lets other threads go on for a moment
    folder: str  # only calls that concern something below it count
    place: int  # the number of the call, from 1; the disk stays full from there on
    log: str  # a file for the calls, a line each: what, in which thread, and where
    calls: str = "changes"  # or "reads" or "messages"
    who: str = ""  # the process itself, the first "fork" or the first "spawn" of it, or the rank "0" or "1"


def build_library(folder: Path) -> Path | None:
    """Compile the library into a folder, or return None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "faulty_calls.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def meet(fault: Fault) -> None:
    """Let this process, or one that it starts, meet a fault; the library has to be loaded, except for messages."""
    kind = KINDS.index(fault.kind)
    if fault.who == "fork":
        _in_first_fork(lambda: meet(fault._replace(who="")))
    elif fault.who == "spawn":
        Path(fault.log).unlink(missing_ok=True)
        os.environ["FAULTY_CALLS"] = f"{kind} {fault.place} {fault.log} {fault.folder}"
    elif fault.calls == "messages":
        _meet_at_message(fault)
    else:
        begin, reads = ctypes.CDLL(None).faulty_calls_begin, int(fault.calls == "reads")
        begin(fault.folder.encode(), kind, ctypes.c_long(fault.place), fault.log.encode(), reads)


def _in_first_fork(call: Callable[[], None]) -> None:
    number = -1

    def count() -> None:
        nonlocal number
        number += 1

    os.register_at_fork(before=count, after_in_child=lambda: call() if number == 0 else None)


def _meet_at_message(fault: Fault) -> None:
    """Kill or stop this process before it takes part in its `place`-th message."""
    import torch.distributed as dist

    numbers = iter(range(1, 1_000_000))
    ends = {"recorded": 0, "killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    with open(fault.log, "w", encoding="utf-8") as log:
        file = os.dup(log.fileno())

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.write(file, f"message main {name}\n".encode())
            if next(numbers) == fault.place and ends[fault.kind]:
                os.kill(os.getpid(), ends[fault.kind])
            return original(*args, **kwargs)

        return call

    for name in MESSAGES:
        setattr(dist, name, counted(name, getattr(dist, name)))
