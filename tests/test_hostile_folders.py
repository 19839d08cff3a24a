"""Folders that were prepared to attack: nothing runs, the memory stays small, and the error is one sentence."""

import gzip
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normfree as nf
from normfree.comparison.comparison_report import redraw
from normfree.conversion import convert
from normfree.conversion.saving import save_converted
from normfree.data.download.file_formats import read_idx, read_pickled
from normfree.data.images.image_checksums import CACHE, contents_digest
from normfree.data.images.image_folder import folder_in_order, read_folder
from normfree.data.text import text_files
from normfree.data.text.prepared_folder import open_prepared
from normfree.models.third_party import transformers_model
from normfree.storage.reading import read_tensors
from normfree.storage.writing import write_sealed_json, write_sealed_text
from normfree.train.run import checkpoint
from normfree.train.run.loading import noise_for
from thin_resnet import thin_resnet
from tiny_text import tiny_pairs

GIB = 1 << 30
FIXTURES = Path(__file__).parent / "fixtures" / "release-0.1"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a converted model."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    images = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model, plan = convert(thin_resnet(), "fixup", images, generator=torch.Generator().manual_seed(0))
    return save_converted(folder, model, plan, example=images, source="torchvision:resnet18")


def change_plan(folder: Path, **changes: Any) -> None:
    plan = json.loads((folder / "plan.json").read_bytes())
    write_sealed_json(folder / "plan.json", {**plan, **changes})


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


SOURCES = ["os:abort", "antigravity:fly", "this:d", "payload:run", "builtins:exit", "timm.models:create_model"]


