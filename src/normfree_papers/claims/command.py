"""The command `normfree reproduce`: list claims, run and judge them, draw their pictures, and write the ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normfree.cli.compare import default_jobs
from normfree.extras import missing_package
from normfree.files import to_json_values
from normfree.nn.devices import device_of
from normfree.report import Column, Table, open_console, print_table
from normfree.report.progress import progress
from normfree_papers.claims.claim import Claim, Judgement, Scale
from normfree_papers.claims.ledger_entries import (
    CHECK_COLUMNS,
    MARKS,
    cells,
    cost_of,
    entries,
    missing_runs_of,
    rough_duration,
)
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import redraw, reproduce_with_runs
from normfree_papers.claims.run_cache import StoppedError
from normfree_papers.claims.storage import Result, result_path

_SHOWN = 5  # the number of missing runs that are named
_STYLES = {"holds": "green", "partly": "yellow", "fails": "red", "not run": "dim", "missing": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command-line options; `only`: None trains all runs, () none."""

    ids: tuple[str, ...]
    scale: Scale
    seeds: int | None
    data: Path
    out: Path
    device: str | None
    again: bool
    only: tuple[str, ...] | None
    jobs: int | None
    listing: bool
    as_json: bool
    draw: bool
    files: tuple[Path, ...]


def run(options: Options) -> int:
    """Run the command and return the exit status: 0, 1 if a claim fails, 2 if there was nothing to do.

    Raises:
        ValueError: for an unknown claim, before anything is run, and options that do not fit the claims.
    """
    from normfree_papers.claims.ledger import require_kind, write_ledger

    for path in options.files:
        require_kind(path)
    claims = [get(claim_id) for claim_id in dict.fromkeys(options.ids)]
    _note_missing_results(options, claims)
    nothing = not (options.listing or claims or options.files or options.draw)
    if options.listing or nothing:
        _list(options)
    if nothing:
        return 2  # as for normfree alone
    if options.only and (untrained := [claim.id for claim in claims if not claim.needs_training]):
        raise ValueError(
            f"--only needs claims with training runs; {', '.join(untrained)} has none; leave one of them out"
        )
    if options.draw:
        count = _redraw(options.out, claims)
        _message(f"drew {count} picture{'s' if count != 1 else ''} in {options.out}")
    judged: list[tuple[Claim, Result, Judgement]] = []
    for claim in () if options.draw else claims:
        try:
            judged.append((claim, *_reproduce(claim, options)))
        except StoppedError as stopped:
            _message("stopped; the runs so far are kept; run the same command to continue")
            return 128 + stopped.signal
    if options.as_json and judged:
        print(json.dumps([_record(*one) for one in judged], indent=1, ensure_ascii=False))
    for path in options.files:
        write_ledger(path, options.out, claims or None)
        _message(f"wrote {path}")
    names = [name for _, result, _ in judged for name in result.get("runs", ())]
    for part in options.only or ():
        if not any(part in name for name in names):
            raise ValueError(f"--only needs a part of a run's name; {part!r} is in none of: {'; '.join(names)}")
    return int(any(judgement.status == "fails" for _, _, judgement in judged))


def _note_missing_results(options: Options, claims: Sequence[Claim]) -> None:
    """Say that there are no stored results, and the cost of running the claims, before anything is run."""
    if options.out.is_dir() or (options.files and not claims):  # the ledger of no results is refused
        return
    costs = ", ".join(f"{cost_of(claim, options.scale)} ({claim.id})" for claim in claims)
    new_run = f"a new run takes about {costs}; " if costs else ""
    _message(
        f"note: no stored results in '{options.out}'; {new_run}for the stored results run in the repository, or name "
        "its results folder with --out"
    )


def _message(text: str) -> None:
    open_console(stderr=True).print(text, markup=False, soft_wrap=True)


def _redraw(out: Path, claims: Sequence[Claim]) -> int:
    try:
        return len(redraw(out, claims or None))
    except ImportError as error:
        raise ValueError(str(error)) from None


