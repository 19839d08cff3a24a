"""The command `normfree reproduce`: list claims, run and judge them, draw their pictures, and write the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normfree.cli.options import default_jobs, require_folder
from normfree.errors import missing_package, require_package
from normfree.nn.devices import device_of
from normfree.report import Column, Table, open_console, print_table
from normfree.report.terminal import progress
from normfree.storage.writing import to_json_values
from normfree_papers.claims.claim import Claim, Scale, Settings
from normfree_papers.claims.claim_status import (
    CHECK_COLUMNS,
    MARKS,
    Entry,
    cells,
    cost_of,
    entries,
    limits_of,
    mean_text,
    rough_duration,
    sample_size_text,
)
from normfree_papers.claims.judgement import Status
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import Result, redraw, reproduce, result_path, stored
from normfree_papers.claims.run_cache import RunCache, StoppedError, missing_runs

WORK = Path("runs/claims")  # runs in progress, with their checkpoints
_SHOWN = 5  # the number of missing runs that are named
_STYLES: dict[Status, str] = {"holds": "green", "fails": "red", "undecided": "yellow", "not run": "dim"}


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
    on: str
    resources: Mapping[str, float | None]
    listing: bool
    as_json: bool
    draw: bool
    files: tuple[Path, ...]


def run(options: Options) -> int:
    """Run the command and return its exit status.

    Training starts with `device`, `only` or the quick scale; otherwise claims are judged by the stored runs.

    Returns:
        0; 1 if a claim fails; 2 if there was nothing to do; 128 plus the number of a signal that stopped it.

    Raises:
        ValueError: for an unknown claim, before anything is run, and options that do not fit the claims.
    """
    from normfree_papers.claims.ledger import require_kind, write_ledger

    for path in options.files:
        require_kind(path)
        require_folder(path.parent, "the place of --write")
        if path.suffix == ".html":
            require_package("jinja2", "a page")
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
    judged: list[Entry] = []
    for claim in () if options.draw else claims:
        try:
            judged.append(_reproduce(claim, options))
        except StoppedError as stopped:
            _message("stopped; the runs so far are kept; run the same command to continue")
            return 128 + stopped.signal
    if options.as_json and judged:
        print(json.dumps([_record(entry) for entry in judged], indent=1, ensure_ascii=False))
    for path in options.files:
        write_ledger(path, options.out, claims or None)
        _message(f"wrote {path}")
    names = [name for entry in judged for name in (entry.result or {}).get("runs", ())]
    for part in options.only or ():
        if not any(part in name for name in names):
            raise ValueError(f"--only needs a part of a run's name; {part!r} is in none of: {'; '.join(names)}")
    return int(any(entry.status == "fails" for entry in judged))


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


def _reproduce(claim: Claim, options: Options) -> Entry:
    """Reproduce one claim and print its checks; without `--seeds`, a stored result of any seeds is used."""
    # Never start hours of CPU training by default: at full scale, only --device or --only trains runs.
    asked = options.device is not None or options.only or options.scale == "quick"
    only = options.only if asked else ()
    device = options.device or ("auto" if only else "cpu")
    if options.device is not None and options.on == "local":
        device_of(device)  # refuses a device that is not there
    start = datetime.now(UTC).isoformat(timespec="seconds")
    with progress(claim.id) as update:
        before = None if options.again else stored(options.out, claim, options.scale)
        if before is None:
            require_folder(options.out, "--out")
        seeds = claim.seeds_at(options.scale)
        if options.seeds is not None:
            seeds = tuple(range(options.seeds))
        elif before is not None:
            seeds = tuple(before["seeds"])
        jobs: int | None = None
        if options.on == "local":
            jobs = 1 if only == () else options.jobs or default_jobs(device)
        place: dict[str, Any] = {"device": device, "data": options.data, "progress": update}
        engine: dict[str, Any] = {"jobs": jobs, "on": options.on, "resources": options.resources}
        runs = RunCache(options.out / "runs", WORK, only=only, **engine, **place)
        settings = Settings(scale=options.scale, seeds=seeds, runs=runs, **place)
        result = reproduce(claim, settings, options.out, before)
    entry = Entry(claim, result, options.out)
    if not options.as_json:
        _print(entry, result, options, is_stored=result["date"] < start)
    return entry


# Printing


def _print(entry: Entry, result: Result, options: Options, *, is_stored: bool) -> None:
    claim, judgement, console = entry.claim, entry.judgement, open_console()
    console.print(f"{claim.id}, {claim.where}: {claim.statement}", markup=False, style="bold")
    print_table(Table("", CHECK_COLUMNS, tuple(cells(row) for row in judgement.rows)), console)
    for name, text in limits_of(entry).items():
        console.print(f"{name.lower()}: {text}", markup=False, style="dim")
    for note in result.get("notes", []):
        console.print(f"note: {note}", markup=False, style="dim")
    for erratum in judgement.errata:
        console.print(f"error in the paper: {erratum}", markup=False)
    if missing := missing_runs(result):
        names = [f"{name} ({rough_duration(seconds)})" for name, seconds in missing.items()]
        names[_SHOWN:] = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        count, time = f"{len(missing)} of {len(result['runs'])}", rough_duration(sum(missing.values()))
        console.print(f"{count} training runs are missing, {time} on one H200: {'; '.join(names)}", markup=False)
        if options.scale == "full":
            does = "shows" if result_path(options.out, claim, "quick").exists() else "makes"
            console.print(f"train them with --device cuda; --quick {does} a small run", markup=False)
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
        records = [_record(entry) for entry in found]
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return
    columns = (
        Column("id", style="cyan"),
        Column("verdict [95 %]", marked=True),
        Column("n", "right"),
        Column("precision"),
        Column("data"),
        Column("runs"),
        Column("cost", "right"),
    )
    caption = (
        "✓ holds, ✗ fails, ◐ undecided, – not run, with the number that decides and its 95 % confidence interval over "
        "n seeds or draws. Data: a stand-in for the paper's, or only a quick run. Runs: whether today's code would "
        "make them. normfree reproduce ID shows one claim with all its numbers, and --list --json all claims."
    )
    print_table(Table("Claims", columns, tuple(_line(entry) for entry in found), caption=caption))


def _line(entry: Entry) -> tuple[str, ...]:
    """A claim in the list."""
    claim, row = entry.claim, entry.judgement.deciding
    verdict = MARKS[entry.status] if row is None else f"{MARKS[entry.status][0]} {mean_text(row)}"
    cost = f"{rough_duration(claim.cost.full_seconds)} {claim.cost.device}"
    precision = entry.precision.partition(";")[0]
    data = " ".join(["quick"] * entry.is_quick + ["stand-in"] * bool(claim.stand_in))
    return claim.id, verdict, "" if row is None else sample_size_text(row), precision, data, entry.freshness.state, cost


_CLAIM_FIELDS = (
    *("id", "paper", "where", "statement", "paper_value", "how", "cost", "needs_data", "needs_training", "lacks"),
    *("stand_in", "departures"),
)
_CHECK_FIELDS = ("name", "statement", "paper", "low", "high", "why", "source", "exact", "binary", "main", "lacks")
_RESULT_FIELDS = ("scale", "seeds", "command", "commit", "date", "seconds")


def _record(entry: Entry) -> Any:
    """A claim with its judgement as data for JSON."""
    deciding = entry.judgement.deciding
    checks = [
        {
            **{name: getattr(row.check, name) for name in _CHECK_FIELDS},
            "measured": row.measured,
            "interval": None if row.interval is None else [row.interval.low, row.interval.high],
            "values": list(row.values),
            "verdict": row.verdict,
        }
        for row in entry.judgement.rows
    ]
    return to_json_values(
        {
            **{name: getattr(entry.claim, name) for name in _CLAIM_FIELDS},
            "cost": asdict(entry.claim.cost),
            "status": entry.status,
            "deciding": None if deciding is None else deciding.check.name,
            "precision": entry.precision,
            "stale": {"state": entry.freshness.state, "reasons": list(entry.freshness.reasons)},
            "mutants": {"text": entry.breaks, **entry.mutants},
            "checks": checks,
            "result": None if entry.result is None else {key: entry.result[key] for key in _RESULT_FIELDS},
        }
    )
