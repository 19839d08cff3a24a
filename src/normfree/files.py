"""Files that are written whole or not at all, also when the process is killed or the power fails."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"  # how the names of unfinished files begin; a killed process leaves them behind
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_REMEDIES = {
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "free some room below your quota",
    errno.EFBIG: "raise the limit on the size of a file",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.ENOENT: "make the folder again",
    errno.ENOTDIR: "move the file that lies where a folder should be",
    errno.EEXIST: "move the file that lies where a folder should be",
}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place at the end, and is gone if anything goes wrong before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # a temporary file is its owner's alone
        sync(temporary)  # otherwise a power failure could leave the new name with none of the content
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folder
            raise
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write data as JSON that any reader takes, whole or not at all; what is no UTF-8 in a path becomes '?'."""
    text = json.dumps(plain_json(value), indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", errors="replace")


def plain_json(value: Any) -> Any:
    """Data for JSON: what is not finite becomes a text, tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: plain_json(item) for key, item in value.items()}
    return [plain_json(item) for item in value] if isinstance(value, list | tuple) else value


def with_numbers(value: Any, texts: Collection[str] = ()) -> Any:
    """JSON data with what `plain_json` made a text as a number again; what lies under the keys `texts` stays one."""
    if isinstance(value, Mapping):
        return {key: item if key in texts else with_numbers(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [with_numbers(item, texts) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


@contextmanager
def explained(what: str, path: Path, consequence: str = "") -> Iterator[None]:
    """Say in one sentence what could not be written where, why, and what to do; the error number stays.

    Raises:
        OSError: in place of any `OSError` inside.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "see that the folder is there and can be written")
        ending = f"; {consequence}" if consequence else ""
        clear = OSError(f"could not write {what} '{path}': {reason}; {remedy}{ending}")
        clear.errno = error.errno
        raise clear from error
