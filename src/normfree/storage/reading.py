"""Read stored files, which may be damaged or forged.

    record = read_sealed_json(path, "a result", "run it again")  # what `write_sealed_json` wrote

A sealed file has a checksum of its own content: a JSON file as its last entry, a TOML file as its last comment. A
sealed JSON file also lists the checksums of the files beside it that cannot carry their own. Files of earlier releases
have none (`has_checksum`); configurations and plans are then read with a warning. `read_limited`, `parse_json` and
`has_kinds` keep a forged file from filling the memory or causing an error later.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KEY = "sha256"
_log = logging.getLogger("normfree")
_SEAL = re.compile(rb"# sha256 ([0-9a-f]{64})\n\Z")
# Limits of a JSON or TOML file, so that a forged one cannot fill the memory or the stack. The plan of 10,000 layers
# has 17 MB and a million values.
_LARGEST, _MOST_VALUES, _DEEPEST = 64 << 20, 4_000_000, 100
_LARGEST_HEADER = 32 << 20  # bytes in a safetensors file; 10,000 layers need 8 MB
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """A SHA-256, or MD5 where no SHA-256 is known, and the size in bytes (0: unknown).

    MD5 detects accidents only: a file can be forged to have a given MD5.
    """

    sha256: str = ""
    md5: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        if bool(self.sha256) == bool(self.md5):
            raise ValueError("expected either a SHA-256 or an MD5, got both or neither")

    @classmethod
    def of(cls, content: bytes | Path) -> Checksum:
        """Compute the checksum of a file, or of the content of one."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        return cls(sha256=_digest(content, "sha256"), size=size)

    def to_json(self) -> dict[str, Any]:
        """Return the size and the SHA-256 as plain data."""
        return {"bytes": self.size, "sha256": self.sha256}

    @classmethod
    def from_json(cls, record: Any) -> Checksum:
        """The inverse of `to_json`; raises `ValueError` for anything else."""
        if isinstance(record, dict) and isinstance(record.get("sha256"), str) and isinstance(record.get("bytes"), int):
            return cls(sha256=record["sha256"], size=record["bytes"])
        raise ValueError(f"expected a size and a sha256 of a file, got {record!r}; store the folder again")

    def check(self, content: bytes | Path, name: str, remedy: str) -> None:
        """Compare a file, or the content of one, with the checksum.

        Args:
            content: The bytes, or the path of the file.
            name: The name of the file in the error.
            remedy: The end of the error, such as "fetch it again".

        Raises:
            ValueError: If the file is truncated or altered.
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


def list_checksums(contents: Mapping[str, bytes | Path]) -> dict[str, Any]:
    """Return the size and SHA-256 of several files by name, as plain data."""
    return {name: Checksum.of(content).to_json() for name, content in contents.items()}


def digest_of(body: Mapping[str, Any]) -> str:
    """Return the sha256 of plain data, which does not depend on the order of its keys or on spaces."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_sealed_json(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file that `write_sealed_json` wrote, without the entry of its sha256.

    Args:
        path: The file.
        what: Its content in messages, such as "the result of a run".
        remedy: The end of the error, such as "run it again".

    Raises:
        ValueError: If it is not a JSON object, or was altered after it was written.
        OSError: If it cannot be read.
    """
    try:
        found = parse_json(read_limited(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        body = {key: value for key, value in found.items() if key != KEY}
        if KEY in found and found[KEY] != digest_of(body):
            raise ValueError("its content does not have the sha256 written in it")
    except ValueError as error:
        raise ValueError(_altered(path, what, str(error), remedy)) from None
    return body


def check_sealed_text(path: Path, what: str, remedy: str) -> None:
    """Compare a file with the sha256 in its last comment; the arguments and errors are those of `read_sealed_json`."""
    raw = read_limited(path)
    seal = _SEAL.search(raw)
    if seal is not None and hashlib.sha256(raw[: seal.start()]).hexdigest().encode() != seal[1]:
        raise ValueError(_altered(path, what, "its content does not have the sha256 written in it", remedy))


def has_checksum(path: Path) -> bool:
    """Whether a JSON or TOML file has a sha256 of its content, right or wrong; earlier releases wrote none."""
    if not path.is_file():
        return False
    raw = read_limited(path)
    if path.suffix != ".json":
        return _SEAL.search(raw) is not None
    try:
        found = parse_json(raw)
    except ValueError:
        return False
    return isinstance(found, dict) and KEY in found


def warn_without_checksum(path: Path) -> None:
    """Log a warning if a file has no checksum."""
    if not has_checksum(path):
        _log.warning(
            "'%s' has no checksum, because an earlier release wrote it or it was edited; damage to it is not noticed",
            path,
        )


def require_regular(path: Path) -> None:
    """Raise `ValueError` for a device, pipe or folder, and `FileNotFoundError` if nothing is there."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"expected a file at '{path}', got a folder, device or pipe; check the path")


def read_limited(path: Path) -> bytes:
    """Read a file of text that may be forged; raises `ValueError` if it is larger than any that normfree writes."""
    require_regular(path)
    with path.open("rb") as file:
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST >> 20} MiB in '{path}', got more; choose another file")
    return raw


def parse_json(raw: bytes) -> Any:
    """Parse JSON that may be damaged or forged.

    Raises:
        ValueError: If it is no JSON, or has too many values, or is nested too deeply.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    too_deep = f"it is nested more than {_DEEPEST} levels deep"
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [found]
    for _ in range(_DEEPEST):
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [item for items in inner for item in items]
        if not level:
            return found
    raise ValueError(too_deep)


def has_kinds(record: Any, kinds: Mapping[str, Any]) -> bool:
    """Whether a stored record, which may be forged, is a mapping whose entries have these types; others may be missing.

    >>> has_kinds({"step": 1, "note": []}, {"step": int, "loss": float | None})
    True
    >>> has_kinds({"step": "1"}, {"step": int})
    False
    """
    return isinstance(record, dict) and all(isinstance(record[key], kinds[key]) for key in kinds.keys() & record.keys())


def from_json_values(value: Any, texts: Collection[str] = ()) -> Any:
    """The inverse of `to_json_values`: "nan", "inf" and "-inf" become floats, except under the keys in `texts`."""
    if isinstance(value, Mapping):
        return {key: item if key in texts else from_json_values(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json_values(item, texts) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, which may be damaged or forged; its pages are read when they are used.

    Raises:
        ValueError: If it is damaged, or its header is larger than that of any network.
        OSError: If there is no file, or it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_regular(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _LARGEST_HEADER:
        raise ValueError(f"expected a safetensors file, but '{path}' is damaged: its header has {header:,} bytes")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"expected a safetensors file, but '{path}' is damaged: {error}") from error
    except TypeError as error:  # of torch, for a size beyond 64 bits
        raise ValueError(f"expected a safetensors file, but '{path}' is damaged: it has an impossible size") from error
    except (RuntimeError, MemoryError) as error:  # of torch, which maps the file into memory
        raise OSError(f"could not read '{path}': {str(error).partition(chr(10))[0]}; check disk and memory") from error


def _digest(content: bytes | Path, kind: str) -> str:
    if isinstance(content, Path):
        require_regular(content)  # a device would never end
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
        return hashlib.file_digest(stream, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def _altered(path: Path, what: str, why: str, remedy: str) -> str:
    return f"expected {what} as it was written, but '{path}' is damaged: {why}; {remedy}"
