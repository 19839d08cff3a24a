"""Whether the training runs behind a claim are those that today's code would make, and their precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normfree.comparison.sweep import ended_result

State = Literal["fresh", "stale", "unknown", ""]


@dataclass(frozen=True)
class Freshness:
    """Whether runs are stale, with the reasons; the state is empty without runs."""

    state: State = ""
    reasons: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """State and reasons in words."""
        return f"{self.state}: {'; '.join(self.reasons)}" if self.reasons else self.state


def stored_runs(out: Path, folders: Iterable[str]) -> dict[str, Mapping[str, Any] | None]:
    """The results of kept training runs by folder; None for one that is no longer kept."""
    return {folder: ended_result(out / "runs" / folder) for folder in dict.fromkeys(folders)}


def precisions(runs: Iterable[Mapping[str, Any] | None]) -> str:
    """The precisions of training runs, the most frequent first.

    >>> precisions([{"config": {"precision": "mixed"}}, {"config": {"precision": "float32"}}] * 2)
    'mixed, float32'
    """
    found = Counter(run["config"]["precision"] for run in runs if run is not None and "config" in run)
    return ", ".join(name for name, _ in found.most_common())
