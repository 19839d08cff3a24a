"""The entries of the ledger: every claim with the result that counts, its status, and the words for both."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normfree.comparison.sweep import ended_result
from normfree.report.formatting import percent
from normfree.report.tables import Column
from normfree_papers.claims.claim import Check, Claim, Judgement, Row, Scale, Status, Verdict, judge
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.storage import Result, stored

MARKS: dict[Status, str] = {"holds": "✓ holds", "partly": "◐ holds in part", "fails": "✗ fails", "not run": "– not run"}
VERDICTS: dict[Verdict, str] = {
    "holds": "✓ holds",
    "fails": "✗ fails",
    "missing": "– missing",
    "paper errs": "◐ paper errs",
}
CHECK_COLUMNS = (  # the verdict first: a phone shows two columns of five
    Column("verdict", marked=True),
    Column("check"),
    Column("paper", "right"),
    Column("expected", "right"),
    Column("measured", "right"),
)
RUN_COLUMNS = ("run", "ended", "test", "epochs", "time", "hardware", "commit")


@dataclass(frozen=True)
class Entry:
    """A claim with the result that is shown, and its judgement; `full` is the full result, even without numbers."""

    claim: Claim
    result: Result | None
    judgement: Judgement
    full: Result | None = None

    @property
    def status(self) -> Status:
        """The status of the claim."""
        return self.judgement.status

    @property
    def is_quick(self) -> bool:
        """Whether the result is that of a small stand-in."""
        return self.result is not None and self.result["scale"] == "quick"

    @property
    def status_text(self) -> str:
        """The status in words, and a note if it rests on a stand-in or on some of the runs."""
        runs = self.result.get("runs", {}) if self.result else {}
        notes = ["small stand-in"] if self.is_quick else []
        notes += [f"{len(self.folders)} of {len(runs)} runs made"] if 0 < len(self.folders) < len(runs) else []
        return MARKS[self.status] + (f" ({', '.join(notes)})" if notes else "")

    @property
    def folders(self) -> dict[str, str]:
        """The folders of the training runs that were made, by name."""
        runs = self.result.get("runs", {}) if self.result else {}
        return {name: run["folder"] for name, run in runs.items() if "folder" in run}

    @property
    def planned(self) -> Result:
        """The result that lists the planned runs: the full one, if there is one."""
        return self.full or self.result or {}

    @property
    def missing_runs(self) -> dict[str, float]:
        """The training runs that were not made, with the seconds that each takes on a GPU."""
        return missing_runs_of(self.planned)


def entries(out: str | Path, claims: Iterable[Claim] | None = None) -> tuple[Entry, ...]:
    """Every claim with its result below `out`: the full one, or the quick one if the full one has no number.

    Raises:
        ValueError: for a stored file that is no result.
    """
    found = []
    for claim in all_claims() if claims is None else claims:
        full, quick = (stored(out, claim, scale) for scale in ("full", "quick"))
        shown = full if quick is None or judge(claim, full).status != "not run" else quick
        found.append(Entry(claim, shown, judge(claim, shown), full))
    return tuple(found)


# In words


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """A check as text, one cell per column of `CHECK_COLUMNS`."""
    paper = row.check.paper
    shown = "" if paper is None else f"{paper:.5g}" if isinstance(paper, float | int) else paper
    aside = " (aside)" if row.verdict == "fails" and not row.check.main else ""
    lacks = f", no {row.check.lacks}" if row.check.lacks else ""
    verdict = VERDICTS[row.verdict] + aside + lacks
    return verdict, row.check.statement, shown, range_text(row.check), number(row.measured, row.std)


def range_text(check: Check) -> str:
    """The range of a check in words.

    >>> from normfree_papers.claims.claim import expect
    >>> range_text(expect("x", high=2).says("x is small", why="the text"))
    '≤ 2'
    """
    low, high = check.low, check.high
    if low is None or high is None:
        return f"≥ {low:.4g}" if low is not None else f"≤ {high:.4g}"
    digits = 6 if abs(high - low) < 0.01 * abs(high) else 4
    return f"{low:.{digits}g} to {high:.{digits}g}"


def number(value: float | None, std: float | None) -> str:
    """A measured value with its spread.

    >>> number(0.951, 0.0123), number(None, None)
    ('0.951 ± 0.012', '')
    """
    if value is None:
        return ""
    if std is None or not math.isfinite(std):
        return f"{value:.5g}"
    return f"{value:.4g} ± {std:.2g}"


def rough_duration(seconds: float) -> str:
    """Seconds rounded in one unit, as an estimate.

    >>> rough_duration(40), rough_duration(240), rough_duration(7200)
    ('40 s', '4 min', '2 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def cost_of(claim: Claim, scale: Scale) -> str:
    """About how long a claim takes, and on which device."""
    if scale == "quick":
        return f"{rough_duration(claim.cost.quick_seconds)} on one core"
    return f"{rough_duration(claim.cost.full_seconds)} on {'one H200' if claim.cost.device == 'gpu' else 'one core'}"


def command_of(claim: Claim, scale: Scale = "full", run: str | None = None) -> str:
    """The command that runs a claim, or one of its training runs."""
    words = ["normfree", "reproduce", claim.id, *(["--quick"] if scale == "quick" else [])]
    words += ["--only", run] if run is not None else []
    words += ["--device", "cuda"] if scale == "full" and claim.cost.device == "gpu" else []
    return shlex.join(words)


def not_run_of(entry: Entry) -> tuple[str, str] | None:
    """The part of a claim that was not run, and about how long it takes."""
    claim = entry.claim
    if entry.full is None:
        what = ("the full scale" if entry.is_quick else "all") + (f", for lack of {claim.lacks}" if claim.lacks else "")
        return what, cost_of(claim, "full")
    if missing := entry.missing_runs:
        count = f"{len(missing)} of {len(entry.full['runs'])} training runs"
        return count, f"{rough_duration(sum(missing.values()))} on one H200"
    return None


def missing_runs_of(result: Result) -> dict[str, float]:
    """The training runs that a result lacks, with the seconds that each takes on a GPU."""
    runs = result.get("runs", {})
    return {name: float(run["gpu_seconds"]) for name, run in runs.items() if "folder" not in run}


def origin_of(result: Result) -> dict[str, str]:
    """The provenance of a result; time and machine are those of each training run, if there are any."""
    judged = {
        "command": result.get("command", ""),
        "commit": _short(result.get("commit", "")),
        "date": result.get("date", "")[:10],
        "seeds": _span(result["seeds"]),
    }
    if result.get("runs"):
        return judged
    ran = result.get("hardware", {})
    machine = [ran.get("gpu"), ran.get("cpu"), f"{ran['cores']} cores" if ran.get("cores") else None]
    return {
        **judged,
        "time": rough_duration(result.get("seconds", 0.0)),
        "hardware": ", ".join(part for part in machine if part),
        "versions": ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items()),
    }


