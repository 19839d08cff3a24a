"""The status of every claim: its result, judged, and the texts in which the ledger and the command show both."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from normfree.report.tables import Column
from normfree.report.terminal import percent
from normfree_papers.claims.claim import Check, Claim, Scale
from normfree_papers.claims.judgement import Judgement, Row, Status, Verdict, judge
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.reproduction import Result, default_command, stored
from normfree_papers.claims.run_cache import Freshness, KeptRun, freshness_of, kept_runs, missing_runs

MARKS: dict[Status | Verdict, str] = {
    "holds": "✓ holds",
    "fails": "✗ fails",
    "undecided": "◐ undecided",
    "paper errs": "◐ paper errs",
    "missing": "– missing",
    "not run": "– not run",
}
CHECK_COLUMNS = (  # the verdict first: a phone shows two columns
    Column("verdict", marked=True),
    Column("check"),
    Column("paper", "right"),
    Column("expected", "right"),
    Column("by"),
    Column("measured [95 %]", "right"),
    Column("n", "right"),
)
RUN_COLUMNS = ("run", "ended", "test", "epochs", "precision", "time", "hardware", "commit")


@dataclass(frozen=True)
class Entry:
    """A claim with the result that is shown, and what follows from it.

    Attributes:
        out: Folder of the results.
        full: The full result, even without numbers.
    """

    claim: Claim
    result: Result | None
    out: Path
    full: Result | None = None

    @cached_property
    def judgement(self) -> Judgement:
        """Whether the claim holds."""
        return judge(self.claim, self.result)

    @property
    def status(self) -> Status:
        """The status of the claim."""
        return self.judgement.status

    @cached_property
    def runs(self) -> dict[str, KeptRun]:
        """The training runs that were made, by name."""
        return kept_runs(self.out / "runs", self.result or {})

    @cached_property
    def freshness(self) -> Freshness:
        """Whether the training runs are those of today's code."""
        return freshness_of(self.runs.values(), self.out)

    @cached_property
    def mutants(self) -> Mapping[str, Any]:
        """The record of the planted errors, as the tests stored it."""
        path = self.out / "mutants.json"
        stored_claims = json.loads(path.read_text(encoding="utf-8"))["claims"] if path.exists() else {}
        return dict(stored_claims.get(self.claim.id, {}))

    @property
    def is_quick(self) -> bool:
        """Whether the result is that of a quick run."""
        return self.result is not None and self.result["scale"] == "quick"

    @property
    def status_text(self) -> str:
        """The status in words, with what limits it: a quick run, a stand-in, stale or missing runs."""
        runs = self.result.get("runs", {}) if self.result else {}
        notes = ["quick run"] if self.is_quick else []
        notes += ["stand-in"] if self.claim.stand_in else []
        notes += {"stale": ["stale"], "unknown": ["unknown whether stale"]}.get(self.freshness.state, [])
        notes += [f"{len(self.runs)} of {len(runs)} runs made"] if 0 < len(self.runs) < len(runs) else []
        return MARKS[self.status] + (f" ({', '.join(notes)})" if notes else "")

    @property
    def precision(self) -> str:
        """The arithmetic of the numbers: that of the training runs, the most frequent first, or of the claim."""
        if not self.runs:
            return self.claim.precision if self.result else ""
        configs = [(run.result or {}).get("config") for run in self.runs.values()]
        return "/".join(name for name, _ in Counter(config["precision"] for config in configs if config).most_common())

    @property
    def breaks(self) -> str:
        """The planted errors that make the claim fail, in words."""
        broken, readings = self.mutants.get("broken_by"), self.mutants.get("fails_with_readings")
        if broken:
            texts = [f"fails with {', '.join(broken)}" + self._small_runs]
        elif broken is not None:
            texts = ["none of those tried makes it fail"]
        else:
            texts = ["not yet in training runs" if readings else "not yet tested"]
        if readings:
            minutes = self.mutants["gpu_minutes_of_mutants"]
            runs = " and ".join(f"{mutant} (about {time} GPU minutes)" for mutant, time in minutes.items())
            texts += [f"with made-up runs it fails if {', or if '.join(readings)}"]
            texts += [f"to be trained with the claim: {runs}"] if runs else []
        return "; ".join([*texts, *filter(None, [self.mutants.get("remark")])])

    @property
    def _small_runs(self) -> str:
        """The training runs in which an error was planted, if the claim has any: networks and checks."""
        if "small_runs" not in self.mutants:
            return ""
        models = dict.fromkeys(of["model"] for of in self.mutants["small_runs"].values() if "model" in of)
        networks = f" of {' and '.join(models)}" if models else ""
        broken = dict.fromkeys(check for checks in self.mutants["broken_by"].values() for check in checks)
        return f" in small training runs{networks} on a CPU, by the {self.mutants['scale']} check '{'; '.join(broken)}'"

    @property
    def planned(self) -> Result:
        """The result that lists the planned runs: the full one, if there is one."""
        return self.full or self.result or {}


