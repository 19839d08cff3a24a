"""Let one process at a time write into a folder.

lock = FolderLock(folder)
with lock.hold():
    lock.require_held()  # before each write: was the folder moved, or replaced by another one?
    write_text(lock.write_path / "file", text)  # into the locked folder, even if it was moved this very moment
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from normfree.storage.writing import OPEN_FILES, explain_os_errors

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_LONGEST = 20  # digits of the number of a process, the content of a lock
_PATIENCE = 0.3  # seconds to wait for the lock, which `is_held` shares for microseconds


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder, on this machine or another one; None if that is not known.

    Only the lock itself can tell, because the number of a process may belong to another one by now. The check takes a
    shared lock for an instant and writes nothing; `hold` waits that long.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    try:
        handle = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)  # which ends the shared lock
    return False


class HeldError(ValueError):
    """Another process holds the lock of a folder."""


class FolderLock:
    """The file 'lock' of a folder, with the number of the process that holds it; the lock ends with the process.

    The file is removed only if nothing else was written into the folder. A process that has opened it by then notices
    that its lock guards no file: filelock tries again, and `require_held` refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "lock"
        self._held: tuple[int, int] | None = None  # the device and number of the locked file
        self.write_path = folder

    @contextmanager
    def hold(self, *, make: bool = False) -> Iterator[None]:
        """Hold the lock for the length of the `with` block; `make` the folder if it is not there.

        Meanwhile `write_path` leads to the locked folder, even if it is moved and another one takes its name. Only
        Linux has such paths; elsewhere it is the path of the folder.

        Raises:
            HeldError: If another process holds it.
            ValueError: If the file system has no locks, or the file is not a lock.
            OSError: If it cannot be written.
        """
        from filelock import FileLock, Timeout  # imported here because few commands need it

        missing = [path for path in (self._path, self._folder, *self._folder.parents) if not os.path.lexists(path)]
        if make:
            with explain_os_errors("the run's folder", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
        self._require_lock_file()
        lock = FileLock(self._path, timeout=_PATIENCE, fallback_to_soft=False, on_acquired=self._write_process)
        try:
            lock.acquire()
        except Timeout:
            raise HeldError(
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
            with self._open_folder():
                yield
        finally:
            if make:
                self._remove_empty(missing)
            self._held = None
            lock.release()

    def _remove_empty(self, made: Sequence[Path]) -> None:
        """Remove the lock and the folders that `hold` has made if they hold nothing else: a refused run leaves none."""
        if self._path in made and self._held == _identity(self._path):
            with suppress(OSError):  # of a folder that another process uses, or that is not empty
                if os.listdir(self._folder) == [self._path.name]:
                    self._path.unlink()
                    for folder in made[1:]:
                        folder.rmdir()

    @contextmanager
    def _open_folder(self) -> Iterator[None]:
        if not Path(OPEN_FILES).is_dir():
            yield
            return
        with explain_os_errors("the lock of", self._folder):
            handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.write_path = Path(OPEN_FILES, str(handle))
            self.require_held()  # the folder that was opened is the one that was locked
            yield
        finally:
            self.write_path = self._folder
            os.close(handle)

    def require_held(self) -> None:
        """Raise `ValueError` if the folder at this path is no longer the one that was locked; call it before a write.

        It was moved or removed if another folder, or none, is in its place. Without its lock, another process may
        write into it.
        """
        same = all(self._held == _identity(folder / "lock") for folder in {self._folder, self.write_path})
        if self._held is not None and not same:
            raise ValueError(
                f"expected the folder '{self._folder}' as this process locked it, but it was moved, removed or "
                "replaced; this process writes nothing more: start the run again in another folder"
            )

    def _write_process(self, handle: int) -> None:
        self._held = _identity(handle)
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


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and the number of a file, by its path or handle; None if there is none."""
    try:
        found = file.lstat() if isinstance(file, Path) else os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
