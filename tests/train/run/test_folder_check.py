"""`normfree check`: every flipped byte of every kind of stored file is found, and whole folders are whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from normfree.cli.verbs import run
from normfree.conversion import convert
from normfree.conversion.saving import save_converted
from normfree.data.images.image_checksums import contents_digest
from normfree.data.images.image_folder import read_folder
from normfree.storage.writing import write_sealed_json
from normfree.train.engine import loop as engine
from normfree.train.run import checkpoint
from normfree.train.run.folder_check import verify_folder
from thin_resnet import thin_resnet
from tiny_images import tiny_images

FIXTURES = Path(__file__).parents[2] / "fixtures" / "release-0.1"


def make_run(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        patch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())
        nf.fit(nf.TrainConfig(model="resmlp-2-8", epochs=1, batch_size=16), out=folder)


def make_conversion(folder: Path) -> None:
    images = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model, plan = convert(thin_resnet(), "fixup", images, generator=torch.Generator().manual_seed(0))
    save_converted(folder, model, plan, example=images)


def make_images(folder: Path) -> None:
    from PIL import Image

    for part in ("train", "val"):
        (folder / part / "a").mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(folder / part / "a" / "1.png")
        contents_digest(folder, read_folder(folder, part).files)


KINDS = {"run": make_run, "converted model": make_conversion, "images": make_images}


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("stored") / "one"
    make: Callable[[Path], None] = KINDS[request.param]
    make(folder)
    return request.param, folder


def test_whole_folder_is_whole(stored: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    kind, folder = stored
    found, files = verify_folder(folder)
    assert found == kind
    assert {file.state for file in files} == {"whole"}
    with pytest.raises(SystemExit) as caught:
        run(["check", str(folder)])
    assert not caught.value.code
    assert f"{len(files)} whole." in " ".join(capsys.readouterr().out.split())


def test_flipped_byte_of_any_file_is_found(
    stored: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = stored
    unread = {"lock", "curves.png", "page.html", "signal.jsonl", ".normfree-contents.json"}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in unread]
    for path in paths:
        copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2))
        altered = copy / path.relative_to(folder)
        raw, times = altered.read_bytes(), altered.stat()
        middle = next(i for i in range(len(raw) // 2, len(raw)) if chr(raw[i]).isalnum())
        altered.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
        os.utime(altered, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(SystemExit) as caught:
            run(["check", str(copy)])
        assert caught.value.code == 1, altered
        assert "damaged" in capsys.readouterr().out
        shutil.rmtree(copy)
    assert paths


@pytest.mark.parametrize("name", ["run-stopped", "run-converted"])
def test_folder_of_before_has_no_checksums_and_is_said_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _, files = verify_folder(FIXTURES / name)
    states = {file.name: file.state for file in files}
    assert states["config.toml"] == "no checksum"
    assert "damaged" not in states.values()
    assert not caplog.records


def test_other_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["check", str(tmp_path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: expected the folder of a run, a converted model")


def test_json_of_others_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="expected the folder of a run, a converted model"):
        verify_folder(tmp_path)
    write_sealed_json(tmp_path / "fig1.json", {"claim": "fixup/fig1"})
    (tmp_path / "fig2.json").write_text('{"commit": "none", "versions": {}}')
    kind, files = verify_folder(tmp_path)
    assert kind == "results"
    assert {file.name: file.state for file in files} == {"fig1.json": "whole", "fig2.json": "no checksum"}


def test_cost_of_many_damaged_checkpoints_grows_with_their_number_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(40):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "state.json").write_text("{}")
    original, listed = checkpoint.newest_first, []

    def newest_first(run: Any) -> list[Path]:
        listed.append(run)
        return original(run)

    monkeypatch.setattr(checkpoint, "newest_first", newest_first)
    _, files = verify_folder(tmp_path)
    assert [file.state for file in files] == ["damaged"] * 40
    assert "delete its folder to continue from another checkpoint" in files[0].why
    with pytest.raises(ValueError, match=r"is damaged .*; start the run again$"):
        checkpoint.load_intact(tmp_path)
    assert len(listed) < 10