@pytest.mark.parametrize("source", SOURCES)
def test_stored_source_is_not_imported(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "payload.py").write_text("open('ran', 'w').close()\ndef run(): open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    folder = copy_of(model_folder, tmp_path / "m")
    change_plan(folder, source=source)
    module, _, name = source.partition(":")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=f"would import '{module}' and call '{name}'.*trust=True") as caught:
        nf.load(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert module in before or module not in sys.modules
    if source == "payload:run":  # the control: with trust it runs
        with pytest.raises(ValueError, match="expected"):
            nf.load(folder, trust=True)
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("verb", [["evaluate"], ["diagnose"], ["lr"], ["train", "--resume"]])
def test_stored_model_of_a_run_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    from normfree.cli.verbs import run

    folder = copy_of(FIXTURES / "run-stopped", tmp_path / "run")
    (tmp_path / "payload.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    text = (folder / "config.toml").read_text()
    old = next(line for line in text.splitlines() if line.startswith("model ="))
    write_sealed_text(folder / "config.toml", text.replace(old, 'model = "payload:run"'))
    with pytest.raises(SystemExit) as caught:
        run([*verb, str(folder)])
    assert caught.value.code == 2
    assert not (tmp_path / "ran").exists()


def test_configuration_file_names_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normfree.train.recipes import configuration

    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text('model = "payload:run"\n')
    with pytest.raises(ValueError, match="would import 'payload' and call 'run'"):
        configuration(file=tmp_path / "one.toml")
    assert configuration(file=tmp_path / "one.toml", trust=True).model == "payload:run"
    assert configuration(file=tmp_path / "one.toml", changes=["model=resnet8"]).model == "resnet8"
    (tmp_path / "one.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        configuration(file=tmp_path / "one.toml")


def test_settings_that_fetch_are_dropped() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    harmful = {**config.to_dict(), "attn_implementation": "someone/kernel", "auto_map": {"AutoModel": "x--y.Z"}}
    model = transformers_model("BertModel", harmful)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(model.config, "auto_map")


def _nested(folder: Path) -> None:
    (folder / "plan.json").write_text('{"a":' * 100_000)


def _huge_plan(folder: Path) -> None:
    with (folder / "plan.json").open("wb") as file:
        file.truncate(1 << 40)


def _many_values(folder: Path) -> None:
    (folder / "plan.json").write_bytes(b'{"a":[' + b"[]," * 20_000_000 + b"1]}")


def _zero_link(folder: Path) -> None:
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to("/dev/zero")


def _pipe(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    os.mkfifo(folder / "weights.safetensors")
    change_plan(folder, files={})


def _loop(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").symlink_to("weights.safetensors")


def _outside(folder: Path) -> None:
    change_plan(folder, weights="../../../etc/passwd")


def _header(folder: Path) -> None:
    with (folder / "weights.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 62))
        file.truncate(1 << 40)
    change_plan(folder, files={})


def _many_tensors(folder: Path) -> None:
    entries = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_500_000))
    header = f"{{{entries}}}".encode()
    (folder / "weights.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    change_plan(folder, files={})


def _sparse_weights(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [1 << 34], "data_offsets": [0, 1 << 34]}}).encode()
    with (folder / "weights.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 34))
    change_plan(folder, files={})


def _pickled_weights(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "weights.safetensors")
    change_plan(folder, files={})


def _no_source(folder: Path) -> None:
    change_plan(folder, source=["os", "abort"])


def _zero_weights(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").symlink_to("/dev/zero")
    plan = json.loads((folder / "plan.json").read_bytes())
    change_plan(folder, files={name: {**listed, "bytes": 0} for name, listed in plan["files"].items()})


def _huge_model(folder: Path) -> None:
    change_plan(folder, source="torchvision:vit_h_14")  # 632 million parameters


ATTACKS: list[Callable[[Path], None]] = [_huge_model, _zero_weights,
    _nested, _huge_plan, _many_values, _zero_link, _pipe, _loop, _outside, _header, _many_tensors, _sparse_weights,
    _pickled_weights, _no_source,
]  # fmt: skip
LOADED = """
import re, sys
import normfree as nf
from normfree.conversion.saving import load_converted
for folder in sys.argv[1:]:
    try:
        nf.load(folder)
    except (ValueError, OSError) as error:
        print(type(error).__name__, "lines", str(error).count(chr(10)), folder)
    else:
        print("loaded", folder)
# The peak of this program alone; getrusage counts that of the process that started it, too.
print(1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]))
"""


def test_attacks_are_one_sentence_each_and_take_little_memory(model_folder: Path, tmp_path: Path) -> None:
    folders = []
    for attack in ATTACKS:
        folders.append(copy_of(model_folder, tmp_path / attack.__name__))
        attack(folders[-1])
    command = [sys.executable, "-c", LOADED, *map(str, folders)]
    path = {**os.environ, "PYTHONPATH": str(Path(nf.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=path)
    assert done.returncode == 0, done.stderr
    *lines, memory = done.stdout.splitlines()
    assert len(lines) == len(ATTACKS)
    for line in lines:
        assert line.split()[1:3] == ["lines", "0"], line
    assert int(memory) < GIB


@pytest.mark.parametrize(
    "place",
    ["branches 0 layers 0 parameter", "branches 0 first_layers 0 name", "branches 0 layer_scales", "changes method"],
)
def test_forged_plan_is_one_sentence(model_folder: Path, tmp_path: Path, place: str) -> None:
    folder = copy_of(model_folder, tmp_path / "m")
    plan = json.loads((folder / "plan.json").read_bytes())["plan"]
    *parents, last = place.split()
    part = plan
    for name in parents:
        part = part[int(name) if name.isdigit() else name]
    for value in (5, None, {"a": 1}):
        part[last] = value
        change_plan(folder, plan=plan)
        with pytest.raises(ValueError, match="save the model again"):
            nf.load(folder, thin_resnet)


@pytest.mark.parametrize("built", [5, ["a"], ["BertModel", 5], ["BertModel", {"hidden_size": "x"}]])
def test_forged_settings_of_transformers_are_one_sentence(model_folder: Path, tmp_path: Path, built: Any) -> None:
    pytest.importorskip("transformers")
    folder = copy_of(model_folder, tmp_path / "m")
    change_plan(folder, transformers=built)
    with pytest.raises(ValueError, match=r"expected (the plan|settings)") as caught:
        nf.load(folder)
    assert "\n" not in str(caught.value)


def forged_run(folder: Path, *, model: str | None = None, **state: Any) -> Path:
    """A run whose configuration names another model, or whose state has other values; its checksums are right."""
    run = copy_of(FIXTURES / "run-stopped", folder)
    saved = checkpoint.latest(run)
    assert saved is not None
    digest, found = checkpoint.read_state(saved)
    if model is not None:
        text = re.sub(r"(?m)^model = .*", f'model = "{model}"', (run / "config.toml").read_text())
        write_sealed_text(run / "config.toml", text)
    (saved / checkpoint.STATE).write_bytes(checkpoint._render_state(digest, {**found, **state}, None))
    return run


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("resnet60002", "names a far larger one"),
        ("wrn-10-100000", "names a far larger one"),
        ("torchvision:vit_h_14", "names a far larger one"),
        ("resnet6000000002", "numbers of at most 6 digits"),
        ("resnet" + "9" * 5000, "numbers of at most 6 digits"),
    ],
)
def test_run_that_names_a_huge_model_is_refused(tmp_path: Path, model: str, error: str) -> None:
    nf.load(forged_run(tmp_path / "as it was"))
    with pytest.raises(ValueError, match=error):
        nf.load(forged_run(tmp_path / "run", model=model))


@pytest.mark.parametrize("shape", [[3, 60_000, 60_000], [], [3, -1, 4], ["3"]])
def test_run_with_impossible_images_is_refused(tmp_path: Path, shape: list[Any]) -> None:
    run = forged_run(tmp_path / "run", input_shape=shape)
    for read in (nf.load, noise_for):
        with pytest.raises(ValueError, match="expected classes and a shape of images"):
            read(run)


def test_forged_configuration_in_a_state_is_one_sentence(tmp_path: Path) -> None:
    run = forged_run(tmp_path / "run", config="a = [")
    with pytest.raises(ValueError, match="run' is not valid TOML"):
        nf.load(run)


# Images and data


def png(path: Path, width: int, height: int) -> None:
    """A grey image whose compressed rows are all zero."""
    packed = zlib.compressobj(9)
    rows = b"".join(packed.compress(bytes(width + 1)) for _ in range(height)) + packed.flush()
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"IDAT": rows, b"IEND": b""}
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in parts.items():
        content += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    path.write_bytes(content)


def image_folder(root: Path) -> Path:
    for place in ("train/a", "val/a"):
        (root / place).mkdir(parents=True)
        png(root / place / "1.png", 20, 20)
    return root


@pytest.mark.parametrize(("width", "height"), [(60_000, 1), (1, 60_000)])
def test_long_image_is_scored_in_little_memory(tmp_path: Path, width: int, height: int) -> None:
    from PIL import Image

    png(image_folder(tmp_path) / "val" / "a" / "2.png", width, height)
    largest = 0
    resize = Image.Image.resize

    def watched(self: Any, size: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, size[0] * size[1])
        return resize(self, size, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Image.Image, "resize", watched)
        (x, _), *_ = folder_in_order(read_folder(tmp_path, "val"), batch_size=4)
    assert x.shape == (2, 3, 224, 224)
    assert largest <= 16 * 256 * 256


def test_forged_images_are_one_sentence(tmp_path: Path) -> None:
    image_folder(tmp_path)
    place = tmp_path / "val" / "a" / "1.png"
    whole = place.read_bytes()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(ran) (w) file closefile\n%%EOF\n"
    sized = whole[:16] + struct.pack(">II", 60_000, 60_000) + whole[24:]
    sized = sized[:29] + struct.pack(">I", zlib.crc32(sized[12:29])) + sized[33:]
    for content in (eps, sized, whole[:40], b"", b"\x89PNG\r\n\x1a\n" + b"\xff" * 100):
        place.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected an image in 'a/1.png', which cannot be read") as caught:
            next(folder_in_order(read_folder(tmp_path, "val"), batch_size=1))
        assert "\n" not in str(caught.value)
    place.unlink()
    place.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="found none"):
        read_folder(tmp_path, "val")


def test_image_changed_in_place_is_noticed(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    files = list(read_folder(root, "train").files)
    before = contents_digest(root, files)
    assert contents_digest(root, files) == before == contents_digest(root, files, cached=False)
    content = files[0].read_bytes()
    stamp = files[0].stat().st_mtime_ns
    files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(files[0], ns=(stamp, stamp + 1_000_000))
    assert contents_digest(root, files) != before
    os.utime(files[0], ns=(stamp, stamp))  # a change that keeps size and time is found without the cache only
    assert contents_digest(root, files, cached=False) != before
    files[0].write_bytes(content)
    assert contents_digest(root, files, cached=False) == before
    (files[0].parent / CACHE).write_text("damaged")
    assert contents_digest(root, files) == before


def test_forged_type_in_a_pickle_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    whole = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]}
    for protocol in range(5):  # the fifth names other functions, and no data set uses it
        path.write_bytes(pickle.dumps(whole, protocol=protocol))
        assert read_pickled(path, 10).images.shape == (1, 3, 32, 32)
        raw = pickle.dumps(whole, protocol=protocol)
        for code in (b"O8", b"V9", b"M8"):
            path.write_bytes(raw.replace(b"u1", code))
            with pytest.raises(ValueError, match="does not hold bytes"):
                read_pickled(path, 10)


def test_forged_size_in_an_idx_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">III", 1 << 31, 1 << 31, 4) + bytes(100))
    with pytest.raises(ValueError, match="expected an idx file of 3 dimensions"):
        read_idx(path, path)


@pytest.mark.faults
@pytest.mark.parametrize(
    "content",
    [b'{"a":' * 200_000, b'{"runs":[' + b"[]," * 2_000_000 + b"1]}", None],
    ids=["nested", "many values", "endless"],
)
def test_forged_comparison_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "comparison.json"
    if content is None:
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a comparison in") as caught:
        redraw(path)
    assert "\n" not in str(caught.value)


def test_size_beyond_64_bits_in_weights_is_one_sentence(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="is damaged: it has an impossible size"):
        read_tensors(path)


def test_prepared_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    folder = tiny_pairs(tmp_path).folder
    with (folder / "train.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="the file is too long"):
        open_prepared(folder)


def test_endless_line_of_compressed_text_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_LONGEST_LINE", 1 << 20)
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20) + b"\n"))
    with pytest.raises(ValueError, match="expected lines of at most 1 MiB"):
        list(text_files.read_lines(path))
