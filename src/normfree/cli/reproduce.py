"""`normfree reproduce`: the claims of the papers, run and judged."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from normfree.cli.options import given, require_alone, require_either
from normfree.extras import missing_package

if TYPE_CHECKING:
    from normfree_papers.claims.claim import Claim, Judgement, Scale, Settings


class Training(NamedTuple):
    """Which runs may be trained, by parts of their names, and how many at a time."""

    only: Sequence[str] | None
    jobs: int | None


WORK = Path("runs/claims")  # runs under way, with their checkpoints
_SHOWN = 5  # runs that are named where more are missing
_STYLES = {"holds": "green", "partly": "yellow", "fails": "red", "not run": "dim", "missing": "yellow"}


def reproduce_claims(
    context: typer.Context,
    claims: Annotated[list[str] | None, typer.Argument(metavar="ID…", help="Claims such as robust/fig2.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the claims with what was measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small stand-ins: minutes on a CPU.")] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Number of seeds, 0, 1, 2, …")] = None,
    data: Annotated[Path, typer.Option("--data-dir", "--data", metavar="DIR", help="Folder of the data sets.")] = Path(
        ".data"
    ),
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the results.")] = Path("results"),
    device: Annotated[
        str | None,
        typer.Option("--device", help="Where to run: cpu, cuda, …; without it no full-scale run is trained."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what has a stored result.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="TEXT", help="Train only runs with this in their name.")
    ] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Train nothing; judge by the runs that are kept.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Training runs at a time.")] = None,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw the pictures of the stored results anew; measure nothing.")
    ] = False,
    write: Annotated[
        list[Path] | None,
        typer.Option("--write", metavar="FILE", help="Write the claims, or all, with their results: .md or .html."),
    ] = None,
) -> None:
    """Run claims of the papers and judge them, or list them all, or write them into one file.

    A stored result is judged again without a run, and a training run that is kept below the results is not made again:
    a reproduction can be stopped and gone on with. Full-scale training takes a GPU and is done only where --device or
    --only asks for it; otherwise a claim is judged by the runs that are kept. The exit status is 1 when a claim fails,
    and 0 when all hold, be it in part.

    For example: normfree reproduce robust/fig2 normdead/fig4
    """
    from normfree_papers.claims.claim import get
    from normfree_papers.claims.ledger import require_kind

    files = [require_kind(path) for path in write or ()]
    require_alone(context, "--list", beside=("--json", "--out"))
    require_alone(context, "--draw", beside=("--out", "--write", *(claims or ())))
    require_either(context, "--kept", ["--only", "--jobs"], "--kept trains nothing")
    if (
        files
        and not claims
        and (idle := [name for name in given(context) if name not in ("--out", "--write", "--draw")])
    ):
        raise ValueError(f"expected claims to run beside {', '.join(idle)}, got none; name some, or leave it out")
    wanted = [get(claim_id) for claim_id in dict.fromkeys(claims or ())]  # all names are checked before any is run
    nothing = not (listing or claims or files or draw)
    if not out.is_dir() and not files:
        from normfree.report import open_console

        open_console(stderr=True).print(
            f"note: no results in '{out}'; run in the repository, or name its folder with --out", markup=False
        )
    if listing or nothing:
        _list(out, as_json)
    if nothing:
        raise typer.Exit(2)  # as for normfree alone
    if only and (untrained := [claim.id for claim in wanted if not claim.needs_training]):
        raise ValueError(f"expected claims that train with --only, got {', '.join(untrained)}; leave one of them out")
    trained = Training((), jobs) if kept else Training(only or None, jobs)
    scale: Scale = "quick" if quick else "full"
    asked = device is not None or only or quick
    modest = trained if asked else Training((), jobs)  # hours of training on a CPU are nobody's wish
    place = device or ("auto" if only else "cpu")
    if draw:
        _redraw(out, wanted)
    judged = [_run(claim, scale, seeds, data, out, place, again, as_json, modest) for claim in (() if draw else wanted)]
    if as_json and judged:
        import json

        typer.echo(json.dumps([_plain(*one) for one in judged], indent=1, ensure_ascii=False))
    for path in files:
        _write(path, out, wanted)
    runs = [name for _, result, _ in judged for name in result.get("runs", ())]
    for part in only or ():
        if not any(part in name for name in runs):
            raise ValueError(f"expected a part of a run's name in --only, got {part!r}; there are: {'; '.join(runs)}")
    if any(judgement.status == "fails" for _, _, judgement in judged):
        raise typer.Exit(1)


def _redraw(out: Path, claims: Sequence[Claim]) -> None:
    from normfree.report import open_console
    from normfree_papers.claims.reproduction import redraw

    try:
        drawn = redraw(out, claims or None)
    except ImportError as error:
        raise ValueError(str(error)) from None
    open_console(stderr=True).print(f"drew {len(drawn)} picture{'s' if len(drawn) != 1 else ''} in {out}", markup=False)


def _write(path: Path, out: Path, claims: Sequence[Claim]) -> None:
    from normfree.report import open_console
    from normfree_papers.claims.ledger import write_ledger

    write_ledger(path, out, claims or None)
    open_console(stderr=True).print(f"wrote {path}", markup=False)


def _run(
    claim: Claim,
    scale: Scale,
    seeds: int | None,
    data: Path,
    out: Path,
    device: str,
    again: bool,
    silent: bool,
    trained: Training,
) -> tuple[Claim, dict[str, Any], Judgement]:
    """Reproduce one claim and print its checks."""
    from normfree.cli.compare import default_jobs
    from normfree.nn.devices import device_of
    from normfree.report import open_console
    from normfree.report.progress import progress
    from normfree_papers.claims.claim import Settings
    from normfree_papers.claims.reproduction import reproduce
    from normfree_papers.claims.run_cache import StoppedError, Trainings
    from normfree_papers.claims.storage import stored

    device_of(device)  # refuses one that is not there
    # A stored result of other seeds is good enough unless a number of seeds is asked for.
    kept = None if again or seeds is not None else stored(out, claim, scale)
    chosen = tuple(kept["seeds"]) if kept else tuple(range(seeds)) if seeds else claim.seeds_at(scale)
    with progress(claim.id) as update:
        trainings = Trainings(
            out / "runs",
            WORK,
            device=device,
            data=data,
            jobs=trained.jobs or default_jobs(device),
            only=trained.only,
            progress=update,
        )
        settings = Settings(scale=scale, seeds=chosen, device=device, data=data, progress=update, trainings=trainings)
        start = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            result, judgement = reproduce(claim.id, settings, out, again=again)
        except StoppedError as stopped:
            open_console(stderr=True).print("stopped; what is done is kept, and the same command goes on")
            raise typer.Exit(128 + stopped.signal) from None
    if not silent:
        _print(claim, settings, result, judgement, out, is_stored=kept is not None and result["date"] < start)
    return claim, result, judgement


def _print(
    claim: Claim, settings: Settings, result: dict[str, Any], judgement: Judgement, out: Path, *, is_stored: bool
) -> None:
    from normfree.report import Table, open_console, print_table
    from normfree_papers.claims.ledger_entries import CHECK_COLUMNS, cells, duration, unmade_of
    from normfree_papers.claims.storage import result_path

    console = open_console()
    rows = tuple(cells(row) for row in judgement.rows)
    console.print(f"{claim.id}, {claim.where}: {claim.statement}", markup=False, style="bold")
    print_table(Table("", CHECK_COLUMNS, rows), console)
    for note in result.get("notes", []):
        console.print(f"note: {note}", markup=False, style="dim")
    for erratum in dict.fromkeys(row.check.erratum for row in judgement.rows if row.verdict == "paper errs"):
        console.print(f"error in the paper: {erratum}", markup=False)
    if unmade := unmade_of(result):
        names = [f"{name} ({duration(seconds)})" for name, seconds in unmade.items()]
        names[_SHOWN:] = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        count, time = f"{len(unmade)} of {len(result['runs'])}", duration(sum(unmade.values()))
        console.print(f"{count} training runs are missing, {time} on one H200: {'; '.join(names)}", markup=False)
        if not settings.quick:
            does = "shows" if result_path(out, claim, "quick").exists() else "runs"
            console.print(f"train them with --device cuda; --quick {does} a small stand-in", markup=False)
    ran = f"{len(result['seeds'])} seed{'s' if len(result['seeds']) > 1 else ''}"
    ran += "" if result.get("runs") else f", {result['seconds']:g} s"
    when = f", stored {result['date'][:10]}" if is_stored else ""
    console.print(f"{judgement.status}: {judgement.summary} ({ran}{when})", style=_STYLES[judgement.status])
    for suffix in (".json", ".png"):
        path = result_path(out, claim, settings.scale, suffix)
        if path.exists():
            console.print(str(path), markup=False)
        elif result.get("panels"):
            console.print(f"no picture: {missing_package('matplotlib', 'a plot')}", markup=False)


def _list(out: Path, as_json: bool) -> None:
    import json

    from normfree.report import Column, Table, print_table
    from normfree_papers.claims.ledger_entries import MARKS, duration, entries

    rows, records = [], []
    for entry in entries(out):
        claim = entry.claim
        records.append(_plain(claim, entry.result, entry.judgement))
        checks = entry.judgement.rows
        count = f" {sum(row.verdict == 'holds' for row in checks)}/{len(checks)}" * (entry.status != "not run")
        status = MARKS[entry.status][0] + count + " (quick)" * entry.is_quick
        cost = f"{duration(claim.cost.quick_seconds)} / {duration(claim.cost.full_seconds)} {claim.cost.device}"
        rows.append((claim.id, status, cost, claim.statement))
    if as_json:
        typer.echo(json.dumps(records, indent=1, ensure_ascii=False))
        return
    columns = (
        Column("id", style="cyan"),
        Column("holds", marked=True),
        Column("quick / full"),
        Column("statement"),  # last, because it is long where one claim is one line
    )
    print_table(
        Table(
            "Claims",
            columns,
            tuple(rows),
            caption="✓ holds, ◐ in part, ✗ fails, – not run, and how many of the checks hold. normfree reproduce ID "
            "shows one with its numbers, and --list --json all of them.",
        )
    )


def _plain(claim: Claim, result: dict[str, Any] | None, judgement: Judgement) -> dict[str, Any]:
    """A claim with its judgement as data for JSON, where numbers that are not finite are texts."""
    from normfree.files import plain_json

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
    origin = (
        {key: result[key] for key in ("scale", "seeds", "command", "commit", "date", "seconds")} if result else None
    )
    plain: dict[str, Any] = plain_json(
        {**claim.to_json(), "status": judgement.status, "checks": checks, "result": origin}
    )
    return plain
