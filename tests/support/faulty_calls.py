"""Faults of a process at the system calls with which it changes files: a kill, half a write, an error, a full disk.

A small C library, made from faulty_calls.c, is loaded before the C library and counts these calls, so that Python,
torch and safetensors all meet it. `forked_runs` starts processes with it.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

KINDS = ("recorded", "killed", "killed in a write", "input/output error", "disk full")


class Fault(NamedTuple):
    """A fault at one call."""

    kind: str  # one of KINDS; "recorded" is none
    folder: str  # only calls that change something below it count
    place: int  # the number of the call, from 1; the disk stays full from there on
    log: str  # a file for the calls, a line each: what, and where


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
    """Let this process meet a fault; the library has to be loaded."""
    kind, log = KINDS.index(fault.kind), fault.log.encode()
    ctypes.CDLL(None).faulty_calls_begin(fault.folder.encode(), kind, ctypes.c_long(fault.place), log)
