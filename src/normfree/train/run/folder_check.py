"""Verify a stored folder: compare every file of a run, a conversion, prepared data or images with its checksum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from normfree.checksums import Checksum, read_sealed_json
from normfree.conversion.saving import EXAMPLE, PLAN, is_converted, read_record, weights_name
from normfree.data.images.folder_contents import altered_images
from normfree.data.images.image_folder import folder_in_order, read_folder
from normfree.data.text.prepared_folder import MANIFEST, VOCABULARY, open_prepared
from normfree.files import read_tensors
from normfree.train.run import checkpoint
from normfree.train.run.loading import load_vocabulary, read_config
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
        folder: The folder of a run, a converted model, prepared text, images (train/<class>/…) or stored claims.

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
    if claims := sorted(path for path in folder.glob("*.json") if not path.name.startswith(".")):
        return "results", [_checked(path.name, partial(_sealed, path)) for path in claims]
    raise ValueError(
        f"expected the folder of a run, a converted model, prepared text or images at '{folder}', found none of their "
        "files; give the folder that --out named"
    )


def _run(folder: Path) -> Iterator[CheckedFile]:
    run = RunFolder(folder)
    yield _checked(run.config_path.name, lambda: read_config(folder))
    if (folder / PLAN).exists():
        yield _checked(PLAN, lambda: read_record(folder))
    for saved in sorted(path for path in folder.iterdir() if checkpoint.step_of(path) >= 0):
        yield _checked(f"{saved.name}/", partial(checkpoint.read, saved))
    if (folder / VOCABULARY).exists():
        yield _checked(VOCABULARY, lambda: load_vocabulary(folder))
    if run.result_path.exists():
        yield _checked(run.result_path.name, lambda: _sealed(run.result_path))
    if run.metrics_path.exists():
        yield _checked(run.metrics_path.name, run.read_metrics)


def _conversion(folder: Path) -> Iterator[CheckedFile]:
    plan = _checked(PLAN, lambda: read_record(folder))
    yield plan
    if plan.state == "damaged":
        return
    with _warnings():
        record = read_record(folder)
        listed: dict[str, Any] = record.get("files", {})
        names = dict.fromkeys([weights_name(record), EXAMPLE, *listed])

    def check(name: str) -> None:
        if name in listed:
            Checksum.from_json(listed[name]).check(folder / name, name, "save the model again")
        elif name.endswith(".safetensors"):
            read_tensors(folder / name)
            logging.getLogger("normfree").warning("no checksum")

    for name in names:
        yield _checked(name, partial(check, name))


def _images(folder: Path, part: str) -> None:
    images = read_folder(folder, part)
    if altered := altered_images(images.files):
        raise ValueError(f"expected the images as they were, but {len(altered)} changed, such as '{altered[0]}'")
    for _ in folder_in_order(images, batch_size=16):
        pass


def _sealed(path: Path) -> None:
    read_sealed_json(path, "a stored result", "restore it, or run it again")


def _checked(name: str, read: Callable[[], object]) -> CheckedFile:
    """Read a file; a warning means that it has no checksum."""
    with _warnings() as warned:
        try:
            read()
        except (ValueError, OSError) as error:
            return CheckedFile(name, "damaged", " ".join(str(error).split()))
    return CheckedFile(name, "no checksum", "an earlier release wrote it") if warned else CheckedFile(name, "whole")


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings of normfree instead of printing them."""
    log, found = logging.getLogger("normfree"), list[logging.LogRecord]()

    def keep(record: logging.LogRecord) -> bool:
        found.append(record)
        return False

    log.addFilter(keep)
    try:
        yield found
    finally:
        log.removeFilter(keep)
