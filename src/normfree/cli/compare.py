"""`normfree compare` and `normfree demo`: train methods at several depths, and show what trains on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normfree.cli.options import (
    AsJson,
    ChangedSettings,
    CpusPerRun,
    GpusPerRun,
    Jobs,
    On,
    Plugins,
    announcing,
    default_jobs,
    load_plugins,
    print_json,
    require_alone,
    require_executor,
    require_folder,
    say_stopped,
    typed_command,
)
from normfree.errors import require_package

if TYPE_CHECKING:
    from normfree.train import TrainConfig


def compare_methods(
    context: typer.Context,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", metavar="NAME", help="A method; may be repeated (default: fixup, batchnorm)."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A model, one per depth, or torchvision:resnet18, …; may be repeated (default: resnet8, resnet20).",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME", help="All other settings; see normfree train --list.")
    ] = "fashion",
    changes: ChangedSettings = None,
    lr: Annotated[
        list[float] | None,
        typer.Option(
            "--lr",
            metavar="RATE",
            help="A learning rate to try; the best by validation accuracy is shown. May be repeated.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Number of seeds, 0, 1, 2, …")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the runs and results.")] = Path(
        "runs/compare"
    ),
    jobs: Jobs = None,
    on: On = "local",
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    as_json: AsJson = False,
    draw: Annotated[
        Path | None,
        typer.Option("--draw", metavar="JSON", help="Draw a stored comparison.json again; train nothing."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Train methods at several depths, and plot accuracy against depth.

    Finished runs are not trained again, so you can stop, continue and extend a comparison. Writes comparison.html,
    .png, .svg and .json.

    For example: normfree compare -m fixup -m batchnorm --model resnet8 --model resnet20 --set epochs=1
    """
    from normfree.comparison.comparison_report import redraw, save, table
    from normfree.report import open_console, print_table

    messages = open_console(stderr=True)
    require_alone(context, "--draw")
    if draw is not None:
        for path in redraw(draw):
            messages.print(f"wrote {path}", markup=False)
        return
    if plugin and jobs is not None and jobs > 1:
        raise ValueError(
            f"--plugin cannot be combined with --jobs {jobs}: worker processes do not load plug-ins; use --jobs 1"
        )
    require_executor(on, jobs, cpus_per_run, gpus_per_run)
    if plugin and on != "local":
        raise ValueError(f"--plugin cannot be combined with --on {on}: the workers do not load plug-ins")
    require_package("matplotlib", "the plot of a comparison")
    require_package("jinja2", "the page of a comparison")
    load_plugins(plugin)
    base = _base(recipe, changes or [])
    from normfree.comparison import compare
    from normfree.report.terminal import progress

    processes = 1 if plugin or on != "local" else jobs or default_jobs(base.device)
    with progress("runs", estimate=False) as update:
        found = compare(
            base,
            methods=method or ["fixup", "batchnorm"],
            models=model or ["resnet8", "resnet20"],
            seeds=range(seeds),
            lrs=lr or None,
            out=out,
            jobs=processes,
            on=on,
            cpus_per_run=cpus_per_run,
            gpus_per_run=gpus_per_run,
            progress=announcing(update, "runs"),
        )
    if as_json:
        print_json(found.to_json())
    elif found.runs:
        print_table(table(found))
    if found.signal is not None:
        say_stopped("runs")
        raise typer.Exit(128 + found.signal)
    for path in save(found, out, command=typed_command("compare", context)):
        messages.print(f"wrote {path}", markup=False)


def _base(recipe: str, changes: list[str]) -> TrainConfig:
    """Return the settings that all runs share; refuse those that a comparison varies."""
    from normfree.train.config import TrainConfig
    from normfree.train.recipes import recipe as named

    changed = TrainConfig.parse_changes(changes)
    for name, option in (("method", "--method"), ("model", "--model"), ("seed", "--seeds"), ("lr", "--lr")):
        if name in changed:
            raise ValueError(f"use {option} instead of --set {name}=…; compare varies it")
    return named(recipe, **changed)


def make_demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the page and the runs.")] = Path("demo"),
    jobs: Jobs = None,
) -> None:
    """Show on one page which networks train without normalization, in about two minutes.

    Three experiments: a signal through a thousand layers, accuracy against depth, and a batch of two. Finished
    experiments are not run again.
    """
    from normfree.comparison.comparison_report import table
    from normfree.comparison.demo import run_demo
    from normfree.comparison.demo_page import save, signal_table
    from normfree.report import open_console, print_table
    from normfree.report.terminal import progress

    require_folder(out, "--out")
    require_package("matplotlib", "the picture of the demo")
    require_package("jinja2", "the page of the demo")
    console = open_console()
    with progress("demo") as update:
        demo = run_demo(out, jobs=jobs or default_jobs("cpu"), progress=update)
    if isinstance(demo, int):
        say_stopped("runs")
        raise typer.Exit(128 + demo)
    print_table(signal_table(demo), console)
    print_table(table(demo.depth), console)
    page, picture = save(demo, out)
    console.print(f"Open {page} in a browser; {picture} is its picture.", markup=False, style="bold")
