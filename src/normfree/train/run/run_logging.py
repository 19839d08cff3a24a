"""The curves and the TensorBoard log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normfree.extras import missing_package
from normfree.files import explain_os_errors
from normfree.report.training_curves import draw_training_curves
from normfree.train.run.run_folder import RunFolder


def write_curves(folder: RunFolder, title: str) -> Path | None:
    """Draw the metrics of a run into curves.png; return None if there are none yet, or matplotlib is not installed."""
    records = folder.read_metrics()
    path = folder.path / "curves.png"
    if not records:
        return None
    try:
        with explain_os_errors("the picture", path):
            draw_training_curves(records, path, title)
    except ImportError:  # a run does not need a picture
        return None
    return path


class EventLog:
    """A TensorBoard log in the folder of a run.

    TensorBoard hides records after step `done`, left by an interrupted run.

    Raises `ValueError` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(missing_package("tensorboard", "tensorboard=true")) from error
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record."""
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the writing thread."""
        self._writer.close()
