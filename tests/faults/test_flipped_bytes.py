"""A flipped byte of any kind of stored file is refused by one sentence, or changes nothing that is read.

`make test` flips some bytes of each file, `make faults` every byte of a small file and 1,000 of a large one.
"""

import gzip
import io
import json
import logging
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import normfree as nf
from fault_kinds import FLIPPED
from normfree.comparison.comparison_report import _read as read_comparison
from normfree.conversion import convert
from normfree.conversion.saving import _read_tensors, read_example, read_record, save_converted
from normfree.data.data_sets import get, load
from normfree.data.download.catalog import DATA_SETS, DataSet, Layout, tar_source
from normfree.data.download.file_formats import read_idx, write_idx
from normfree.data.images.image_checksums import CACHE, contents_digest
from normfree.data.text.prepared_folder import open_prepared
from normfree.storage.reading import Checksum
from normfree.storage.writing import write_sealed_json
from normfree.train.engine import loop as engine
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder
from normfree_papers.claims.reproduction import read_result
from sharded_saves import load_sharded_, made, save_sharded, whole
from thin_resnet import thin_resnet
from tiny_images import tiny_images
from tiny_text import tiny_pairs

pytestmark = pytest.mark.faults
SMALL, PLACES = 4096, 1000  # bytes of a file of which each is flipped; places in a larger one


