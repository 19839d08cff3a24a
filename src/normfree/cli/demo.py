"""`normfree demo`: three short experiments on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normfree.cli.options import Jobs, default_jobs, require_folder, say_stopped
from normfree.errors import require_package


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
    if demo is None:
        say_stopped("runs")
        raise typer.Exit(130)
    print_table(signal_table(demo), console)
    print_table(table(demo.depth), console)
    page, picture = save(demo, out)
    console.print(f"Open {page} in a browser; {picture} is its picture.", markup=False, style="bold")
