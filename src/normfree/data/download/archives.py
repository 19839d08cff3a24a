"""Members of a tar archive, read into memory by name: nothing is unpacked to a path that an archive chooses."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import PurePosixPath


def read_members(archive: bytes, names: Iterable[str], what: str) -> dict[str, bytes]:
    """The contents of the named members of the archive `what`.

    Raises:
        ValueError: if the archive is damaged, lacks a member, or holds any member that points out of it (a path with
            '..' or from the root, a link, a device): an honest archive of images has none.
    """
    wanted = dict.fromkeys(names)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            members = tar.getmembers()
            for member in members:
                _refuse_escape(member, what)
            for member in members:
                if member.name in wanted and (stream := tar.extractfile(member)) is not None:
                    found[member.name] = stream.read()
                    if len(found[member.name]) != member.size:
                        raise EOFError(f"'{member.name}' ends early")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"expected an archive in '{what}', got a damaged one: {error}; fetch it again") from error
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"expected '{missing[0]}' in '{what}', which lacks it; fetch it again")
    return found


def _refuse_escape(member: tarfile.TarInfo, what: str) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"expected paths inside the archive '{what}', got '{member.name}'; do not trust this archive")
    if not (member.isfile() or member.isdir()):
        raise ValueError(
            f"expected only files and folders in the archive '{what}', got '{member.name}', a link or a device; do not "
            "trust this archive"
        )