def entries(out: str | Path, claims: Iterable[Claim] | None = None) -> tuple[Entry, ...]:
    """Every claim with its result below `out`: the full one, or the quick one if the full one has no number.

    Raises:
        ValueError: for a stored file that is no result.
    """
    found = []
    for claim in all_claims() if claims is None else claims:
        full, quick = (stored(out, claim, scale) for scale in ("full", "quick"))
        shown = full if quick is None or judge(claim, full).status != "not run" else quick
        found.append(Entry(claim, shown, Path(out), full))
    return tuple(found)


# In words


def cells(row: Row) -> tuple[str, ...]:
    """A check as text, one cell per column of `CHECK_COLUMNS`."""
    paper = row.check.paper
    shown = "" if paper is None else f"{paper:.5g}" if isinstance(paper, float | int) else paper
    notes = ["aside"] * (not row.check.main) + [f"no {row.check.lacks}"] * bool(row.check.lacks)
    verdict = MARKS[row.verdict] + (f" ({', '.join(notes)})" if notes else "")
    measured = mean_text(row), sample_size_text(row)
    return verdict, row.check.statement, shown, range_text(row.check), row.check.source or "", *measured


def sample_size_text(row: Row) -> str:
    """The number of seeds or draws of a row; "exact" for a number without randomness.

    >>> from normfree_papers.claims.claim import expect
    >>> sample_size_text(Row(expect("x", low=0).reading("x is positive", why="the text"), (1.0, 2.0)))
    '2'
    """
    return "" if not row.values else "exact" if row.check.exact else str(len(row.values))


def range_text(check: Check) -> str:
    """The range of a check in words.

    >>> from normfree_papers.claims.claim import expect
    >>> range_text(expect("x", high=2).reading("x is small", why="the text"))
    '≤ 2'
    """
    low, high = check.low, check.high
    if low is None or high is None:
        return f"≥ {low:.4g}" if low is not None else f"≤ {high:.4g}"
    digits = 6 if abs(high - low) < 0.01 * abs(high) else 4
    return f"{low:.{digits}g} to {high:.{digits}g}"


def possible_range(check: Check) -> tuple[float, float]:
    """The values that the number of a check can have, from the unit in its statement: a percentage or a share.

    >>> from normfree_papers.claims.claim import expect
    >>> possible_range(expect("x", low=20).reading("test accuracy of x, in %: it trains", why="the text"))
    (0.0, 100.0)
    """
    if ", in %" in check.statement:
        return 0.0, 100.0
    if re.search(r"\bshare of (seeds|depths)\b", check.statement):
        return (-1.0 if check.statement.startswith(("lead", "gain")) else 0.0), 1.0
    return -math.inf, math.inf