class StoredFile(NamedTuple):
    """A stored file, and how it is read."""

    path: Path
    read: Callable[[], Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StoredFile]]:
    """The files of a checkpoint that this process has saved as the only one of its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run, mesh = tmp_path_factory.mktemp("sharded"), init_device_mesh("cpu", (1,))
        saved = save_sharded(run, made(0, mesh)[0], {"step": 3})

        def read() -> Any:
            model, _ = made(1, mesh)
            return load_sharded_(run, model), whole(model)

        yield {
            "index of a sharded checkpoint (state.json)": StoredFile(saved / "state.json", read),
            "shard of a checkpoint": StoredFile(next(saved.glob("*.safetensors")), read),
        }
    finally:
        dist.destroy_process_group()


def _checked_set(root: Path, patch: pytest.MonkeyPatch) -> dict[str, StoredFile]:
    """A small data set with checksums: its files, and the archive that it comes in."""
    content = write_idx(np.arange(48, dtype=np.uint8).reshape(3, 4, 4))
    files = {"images": gzip.compress(content, mtime=0), "labels": write_idx(np.arange(3, dtype=np.uint8))}
    with tarfile.open(root / "small.tar", "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"small/{name}.gz" if name == "images" else f"small/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    listed = {"images.gz": Checksum.of(files["images"]), "labels": Checksum.of(files["labels"])}
    layout = Layout(folder="small", files=listed, read=lambda paths: (read_idx(*paths),) * 2)
    source = tar_source("file:small.tar", Checksum.of(root / "small.tar"), layout)
    known = DataSet(
        name="small", title="Small", about="", classes=("a", "b", "c"), layouts=(layout,), sources=(source,)
    )
    patch.setitem(DATA_SETS, "small", known)

    def fetched() -> Path:
        shutil.rmtree(root / "fetched", ignore_errors=True)
        return get("small", root / "fetched", tarball=root / "small.tar")

    folder = fetched()
    return {
        "archive of a data set": StoredFile(root / "small.tar", fetched),
        "file of a data set": StoredFile(folder / "images.gz", lambda: load("small", root / "fetched").train.images),
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, shards: dict[str, StoredFile]) -> Iterator[dict[str, StoredFile]]:
    """One file of each kind."""
    root = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        patch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())
        nf.fit(nf.TrainConfig(model="resmlp-2-8", epochs=2, batch_size=16), out=root / "run")
    run = RunFolder(root / "run")
    saved = checkpoint.latest(run.path)
    assert saved is not None
    images = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model, plan = convert(thin_resnet(), "fixup", images, generator=torch.Generator().manual_seed(0))
    folder = save_converted(root / "converted", model, plan, example=images)
    record = read_record(folder)
    claim = root / "claim.json"
    write_sealed_json(
        claim, {"claim": "a/b", "scale": "full", "seeds": [0], "values": {"x": {"mean": 0.5}}, "panels": []}
    )
    pairs = tiny_pairs(root / "pairs")
    picture = root / "images" / "train" / "a" / "1.ppm"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"P6 8 8 255\n" + bytes(range(192)))
    contents_digest(root / "images", [picture])  # which stores their checksums
    compared = root / "comparison.json"
    results = Path(__file__).parents[2] / "results"
    write_sealed_json(compared, json.loads((results / "conversion" / "resnet18" / "comparison.json").read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        sets = _checked_set(root, patch)
        yield {
            **shards,
            **sets,
            "configuration (config.toml)": StoredFile(run.config_path, run.read_config),
            "metrics (metrics.jsonl)": StoredFile(run.metrics_path, run.read_metrics),
            "result (result.json)": StoredFile(run.result_path, run.read_result),
            "state of a checkpoint (state.json)": StoredFile(saved / "state.json", lambda: checkpoint.read(saved)),
            "weights of a checkpoint": StoredFile(saved / "weights.safetensors", lambda: checkpoint.read(saved)),
            "plan of a conversion (plan.json)": StoredFile(folder / "plan.json", lambda: read_record(folder)),
            "weights of a conversion": StoredFile(
                folder / "weights.safetensors", lambda: _read_tensors(folder / "weights.safetensors", record)
            ),
            "example of a conversion": StoredFile(folder / "example.safetensors", lambda: read_example(folder)),
            "stored claim": StoredFile(claim, lambda: read_result(claim)),
            "prepared text (prepared.json)": StoredFile(
                pairs.folder / "prepared.json", lambda: open_prepared(pairs.folder).manifest
            ),
            "tokens of prepared text": StoredFile(
                pairs.folder / "train.safetensors", lambda: open_prepared(pairs.folder).manifest
            ),
            "vocabulary of prepared text": StoredFile(
                pairs.folder / "vocabulary.model", lambda: open_prepared(pairs.folder).vocabulary().model
            ),
            "checksums of images": StoredFile(
                picture.parent / CACHE, lambda: contents_digest(root / "images", [picture])
            ),
            "comparison (comparison.json)": StoredFile(compared, lambda: asdict(read_comparison(compared))),
            "image of a run": StoredFile(picture, lambda: _same_images(root / "images", picture)),
        }


_KNOWN: dict[Path, str] = {}


def _same_images(root: Path, picture: Path) -> str:
    """The contents, which have to be those of the first call, as for a run that is resumed."""
    found = contents_digest(root, [picture], cached=False)
    if _KNOWN.setdefault(picture, found) != found:
        raise ValueError("expected the same contents of images as the run")
    return found


def equal(one: Any, two: Any) -> bool:
    """Whether two structures hold the same values and bits."""
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, Tensor) else repr(one) == repr(two)


@pytest.mark.parametrize("most", [25, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("kind", FLIPPED)
def test_flipped_byte_is_refused_or_harmless(
    kind: str, most: int | None, stored: dict[str, StoredFile], count: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, read = stored[kind]
    raw, before = path.read_bytes(), read()
    places = len(raw) if len(raw) <= SMALL else PLACES
    wrong = []
    try:
        for place in np.linspace(0, len(raw) - 1, min(most or places, places)).astype(int).tolist():
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])
            caplog.clear()
            with caplog.at_level(logging.WARNING, "normfree"):
                outcome = _outcome(read, before, caplog)
            count(kind, outcome)
            if outcome in ("accepted", "traceback"):
                wrong.append((place, outcome))
    finally:
        path.write_bytes(raw)
    assert not wrong
    assert equal(read(), before)


def _outcome(read: Callable[[], Any], before: Any, caplog: pytest.LogCaptureFixture) -> str:
    try:
        found = read()
    except (ValueError, OSError) as error:
        return "refused" if "\n" not in str(error) else "traceback"
    except Exception:
        return "traceback"
    if equal(found, before):
        return "harmless"
    renamed_seal = isinstance(found, dict) and len(found) == len(before) + 1 and before.items() <= found.items()
    return "harmless" if renamed_seal else "accepted"


def test_control_without_checksums_is_accepted(stored: dict[str, StoredFile], tmp_path: Path) -> None:
    """The control: the same flips of a file without a checksum change what is read."""
    path, read = stored["stored claim"]
    raw = path.read_bytes()
    try:
        path.write_bytes(raw.replace(b'"sha256"', b'"other"').replace(b"0.5", b"0.7"))
        assert read()["values"]["x"]["mean"] == 0.7
    finally:
        path.write_bytes(raw)
