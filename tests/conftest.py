"""Lets torchvision be imported where its compiled library does not load, silences progress, and readies a GPU."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def _torchvision_loads() -> bool:
    spec = find_spec("torchvision")
    for library in Path(spec.origin).parent.glob("_C.*") if spec and spec.origin else ():
        try:
            torch.ops.load_library(library)
        except OSError:
            return False
    return True


if torch.version.cuda is None and not _torchvision_loads():
    # A module variable, because the operators vanish with the library object.
    _torchvision = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of progress on stderr, where many tests expect nothing, however slow the machine is."""
    monkeypatch.setattr("normfree.report.progress.EVERY", float("inf"))


@pytest.fixture
def cuda() -> Iterator[None]:
    """Convolutions that give the same numbers every time and in float32."""
    from torch._dynamo import config, reset

    reset()
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with flags, config.patch(recompile_limit=64):
        yield
