"""A lock on a folder that ends with its process, however that ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from normfree.files import explained

if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        os.lseek(handle, 2**20, os.SEEK_SET)  # past the content, which stays readable
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the file 'lock' of a folder, so that one process at a time writes into it; it holds the process's number.

    The file stays, since removing it would let two processes hold one each.

    Raises:
        ValueError: when another holds it, or the file system has no locks.
        OSError: in one sentence, when the file cannot be made.
    """
    with explained("the lock of", folder):
        file = FileIO(folder / "lock", "a+")
    with file:
        try:
            _take(file.fileno())
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise ValueError(
                    f"expected a folder that no other process trains in, but '{folder}' is held{_holder(file)}; wait "
                    "for it, or choose another folder"
                ) from None
            raise ValueError(
                f"expected a file system with locks, but '{folder}' cannot be locked ({error.strerror}); choose "
                "another folder"
            ) from error
        _held.add(file)
        with explained("the lock of", folder):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


def _holder(file: FileIO) -> str:
    try:
        file.seek(0)
        return f" by process {int(file.read(20))}"
    except (OSError, ValueError):
        return ""


_held: WeakSet[FileIO] = WeakSet()


def _let_go() -> None:
    """Close the locks in a forked child, such as a data worker, which would keep them after its parent was killed."""
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