def mean_text(row: Row) -> str:
    """The mean with its 95 % confidence interval in the possible range, to two digits of half its width.

    >>> from normfree_papers.claims.claim import expect
    >>> check = expect("x", low=0).reading("x is positive", why="the text")
    >>> mean_text(Row(check, (0.94, 0.96, 0.95))), mean_text(Row(check, (0.951,))), mean_text(Row(check))
    ('0.950 [0.925, 0.975]', '0.951', '')
    """
    value, interval = row.measured, row.interval
    if value is None:
        return ""
    if interval is None:
        return f"{value:.5g}"
    least, most = possible_range(row.check)
    low, high = max(interval.low, least), min(interval.high, most)
    half, size = (high - low) / 2, max(abs(low), abs(high))
    if half <= 1e-6 * size:
        return f"{value:.5g} [± 0]" if half == 0 else f"{value:.5g} [± {half:.1g}]"
    if 1e-4 < size < 1e6:
        digits = max(0, 1 - math.floor(math.log10(half)))
        shown = [f"{round(x, digits) + 0.0:.{digits}f}" for x in (value, low, high)]  # no "-0.0"
        return f"{shown[0]} [{shown[1]}, {shown[2]}]"
    return f"{value:.2g} [{low:.2g}, {high:.2g}]"


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


def not_run_of(entry: Entry) -> list[tuple[str, str, str]]:
    """The part of a claim that was not run, if any: its name, about how long it takes, and the command that runs it."""
    claim, missing = entry.claim, missing_runs(entry.planned)
    if entry.full is None:
        part = ("the full scale" if entry.is_quick else "all") + (f", for lack of {claim.lacks}" if claim.lacks else "")
        return [(part, cost_of(claim, "full"), default_command(claim))]
    if missing:
        part = f"{len(missing)} of {len(entry.full['runs'])} training runs"
        return [(part, f"{rough_duration(sum(missing.values()))} on one H200", default_command(claim))]
    return []


def limits_of(entry: Entry) -> dict[str, str]:
    """The limits of a verdict, by name: stand-ins, departures, precision, stale runs, and planted errors."""
    claim = entry.claim
    unmeasured = [check.statement for check in entry.judgement.missing] if entry.status == "undecided" else []
    texts = {
        "Stand-in": claim.stand_in,
        "Departures from the paper": "; ".join(claim.departures),
        "Precision": entry.precision,
        "Not measured": "; ".join(unmeasured),
        "Runs": ": ".join(filter(None, (entry.freshness.state, "; ".join(entry.freshness.reasons)))),
        "Planted errors": entry.breaks,
    }
    return {name: text for name, text in texts.items() if text}


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
    """The number of claims by status; stand-ins for the paper's data, and quick runs, are counted apart."""
    own = [entry for entry in found if not entry.is_quick and not entry.claim.stand_in]
    parts = [f"{len(found)} claim{'s' if len(found) != 1 else ''}: {_counts(own)}"]
    if stand_ins := [entry for entry in found if entry.claim.stand_in and not entry.is_quick]:
        parts.append(f"{len(stand_ins)} on a stand-in for the paper's data or networks: {_counts(stand_ins)}")
    if quick := [entry for entry in found if entry.is_quick]:
        parts.append(f"of {len(quick)} only a quick run was made: {_counts(quick)}")
    if stale := sum(entry.freshness.state == "stale" for entry in found):
        parts.append(f"{stale} rest{'s' * (stale == 1)} on stale runs")
    return "; ".join(part.removesuffix(": ") for part in parts)


def _counts(found: Sequence[Entry]) -> str:
    words: dict[Status, str] = {"holds": "hold", "fails": "fail", "undecided": "undecided", "not run": "not run"}
    counts = Counter(entry.status for entry in found)
    return ", ".join(
        f"{counts[status]} {status if counts[status] == 1 else word}"
        for status, word in words.items()
        if counts[status]
    )


def run_cells(name: str, result: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A training run as text, in the order of `RUN_COLUMNS`."""
    if result is None:
        return name, "no longer kept", *[""] * (len(RUN_COLUMNS) - 2)
    accuracy = percent(result["test"]["accuracy"], digits=2) if result["test"] else ""
    if result.get("bleu"):
        accuracy = f"BLEU {result['bleu']['score']:.2f}"
    where = origin_of({"seeds": [], **result})
    precision = result.get("config", {}).get("precision", "")
    numbers = accuracy, f"{result['epochs']:.4g}", precision, rough_duration(result["seconds"])
    return name, result["status"], *numbers, where["hardware"], where["commit"]
