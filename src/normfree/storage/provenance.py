"""The origin of a stored number: commit, versions and hardware, without the name of a folder, user or host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from normfree import __version__

RELEASE = ".".join(__version__.split(".")[:2])
"""The release that defines today's methods; stored runs and conversions name theirs under the key 'normfree'."""
_PATH = re.compile(r"(?<![\w/.~])~?(?:/[\w.+@~-]+){2,}")  # an absolute path inside a text; a URL has two slashes
_NAMED = re.compile(r"[a-z]+:(?!//)")  # the kind before a folder of data, such as 'pairs:.data/multi30k'


def origin(device: str = "cpu") -> dict[str, Any]:
    """Commit, versions, hardware and date, as a stored result names them."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "versions": versions(), "hardware": hardware(device), "date": date}


def commit() -> str:
    """The commit of the package's source, with '+dirty' if it was changed since, or 'none' outside a repository.

    The environment variable NORMFREE_COMMIT takes precedence, because a copy on another machine may carry an older
    repository, or none.
    """
    if given := os.environ.get("NORMFREE_COMMIT"):
        return given
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]  # a lock would keep someone from committing meanwhile
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails for a package installed inside another repository
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def versions() -> dict[str, str]:
    """The versions of Python, torch, numpy and normfree."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return {**found, "normfree": __version__}


def hardware(device: str = "cpu") -> dict[str, Any]:
    """The processor's model and number of cores, the threads that torch uses, and the GPU's name if one is used."""
    import torch

    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_folders(value: Any) -> Any:
    """Cut absolute paths in plain data to their last part.

    >>> without_folders({"data": "/home/me/.data", "why": "no room in '/home/me/run'", "speed": "9 images/s"})
    {'data': '.data', 'why': "no room in 'run'", 'speed': '9 images/s'}
    >>> without_folders(["pairs:/home/me and you/de-en", "--set data=text:/home/me/a", "https://a.org/b/c"])
    ['pairs:de-en', '--set data=text:a', 'https://a.org/b/c']
    """
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str):
        return value
    named = _NAMED.match(value)
    kind = named[0] if named else ""
    if PurePath(value.removeprefix(kind)).is_absolute():
        return kind + PurePath(value).name
    return _PATH.sub(lambda match: match[0].rpartition("/")[2], value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
