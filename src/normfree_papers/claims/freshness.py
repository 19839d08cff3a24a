"""Whether the training runs behind a claim are those that today's code would make.

A run is *stale* if it was made by an earlier definition of the method that the claim asks for, or if its canary, the
figures of a few steps of small networks, differs from today's. Without a canary it is *unknown*.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normfree.train import RunFolder
from normfree.train.settings import read_toml
from normfree_papers.claims.canary import stale_families
from normfree_papers.claims.run_index import canonical

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


def freshness_of(out: Path, runs: Mapping[str, Mapping[str, Any]]) -> Freshness:
    """Judge the runs of a result: the records of the kept ones have their folder and the method asked for.

    A result of release 0.1 does not say which method was asked for: it is the one that the run's file names.
    """
    made = [_run(out, run["folder"], run.get("method")) for run in runs.values() if "folder" in run]
    found = Counter(made)
    if not found:
        return Freshness()
    states = {state for state, _ in found}
    state: State = "stale" if "stale" in states else "unknown" if "unknown" in states else "fresh"
    counted = sorted(found.items(), key=lambda item: (item[0][0], -item[1]))
    reasons = (f"{count} of {len(made)} runs {reason}" for (_, reason), count in counted if reason)
    return Freshness(state, tuple(reasons))


def _run(out: Path, name: str, asked: str | None) -> tuple[State, str]:
    """The state of one run, and the reason."""
    run = RunFolder(out / "runs" / name)
    if not run.config_path.exists() or not run.result_path.exists():
        return "unknown", "no longer kept"
    config, result = run.read_config(), run.read_result()
    wanted = asked or str(read_toml(run.config_path)["method"])
    if canonical(config.method) != canonical(wanted):
        return "stale", f"made with {config.method}, not {wanted}"
    families = stale_families(config, result.get("canary") or _canary_of(out, result["commit"]))
    if families is None:
        return "unknown", "without a canary"
    return ("stale", f"with another canary ({', '.join(families)})") if families else ("fresh", "")


def _canary_of(out: Path, commit: str) -> Any:
    """The canary of an earlier commit, as stored beside the results; "unknown" if there is none."""
    path = out / "canaries.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"commits": {}}
    return stored["commits"].get(commit, "unknown")
