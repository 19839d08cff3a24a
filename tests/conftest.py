"""Settings for all tests: progress lines, and a fixture for GPU tests."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest_plugins = ["chromium", "fault_counts", "optional_packages"]

# A shell starts background jobs with SIGINT ignored, and processes that a test starts inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off progress lines, since many tests expect an empty stderr."""
    monkeypatch.setattr("normfree.report.terminal.EVERY", float("inf"))


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that `normfree.comparison` has trained in this process."""
    from normfree.comparison import compare_runs

    original, seen = compare_runs.fit, []

    def fit(config: Any, **options: Any) -> Any:
        seen.append(config)
        return original(config, **options)

    monkeypatch.setattr(compare_runs, "fit", fit)
    return seen


@pytest.fixture
def cuda() -> Iterator[None]:
    """Convolutions that give the same numbers every time and in float32."""
    from torch._dynamo import config, reset

    reset()
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with flags, config.patch(recompile_limit=64):
        yield
