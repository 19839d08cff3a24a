"""`normfree reproduce`: run and judge the claims of the papers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from normfree.cli.completion import complete_claim
from normfree.cli.options import (
    AsJson,
    CpusPerRun,
    GpusPerRun,
    On,
    given,
    require_alone,
    require_either,
    require_executor,
)


def reproduce_claims(
    context: typer.Context,
    claims: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID…", help="Claims such as robust/fig2.", autocompletion=complete_claim),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List all claims with their status.")] = False,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Train small networks; minutes on a CPU.")] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, help="Number of seeds, 0, 1, 2, …")
    ] = None,
    data: Annotated[Path, typer.Option("--data-dir", "--data", metavar="DIR", help="Folder of the data sets.")] = Path(
        ".data"
    ),
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the results.")] = Path("results"),
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Where to run: cpu, cuda, …; at full scale, training starts only with this or --only.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also claims with a stored result.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="TEXT", help="Train only runs with this in their name.")
    ] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Train nothing; judge by the stored runs.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", min=1, help="Training runs at a time.")] = None,
    on: On = "local",
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw the pictures of the stored results again; measure nothing.")
    ] = False,
    write: Annotated[
        list[Path] | None,
        typer.Option("--write", metavar="FILE", help="Write these claims, or all, with their results: .md or .html."),
    ] = None,
) -> None:
    """Run claims of the papers and judge them, list all claims, or write them into one file.

    A stored result is judged without a new run, and a stored training run is not trained again: you can stop a
    reproduction and continue it with the same command. Missing runs are trained with --device, --only or --quick;
    otherwise a claim is judged by the stored runs. At full scale, training needs a GPU. The exit status is 0; 1 if a
    claim fails; 2 after an error, or if there was nothing to do; 128 plus the number of a signal that stopped it.

    For example: normfree reproduce robust/fig2 normdead/fig4
    """
    require_alone(context, "--list", beside=("--json", "--out"))
    require_alone(context, "--draw", beside=("--out", "--write", *(claims or ())))
    require_either(context, "--kept", ["--only", "--jobs", "--on"], "--kept trains nothing")
    require_executor(on, jobs, cpus_per_run, gpus_per_run)
    if write and not claims:
        idle = [name for name in given(context) if name not in ("--out", "--write", "--draw")]
        if idle:
            raise ValueError(f"no claim was named for {', '.join(idle)}; name one, or leave the option out")
    command = _papers_command()
    options = command.Options(
        ids=tuple(claims or ()),
        scale="quick" if quick else "full",
        seeds=seeds,
        data=data,
        out=out,
        device=device,
        again=again,
        only=() if kept else tuple(only or ()) or None,
        jobs=jobs,
        on=on,
        resources={"cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run},
        listing=listing,
        as_json=as_json,
        draw=draw,
        files=tuple(write or ()),
    )
    if status := command.run(options):
        raise typer.Exit(status)


def _papers_command() -> Any:
    """The module of `normfree_papers` that does the work; the library itself never imports that package."""
    try:
        return import_module("normfree_papers.claims.command")
    except ModuleNotFoundError as error:
        if error.name != "normfree_papers":
            raise
        raise ValueError(
            "expected the package normfree_papers, which holds the claims, beside normfree, found none; run in a clone "
            "of the repository with PYTHONPATH=src, or install normfree again"
        ) from None
