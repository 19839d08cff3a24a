"""`normfree train --dry-run`: say what a run would take, from a few measured steps; nothing is written."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from normfree.train import TrainConfig


def print_dry_run(config: TrainConfig, out: Path | None, *, overwrite: bool, as_json: bool, show: bool) -> None:
    """Measure a few steps of a run, and print its parameters, steps, device, memory and time.

    `show` is False in all processes of a distributed run but one.
    """
    from normfree.report import open_console
    from normfree.report.terminal import duration, progress
    from normfree.train.engine.dry_run import measure_run
    from normfree.train.engine.environment import StopRequestedError
    from normfree.train.run.run_folder import RunFolder

    if out is not None and RunFolder(out).has_begun and not overwrite:
        raise ValueError(
            f"expected a folder without a run, but '{out}' holds one; continue it with --resume, replace it with "
            "--overwrite, or choose another folder"
        )
    try:
        with progress(f"{config.model}, steps", show=show) as update:
            found = measure_run(config, update)
    except StopRequestedError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if not show:
        return
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    console = open_console()
    free = "" if found.free is None else f"; {_gib(found.free)} were free"
    parts = [f"{found.steps:,} steps of {_seconds(found.step_seconds)}"]
    if found.validation_seconds:
        parts.append(f"{found.epochs} validations of {_seconds(found.validation_seconds)}")
    parts += [f"{_seconds(found.test_seconds)} to test", f"{_seconds(found.setup_seconds)} to start"]
    kept = config.keep_last + config.keep_best
    lines = {
        "parameters": f"{found.parameters:,}",
        "steps": f"{found.steps:,}: {found.epochs} epochs of {found.epoch_steps:,}, with {found.per_step:,.0f} "
        f"{found.unit} each",
        "device": f"{found.device}, {found.precision}{', compiled' if found.compiled else ''}",
        "memory": f"{_gib(found.memory)} at the peak of {found.measured} measured steps{free}",
        "disk": f"{found.checkpoint / 1e6:,.1f} MB per checkpoint; at most {kept} are kept",
        "time": f"about {duration(found.seconds)}: {', '.join(parts)}",
    }
    console.print(f"{config.model} ({config.method}) on {config.data}; nothing was written", markup=False)
    for name, text in lines.items():
        console.print(f"{name:11s} {text}", markup=False)
    if found.translates:
        console.print("the time leaves out the translation of the test sentences", markup=False, style="dim")
    for warning in config.warnings(found.steps):
        console.print(warning, markup=False, style="yellow")


def _gib(count: int | None) -> str:
    return "an unknown size" if count is None else f"{count / 2**30:,.2f} GiB"


def _seconds(seconds: float) -> str:
    """Write a time with three digits.

    >>> _seconds(0.01234), _seconds(3.21), _seconds(312.0)
    ('12.3 ms', '3.21 s', '5 min 12 s')
    """
    from normfree.report.terminal import duration

    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s" if seconds < 60 else duration(seconds)
