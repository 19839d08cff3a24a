"""Bytes from an address: a web address, or a package of the npm registry."""

from __future__ import annotations

import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

Progress = Callable[[int, int, str], None]
"""Called with the bytes that are there, those that are expected (0: unknown), and what is being fetched."""

_BLOCK = 1 << 20
_PATIENCE = 10.0  # seconds without a byte before the next source is tried
_NPM_PATIENCE = 900.0


def fetch(address: str, *, size: int = 0, progress: Progress | None = None, timeout: float = _PATIENCE) -> bytes:
    """What lies at an address: http://…, https://…, file://…, or npm:package@version (the package's tarball).

    Raises:
        OSError: if it cannot be reached, stops answering, or is longer than the `size` that is expected.
    """
    kind, _, rest = address.partition(":")
    if kind == "npm":
        return _npm_pack(rest, size, progress)
    content = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=timeout) as response:
            total = size or int(response.headers.get("Content-Length") or 0)
            while block := response.read(_BLOCK):
                content += block
                if progress is not None:
                    progress(len(content), total, address)
                if size and len(content) > size:  # an endless answer would fill the memory
                    raise OSError(f"the answer is longer than the {size} bytes expected")
    except HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from error
    return bytes(content)


def _npm_pack(package: str, size: int, progress: Progress | None) -> bytes:
    """The tarball of an exact version; no script of the package is run."""
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
