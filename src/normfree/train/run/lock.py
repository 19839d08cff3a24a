"""The lock of a run's folder: one process at a time may write into it, and only into a folder of its own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from normfree.checksums import is_sealed_text
from normfree.files import explain_os_errors
from normfree.train.run import checkpoint

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_LONGEST = 20  # digits of the number of a process


class FolderLock:
    """The file 'lock' of a folder, with the number of the process that holds it; the lock ends with the process.

    The file is never removed: otherwise two processes could each lock a file of that name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "lock"
        self._held: tuple[int, int] | None = None  # the device and number of the locked file

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock for the length of the `with` block.

        Raises:
            ValueError: If another process holds it, the file system has no locks, or the file is not a lock.
            OSError: If it cannot be written.
        """
        self._require_lock_file()
        lock = FileLock(self._path, timeout=0, fallback_to_soft=False, on_acquired=self._write_process)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"expected a folder that no other process trains in, but '{self._folder}' is held{self._holder()}; "
                "wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise ValueError(
                    f"expected a file system with locks, but '{self._folder}' cannot be locked ({error.strerror}); "
                    "choose another folder"
                ) from error
            with explain_os_errors("the lock of", self._folder):
                raise
        try:
            yield
        finally:
            self._held = None
            lock.release()

    def require_held(self) -> None:
        """Raise `ValueError` if the folder at this path is no longer the one that was locked; call it before a write.

        It was moved or removed if another folder, or none, is in its place. Without its lock, another process may
        write into it.
        """
        try:
            found = self._path.lstat()
            same = self._held == (found.st_dev, found.st_ino)
        except OSError:
            same = False
        if self._held is not None and not same:
            raise ValueError(
                f"expected the folder '{self._folder}' as this process locked it, but it was moved, removed or "
                "replaced; this process writes nothing more: start the run again in a folder of its own"
            )

    def _write_process(self, handle: int) -> None:
        found = os.fstat(handle)
        self._held = found.st_dev, found.st_ino
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())

    def _require_lock_file(self) -> None:
        """Raise `ValueError` if a link or a file of the user has the name of the lock, which would be overwritten."""
        try:
            found = self._path.lstat()
            ours = stat.S_ISREG(found.st_mode) and found.st_size <= _LONGEST
            content = self._path.read_bytes() if ours else b""
        except OSError:
            return  # there is none, or the lock itself will say why it cannot be read
        if not ours or not (content.isdigit() or not content.strip(b"\0")):
            raise ValueError(
                f"expected '{self._path}' to be the lock of a run, got another file, which would be overwritten; "
                "move it, or choose another folder"
            )

    def _holder(self) -> str:
        try:
            return f" by process {int(self._path.read_bytes())}"
        except (OSError, ValueError):
            return ""


def require_own_files(folder: Path, names: Iterable[str]) -> None:
    """Raise `ValueError` if no run of normfree is in a folder, but other files with names that a run replaces.

    A run leaves a lock, a sealed configuration, or a checkpoint with its state. Other programs have folders of
    checkpoints with the same names.
    """
    checkpoints = checkpoint.newest_first(folder)
    found = [path for path in (*(folder / name for name in names), *checkpoints) if os.path.lexists(path)]
    ours = (folder / "lock", *(path / checkpoint.STATE for path in checkpoints))
    if found and not any(path.is_file() for path in ours) and not is_sealed_text(folder / "config.toml"):
        raise ValueError(
            f"expected a folder of its own for the run, but '{found[0]}' is not of a run and would be replaced; move "
            "it, or choose another folder"
        )
