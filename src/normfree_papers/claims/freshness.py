"""Freshness: whether today's code would make the same training runs as those that a claim rests on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normfree_papers.claims.canary import stale_probes
from normfree_papers.claims.run_cache import KeptRun, made_runs

FreshnessState = Literal["fresh", "stale", "unknown", ""]


@dataclass(frozen=True)
class Freshness:
    """Whether runs are stale, with the reasons; the state is empty without runs."""

    state: FreshnessState = ""
    reasons: tuple[str, ...] = ()


def kept_results(out: Path, result: Mapping[str, Any]) -> tuple[dict[str, Any], Freshness]:
    """The results of the runs of a claim by folder, None if one is no longer kept, and the freshness of all."""
    runs = made_runs(result)
    kept = {run["folder"]: KeptRun(out / "runs" / run["folder"]) for run in runs.values()}
    return {folder: run.result for folder, run in kept.items()}, freshness_of(out, runs, kept)


def freshness_of(out: Path, runs: Mapping[str, Mapping[str, Any]], kept: Mapping[str, KeptRun]) -> Freshness:
    """Judge the runs of a result.

    A result of release 0.1 does not say which method was asked for: it is the one that the run's file names.

    Args:
        out: Folder of the results, with canaries.json.
        runs: The records of the runs that were made: their folder, and the method asked for.
        kept: The kept runs by folder.
    """
    commits = _canaries(out)
    made = [_run(commits, kept[run["folder"]], run.get("method")) for run in runs.values()]
    found = Counter(made)
    if not found:
        return Freshness()
    states = {state for state, _ in found}
    state: FreshnessState = "stale" if "stale" in states else "unknown" if "unknown" in states else "fresh"
    counted = sorted(found.items(), key=lambda item: (item[0][0], -item[1]))
    reasons = (f"{count} of {len(made)} runs {reason}" for (_, reason), count in counted if reason)
    return Freshness(state, tuple(reasons))


def _run(commits: Mapping[str, Any], run: KeptRun, asked: str | None) -> tuple[FreshnessState, str]:
    """The state of one run, and the reason."""
    if run.result is None:
        return "unknown", "no longer kept"
    wanted = asked or run.written_method
    if not run.is_of(wanted):
        return "stale", f"made with {run.config.method}, not {wanted}"
    probes = stale_probes(run.config, run.result.get("canary") or commits.get(run.result["commit"], "unknown"))
    if probes is None:
        return "unknown", "without reference values to compare"
    return (
        ("stale", f"for which today's code computes other reference values ({', '.join(probes)})")
        if probes
        else ("fresh", "")
    )


def _canaries(out: Path) -> Mapping[str, Any]:
    """The canaries of earlier commits, as stored beside the results."""
    path = out / "canaries.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["commits"]) if path.exists() else {}
