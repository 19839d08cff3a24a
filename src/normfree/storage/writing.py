"""Write files safely: each is replaced whole or not at all, even if the process is killed or the power fails.

    with explain_os_errors("the table", path):  # an OSError becomes one sentence with a remedy
        write_text(path, table)

`write_bytes`, `write_text` and `write_json` write one file; `write_sealed_json` and `write_sealed_text` add a checksum.
`atomic_path` and `atomic_folder` give a temporary path for anything else that writes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normfree.storage.reading import KEY, digest_of

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY = ".tmp-"  # the prefix of unfinished files and folders; a killed process leaves them behind
OPEN_FILES = "/proc/self/fd"  # where Linux has paths of the files and folders that this process has open
_REMEDIES = {
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "free some room below your quota",
    errno.EFBIG: "raise the limit on the size of a file",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.ENOENT: "create the folder",
    errno.ENOTDIR: "a file is in the way of the folder: move it",
    errno.EEXIST: "a file is in the way of the folder: move it",
}


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and move it to `path` at the end.

    If anything inside raises, the temporary file is removed and `path` stays as it was. A file that is replaced passes
    its permissions on. A file that need not survive a power failure is not `durable`: it is not synced to the disk,
    which may take long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(4)}{path.suffix}"
    # Not mkstemp, which ignores the umask: a file is as private as the user's others.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        if durable:
            sync(temporary)  # otherwise a power failure could leave the new name without the content
        if path.is_file():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, and let it take the place of `folder` at the end.

    The files directly inside are synced to the disk first. If anything inside raises, the temporary folder is removed
    and `folder` stays as it was.
    """
    folder = folder.resolve()  # of a link, its target is replaced
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_folder(parent, folder.name)
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        _swap(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _swap(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; an earlier folder of that name is exchanged in one step, and removed last.

    A file system that cannot exchange names moves the earlier one aside first.
    """
    parent, earlier = folder.parent, None
    if folder.exists():
        if _exchange(new, folder):
            sync(parent)
            shutil.rmtree(new, ignore_errors=True)
            return
        aside = temporary_folder(parent)
        earlier = folder.replace(aside / folder.name)
    try:
        new.replace(folder)
    except BaseException:
        if earlier is not None:
            earlier.replace(folder)
            earlier.parent.rmdir()
        raise
    sync(parent)
    if earlier is not None:
        shutil.rmtree(earlier.parent, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step, as Linux can; return whether it was done."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "renameat2"):
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    return bool(library.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def temporary_folder(parent: Path, name: str = "") -> Path:
    """Make a new folder for unfinished files; the user's umask decides who may read it, as for any other folder."""
    path = parent / f"{TEMPORARY}{name}{'-' if name else ''}{secrets.token_hex(4)}"
    path.mkdir()
    return path


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def plain_name(words: str) -> str:
    """Return a text as part of the name of a folder: other characters than letters, digits, '.' and '_' become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", words)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; missing folders are created."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a UTF-8 file atomically; `durable` is that of `atomic_path`.

    A character that UTF-8 cannot hold, such as one from an undecodable file name, becomes '?'.
    """
    with atomic_path(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value: Any) -> None:
    """Write data atomically as strict JSON, with `to_json_values` applied."""
    write_text(path, json.dumps(to_json_values(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping atomically as strict JSON, with the sha256 of its content as the last entry.

    A character that UTF-8 cannot hold becomes '?', as in `write_text`.
    """
    text = json.dumps(to_json_values(value), ensure_ascii=False, allow_nan=False)
    body = {key: item for key, item in json.loads(text.encode(errors="replace")).items() if key != KEY}
    write_text(path, json.dumps({**body, KEY: digest_of(body)}, indent=1, ensure_ascii=False) + "\n")


def write_sealed_text(path: Path, text: str) -> None:
    """Write a text of TOML atomically, with the sha256 of its content in a comment at the end."""
    content = text.encode(errors="replace")
    write_text(path, content.decode() + f"# sha256 {hashlib.sha256(content).hexdigest()}\n")


def to_json_values(value: Any) -> Any:
    """Data that strict JSON can hold: NaN and infinities become "nan", "inf" and "-inf", tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: to_json_values(item) for key, item in value.items()}
    return [to_json_values(item) for item in value] if isinstance(value, list | tuple) else value


def require_plain(value: Any, where: str) -> None:
    """Raise `ValueError` if data at a place is not plain, so that JSON would not give it back."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected text as keys in {where}, got {key!r}; JSON would turn it into text")
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"expected plain data for JSON at {where}, got {type(value).__name__}; pass tensors among the tensors"
        )


def render_weights(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the bytes of a safetensors file; views and shared storages are copied.

    Raises:
        ValueError: If a tensor is sparse, has no values, or has a type that the format does not support.
    """
    import torch  # imported here because files are also written by commands that do not load torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    copies = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            kind = "meta" if tensor.device.type == "meta" else str(tensor.layout)
            raise ValueError(
                f"expected dense tensors with values, got a {kind} one under '{name}'; make it dense first"
            )
        # A copy, because the format supports neither views nor shared storages.
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    try:
        return save(copies)
    except (KeyError, SafetensorError) as error:
        kinds = ", ".join(sorted({str(tensor.dtype) for tensor in copies.values()}))
        raise ValueError(f"expected tensors that safetensors can hold, got {kinds}: {error}") from error


@contextmanager
def explain_os_errors(what: str, path: Path, consequence: str = "") -> Iterator[None]:
    """Turn an `OSError` into one sentence: what could not be written, where, why, and the remedy.

    Args:
        what: The thing that is written, such as "the table".
        path: Its file or folder.
        consequence: Ends the sentence, such as "the earlier file is unchanged".

    Raises:
        OSError: In place of any `OSError` inside, with the same `errno`.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be written")
        ending = f"; {consequence}" if consequence else ""
        shown = os.path.realpath(path) if path.is_relative_to(OPEN_FILES) else path
        clear = OSError(f"could not write {what} '{shown}': {reason}; {remedy}{ending}")
        clear.errno = error.errno
        raise clear from error


@contextmanager
def made_folder(what: str, path: Path) -> Iterator[None]:
    """Make a folder and its parents; after an error, those that this call made and that are still empty are removed.

    Raises:
        OSError: In one sentence, if it cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    with explain_os_errors(what, path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # of a folder that is not empty
            for folder in missing:
                folder.rmdir()
        raise
