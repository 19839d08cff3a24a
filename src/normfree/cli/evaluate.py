"""`normfree evaluate`: score the model of a run on its test data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normfree.cli.options import DEVICE, Plugins, Trust, load_plugins, print_json


def evaluate_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Annotated[str, DEVICE] = "auto",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data, if it moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Score the model of a run on its test data.

    For example: normfree evaluate runs/fashion
    """
    load_plugins(plugin)
    from normfree.report.terminal import percent, progress
    from normfree.train import evaluate, evaluate_translation, read_config

    config = read_config(run)
    with progress(config.model) as update:
        found = evaluate(
            run, device=device, data_dir=data_dir, progress=lambda done: update(done, None, "batches"), trust=trust
        )
    with progress("translating") as update:
        translated = evaluate_translation(
            run, device=device, data_dir=data_dir, progress=lambda done, total: update(done, total, "sentences")
        )
    if as_json:
        print_json(found._asdict() | ({} if translated is None else {"bleu": translated._asdict()}))
        return
    what = f"{config.model} ({config.method}) on {config.data}"
    typer.echo(f"{what}: accuracy {percent(found.accuracy, digits=2)}, loss {found.loss:.4g}")
    if translated is not None:
        typer.echo(f"BLEU {translated.score:.2f}  ({translated.signature})")
