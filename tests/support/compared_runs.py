"""Two runs compared to the last bit, but for what tells the time or the command."""

from pathlib import Path
from typing import Any

import torch

from normfree.train import RunFolder
from normfree.train.run import checkpoint

TIMES = {
    "seconds", "setup_seconds", "images_per_second", "tokens_per_second", "date", "signal", "command", "commit",
    "files",
}  # fmt: skip


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the entries that differ between two equal runs."""
    return {name: value for name, value in record.items() if name not in TIMES}


def differences(one: Path, two: Path) -> list[str]:
    """What of two runs is not equal to the last bit: tensors, state, metrics, result and translations."""
    (a, state_a), (b, state_b) = checkpoint.load(one), checkpoint.load(two)
    wrong = [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
    pairs = {
        "state": [without_times(state) for state in (state_a, state_b)],
        "metrics": [[without_times(r) for r in RunFolder(run).read_metrics()] for run in (one, two)],
        "result": [without_times(RunFolder(run).read_result()) for run in (one, two)],
        "translations": [_content(run / "translations.txt") for run in (one, two)],
    }
    return wrong + [name for name, (x, y) in pairs.items() if x != y]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
