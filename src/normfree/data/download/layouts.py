"""What there is to know of a data set: its files in a folder, how they are read, and the places that have them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from normfree.data.download.archives import read_members
from normfree.data.download.checksums import Checksum
from normfree.data.images.image_set import Split


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files of a data set in a folder.

    Fields:
        folder: below the root.
        files: name → checksum.
        read: the folder → the training and the test split.
        bare: whether the files may also lie in the root itself; no, where the files of two data sets bear one name.
    """

    folder: str
    files: Mapping[str, Checksum]
    read: Callable[[Path], tuple[Split, Split]]
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place that has a data set.

    Fields:
        layout: which files come out of it.
        parcels: address → checksum of what is fetched there.
        unpack: address → content becomes file name → content.
    """

    layout: Layout
    parcels: Mapping[str, Checksum]
    unpack: Callable[[Mapping[str, bytes]], dict[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set by name.

    Fields:
        title: as people write it.
        about: what it is, in a line.
        layouts: the forms in which it may lie on disk; the first that is there is read.
        sources: tried in order.
        stand_in: name of another data set that is fetched and read when this one cannot be had.
    """

    name: str
    title: str
    about: str
    classes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    sources: tuple[Source, ...]
    stand_in: str = ""


def as_they_are(parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files that need no unpacking, named by the end of their address."""
    return {address.rpartition("/")[2]: content for address, content in parcels.items()}


def unzipped(parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files that were compressed one by one (.gz).

    Raises:
        ValueError: if one is damaged.
    """
    files = {}
    for name, content in as_they_are(parcels).items():
        try:
            files[name.removesuffix(".gz")] = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"expected a compressed file in '{name}', got a damaged one: {error}") from error
    return files


def _from_tar(parcels: Mapping[str, bytes], *, layout: Layout) -> dict[str, bytes]:
    ((address, archive),) = parcels.items()
    members = read_members(archive, (f"{layout.folder}/{name}" for name in layout.files), address.rpartition("/")[2])
    return {name.rpartition("/")[2]: content for name, content in members.items()}


def tar_source(address: str, checksum: Checksum, layout: Layout) -> Source:
    """A source that is one archive with the layout's folder in it."""
    return Source(layout=layout, parcels={address: checksum}, unpack=partial(_from_tar, layout=layout))