def _reproduce(claim: Claim, options: Options) -> tuple[Result, Judgement]:
    """Reproduce one claim and print its checks."""
    # Never start hours of CPU training by default: at full scale, only --device or --only trains runs.
    asked = options.device is not None or options.only or options.scale == "quick"
    only = options.only if asked else ()
    device = options.device or ("auto" if only else "cpu")
    if options.device is not None:
        device_of(device)  # refuses a device that is not there
    start = datetime.now(UTC).isoformat(timespec="seconds")
    with progress(claim.id) as update:
        result, judgement = reproduce_with_runs(
            claim,
            scale=options.scale,
            seeds=options.seeds,
            device=device,
            data=options.data,
            out=options.out,
            again=options.again,
            jobs=1 if only == () else options.jobs or default_jobs(device),
            only=only,
            progress=update,
        )
    if not options.as_json:
        _print(claim, result, judgement, options, is_stored=result["date"] < start)
    return result, judgement


# Printing


def _print(claim: Claim, result: Result, judgement: Judgement, options: Options, *, is_stored: bool) -> None:
    console = open_console()
    console.print(f"{claim.id}, {claim.where}: {claim.statement}", markup=False, style="bold")
    print_table(Table("", CHECK_COLUMNS, tuple(cells(row) for row in judgement.rows)), console)
    for note in result.get("notes", []):
        console.print(f"note: {note}", markup=False, style="dim")
    for erratum in judgement.errata:
        console.print(f"error in the paper: {erratum}", markup=False)
    if missing := missing_runs_of(result):
        names = [f"{name} ({rough_duration(seconds)})" for name, seconds in missing.items()]
        names[_SHOWN:] = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        count, time = f"{len(missing)} of {len(result['runs'])}", rough_duration(sum(missing.values()))
        console.print(f"{count} training runs are missing, {time} on one H200: {'; '.join(names)}", markup=False)
        if options.scale == "full":
            does = "shows" if result_path(options.out, claim, "quick").exists() else "runs"
            console.print(f"train them with --device cuda; --quick {does} a small stand-in", markup=False)
    ran = f"{len(result['seeds'])} seed{'s' if len(result['seeds']) > 1 else ''}"
    ran += "" if result.get("runs") else f", {result['seconds']:g} s"
    when = f", stored {result['date'][:10]}" if is_stored else ""
    console.print(f"{judgement.status}: {judgement.summary} ({ran}{when})", style=_STYLES[judgement.status])
    for suffix in (".json", ".png"):
        path = result_path(options.out, claim, options.scale, suffix)
        if path.exists():
            console.print(str(path), markup=False)
        elif result.get("panels"):
            console.print(f"no picture: {missing_package('matplotlib', 'a plot')}", markup=False)


def _list(options: Options) -> None:
    """Print all claims with their status, as a table or as JSON."""
    found = entries(options.out)
    if options.as_json:
        records = [_record(entry.claim, entry.result, entry.judgement) for entry in found]
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return
    rows = []
    for entry in found:
        checks, cost = entry.judgement.rows, entry.claim.cost
        count = f" {sum(row.verdict == 'holds' for row in checks)}/{len(checks)}" * (entry.status != "not run")
        status = MARKS[entry.status][0] + count + " (quick)" * entry.is_quick
        times = f"{rough_duration(cost.quick_seconds)} / {rough_duration(cost.full_seconds)} {cost.device}"
        rows.append((entry.claim.id, status, times, entry.claim.statement))
    columns = (
        Column("id", style="cyan"),
        Column("holds", marked=True),
        Column("quick / full"),
        Column("statement"),  # last, because it is long
    )
    caption = (
        "✓ holds, ◐ in part, ✗ fails, – not run, and how many of the checks hold. normfree reproduce ID shows one with "
        "its numbers, and --list --json all of them."
    )
    print_table(Table("Claims", columns, tuple(rows), caption=caption))


def _record(claim: Claim, result: Result | None, judgement: Judgement) -> Any:
    """A claim with its judgement as data for JSON."""
    checks = [
        {
            "name": row.check.name,
            "statement": row.check.statement,
            "paper": row.check.paper,
            "low": row.check.low,
            "high": row.check.high,
            "why": row.check.why,
            "main": row.check.main,
            "measured": row.measured,
            "std": row.std,
            "verdict": row.verdict,
        }
        for row in judgement.rows
    ]
    kept = ("scale", "seeds", "command", "commit", "date", "seconds")
    origin = {key: result[key] for key in kept} if result else None
    return to_json_values({**claim.to_json(), "status": judgement.status, "checks": checks, "result": origin})