def _span(seeds: Sequence[int]) -> str:
    """Seeds in words.

    >>> _span([0, 1, 2, 3]), _span([0, 5])
    ('0 to 3', '0, 5')
    """
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _short(commit: str) -> str:
    """A commit by its first digits, and whether the source had changes."""
    name, dirty, _ = commit.partition("+")
    return name[:10] + (dirty and "+dirty")


def counts_of(found: Sequence[Entry]) -> str:
    """The number of claims by status; those with only a small stand-in are counted separately."""
    parts = [f"{len(found)} claim{'s' if len(found) != 1 else ''}: {_counts([e for e in found if not e.is_quick])}"]
    if quick := [entry for entry in found if entry.is_quick]:
        parts.append(f"of {len(quick)} only a small stand-in was run: {_counts(quick)}")
    return "; ".join(part.removesuffix(": ") for part in parts)


def _counts(found: Sequence[Entry]) -> str:
    words: dict[Status, str] = {"holds": "hold", "partly": "in part", "fails": "fail", "not run": "not run"}
    counts = Counter(entry.status for entry in found)
    return ", ".join(
        f"{counts[status]} {status if counts[status] == 1 and status != 'partly' else word}"
        for status, word in words.items()
        if counts[status]
    )


def runs_of(entry: Entry, out: Path) -> list[tuple[str, Path, Mapping[str, Any] | None]]:
    """The training runs of a claim: name, folder, and result if it is still stored."""
    runs = {name: out / "runs" / folder for name, folder in entry.folders.items()}
    return [(name, folder, ended_result(folder)) for name, folder in runs.items()]


def run_cells(name: str, result: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A training run as text, in the order of `RUN_COLUMNS`."""
    if result is None:
        return name, "no longer kept", *[""] * (len(RUN_COLUMNS) - 2)
    accuracy = percent(result["test"]["accuracy"], digits=2) if result["test"] else ""
    if result.get("bleu"):
        accuracy = f"BLEU {result['bleu']['score']:.2f}"
    where = origin_of({"seeds": [], **result})
    numbers = accuracy, f"{result['epochs']:.4g}", rough_duration(result["seconds"])
    return name, result["status"], *numbers, where["hardware"], where["commit"]
