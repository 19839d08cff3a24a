"""The TensorBoard log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normfree.errors import missing_package


class TensorBoardLog:
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
