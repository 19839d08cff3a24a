"""Verify a stored folder: compare every file of a run, a conversion, prepared data or images with its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from normfree.conversion.saving import EXAMPLE, PLAN, is_converted, read_record, weights_name
from normfree.data.images.image_checksums import altered_images
from normfree.data.images.image_folder import folder_in_order, read_folder
from normfree.data.text.prepared_folder import MANIFEST, VOCABULARY, open_prepared
from normfree.storage.reading import Checksum, has_checksum, parse_json, read_limited, read_sealed_json, read_tensors
from normfree.train.run import checkpoint
from normfree.train.run.loading import load_vocabulary
from normfree.train.run.run_folder import RunFolder

FileState = Literal["whole", "no checksum", "damaged"]


@dataclass(frozen=True)
class CheckedFile:
    """A file of a folder, its state, and for a file that is not whole, why."""

    name: str
    state: FileState
    why: str = ""


def verify_folder(folder: str | Path) -> tuple[str, list[CheckedFile]]:
    """Compare the files of a stored folder with their checksums; nothing is imported or run.

    Args:
        folder: The folder of a run, sharded checkpoints, a converted model, prepared text, images (train/<class>/…) or
            stored results.

    Returns:
        The kind of the folder, and its files. A file that an earlier release wrote has no checksum; it was read.

    Raises:
        ValueError: If the folder is none of these.
    """
    folder = Path(folder)
    if RunFolder(folder).exists:
        return "run", list(_run(folder))
    if is_converted(folder):
        return "converted model", list(_conversion(folder))
    if (folder / MANIFEST).exists():
        return "prepared text", [_checked(MANIFEST, lambda: open_prepared(folder))]
    if (folder / "train").is_dir():
        return "images", [_checked(part, partial(_images, folder, part)) for part in ("train", "val")]
    results = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith(".") and _is_result(path)]
    if results:
        return "results", [_checked(path.name, partial(_sealed, path), has_checksum(path)) for path in results]
    raise ValueError(
        f"expected the folder of a run, a converted model, prepared text or images at '{folder}', found none of their "
        "files; give the folder that --out named"
    )


def _run(folder: Path) -> Iterator[CheckedFile]:
    run = RunFolder(folder)
    config, result, metrics = run.config_path, run.result_path, run.metrics_path
    if config.exists() or not checkpoint.newest_first(folder):  # sharded checkpoints have none
        yield _checked(config.name, run.read_config, has_checksum(config))
    if (folder / PLAN).exists():
        yield _checked(PLAN, lambda: read_record(folder), has_checksum(folder / PLAN))
    for saved in reversed(checkpoint.newest_first(folder)):
        yield _checked(f"{saved.name}/", partial(checkpoint.verify, saved))
    if (folder / VOCABULARY).exists():
        yield _checked(VOCABULARY, lambda: load_vocabulary(folder))
    if result.exists():
        yield _checked(result.name, partial(_sealed, result), has_checksum(result))
    if metrics.exists():
        yield _checked(metrics.name, run.read_metrics)


def _conversion(folder: Path) -> Iterator[CheckedFile]:
    plan = _checked(PLAN, lambda: read_record(folder), has_checksum(folder / PLAN))
    yield plan
    if plan.state == "damaged":
        return
    record = read_record(folder)
    listed: dict[str, Any] = record.get("files", {})

    def check(name: str) -> None:
        if name in listed:
            Checksum.from_json(listed[name]).check(folder / name, name, "save the model again")
        elif name.endswith(".safetensors"):
            read_tensors(folder / name)

    for name in dict.fromkeys([weights_name(record), EXAMPLE, *listed]):
        yield _checked(name, partial(check, name), name in listed or not name.endswith(".safetensors"))


def _images(folder: Path, part: str) -> None:
    images = read_folder(folder, part)
    if altered := altered_images(images.files):
        raise ValueError(f"expected the images as they were, but {len(altered)} changed, such as '{altered[0]}'")
    for _ in folder_in_order(images, batch_size=16):
        pass


def _is_result(path: Path) -> bool:
    """Whether a JSON file is a result of normfree: sealed, or with its commit and versions; a broken one may be."""
    try:
        found = parse_json(read_limited(path))
    except ValueError:
        return True
    return isinstance(found, dict) and ("sha256" in found or {"commit", "versions"} <= found.keys())


def _sealed(path: Path) -> None:
    read_sealed_json(path, "a stored result", "restore it, or run it again")


def _checked(name: str, read: Callable[[], object], has_sum: bool = True) -> CheckedFile:
    """Read a file, which raises if it is damaged."""
    try:
        read()
    except (ValueError, OSError) as error:
        return CheckedFile(name, "damaged", " ".join(str(error).split()))
    return CheckedFile(name, "whole") if has_sum else CheckedFile(name, "no checksum", "an earlier release wrote it")
