"""The contents of an image folder as one sha256, so that an image that was changed in place is noticed.

The sha256 of every image is kept in a hidden file beside it, with the image's size and time of change. An image is
read again only if one of them changed. In a folder that cannot be written, every image is read each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from normfree.storage.provenance import available_cores
from normfree.storage.reading import Checksum, read_sealed_json
from normfree.storage.writing import write_sealed_json

CACHE = ".normfree-contents.json"


def contents_digest(root: Path, files: Sequence[Path], *, cached: bool = True) -> str:
    """Compute the sha256 that identifies the names and contents of the images of a folder.

    Args:
        root: the image folder.
        files: images below it, those of one folder in a row.
        cached: whether to read only images whose size or time of change is not that in the cache.
    """
    total = hashlib.sha256()
    with ThreadPoolExecutor(available_cores()) as pool:
        for folder, group in groupby(files, lambda file: file.parent):
            images = list(group)
            digests = _digests(folder, images, pool, cached)
            for file, digest in zip(images, digests, strict=True):
                total.update(f"{file.relative_to(root).as_posix()} {digest}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def altered_images(files: Sequence[Path]) -> list[Path]:
    """Return the images whose content changed while their size and time of change stayed those in the cache."""
    caches = {folder: _read_cache(folder) for folder in dict.fromkeys(file.parent for file in files)}
    known = [(file, caches[file.parent][file.name]) for file in files if file.name in caches[file.parent]]
    same = [(file, sha256) for file, (size, time, sha256) in known if [size, time] == _stamp(file)]
    return [file for file, sha256 in same if Checksum.of(file).sha256 != sha256]


def _stamp(file: Path) -> list[int]:
    entry = file.stat()
    return [entry.st_size, entry.st_mtime_ns]


def _digests(folder: Path, images: Sequence[Path], pool: ThreadPoolExecutor, cached: bool) -> list[str]:
    """Return the sha256 of images of one folder, and keep them there."""
    known = _read_cache(folder) if cached else {}
    stamps = [_stamp(image) for image in images]
    entries = {
        image.name: known[image.name]
        for image, stamp in zip(images, stamps, strict=True)
        if known.get(image.name, [])[:-1] == stamp
    }
    fresh = [(image, stamp) for image, stamp in zip(images, stamps, strict=True) if image.name not in entries]
    found = pool.map(lambda new: Checksum.of(new[0]).sha256, fresh)  # hashing releases Python's lock
    entries.update((image.name, [*stamp, sha256]) for (image, stamp), sha256 in zip(fresh, found, strict=True))
    if fresh:
        with suppress(OSError):  # the folder may be read-only
            write_sealed_json(folder / CACHE, {"images": {**known, **entries}})
    return [str(entries[image.name][-1]) for image in images]


def _read_cache(folder: Path) -> dict[str, list[Any]]:
    try:
        images = read_sealed_json(folder / CACHE, "the checksums of images", "delete it")["images"]
    except (OSError, ValueError, KeyError):
        return {}  # it only saves time
    whole = isinstance(images, dict) and all(isinstance(entry, list) and len(entry) == 3 for entry in images.values())
    return images if whole else {}
