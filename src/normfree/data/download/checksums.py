"""Whether a file is the one that was published, by its size and its SHA-256, or MD5 where no SHA-256 is known."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """A published digest, and the size in bytes where that is known, too (0: unknown).

    MD5 stands against accidents only: a file can be forged to have a given MD5. It is used where nothing better was
    ever published.
    """

    sha256: str = ""
    md5: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        if bool(self.sha256) == bool(self.md5):
            raise ValueError("expected either a SHA-256 or an MD5, got both or neither")

    def check(self, content: bytes | Path, name: str, remedy: str) -> None:
        """Refuse a file, or the content of one, that is truncated or altered.

        Raises:
            ValueError: with the file's name and what to do.
        """
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if self.size and size != self.size:
            what = "truncated" if size < self.size else "too long"
            raise ValueError(f"expected {self.size} bytes in '{name}', got {size}: the file is {what}; {remedy}")
        kind = "sha256" if self.sha256 else "md5"
        found = _digest(content, kind)
        if found != (self.sha256 or self.md5):
            raise ValueError(
                f"expected '{name}' with {kind} {(self.sha256 or self.md5)[:16]}…, got {found[:16]}…: the file is "
                f"altered or truncated; {remedy}"
            )

    def fits(self, path: Path) -> bool:
        """Whether this is a file with this checksum."""
        try:
            self.check(path, path.name, "")
        except (OSError, ValueError):
            return False
        return True


def _digest(content: bytes | Path, kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    if isinstance(content, Path):
        with content.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    else:
        digest.update(content)
    return digest.hexdigest()
