"""A small disk of its own that can lose power: an ext4 file system with a journal on a loop device.

Losing power copies the image of the mounted disk: what the file system has not yet given to the device is not in it.
The copy is then mounted, and its journal is played back.
"""

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """A disk that is mounted at `path`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self._image, self._copy = folder / "image", folder / "copy"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(16 << 20)
        _do("mkfs.ext4", "-q", "-F", str(self._image))

    def mount(self) -> None:
        """Mount it, without ext4's own care for programs that rename a file before they sync it."""
        _do("mount", "-o", "loop,noauto_da_alloc,commit=300", str(self._image), str(self.path))

    def unmount(self) -> None:
        """Unmount it. Weights that were read are mapped into memory until their model is collected."""
        gc.collect()
        try:
            _do("umount", str(self.path))
        except subprocess.CalledProcessError:
            _do("umount", "--lazy", str(self.path))  # leave no disk behind
            raise

    def settle(self) -> None:
        """Write everything to the device."""
        _do("sync", "--file-system", str(self.path))

    def commit(self) -> None:
        """Let another program sync its file, by which ext4 commits all names so far, but not the contents of files."""
        with (self.path / "another").open("w") as file:
            file.write("another")
            file.flush()
            os.fsync(file.fileno())

    def lose_power(self) -> None:
        """Let everything be lost that is not on the device, and mount the disk again."""
        _do("cp", "--sparse=always", str(self._image), str(self._copy))
        self.unmount()
        self._copy.replace(self._image)
        self.mount()


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """An empty disk that is mounted; it is unmounted and removed at the end."""
    folder.mkdir(parents=True)
    disk = SmallDisk(folder)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
        shutil.rmtree(folder)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount such a disk here."""
    try:
        with small_disk(folder / "tried"):
            return True
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(folder / "tried", ignore_errors=True)
        return False


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
