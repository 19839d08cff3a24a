"""`normfree train`: train a model by a recipe or a configuration, or measure what that would take (--dry-run)."""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normfree.cli.data import SIZE, SOURCE, TARGET, TEXT, prepared_name
from normfree.cli.options import (
    DEVICE,
    ConfigFile,
    DataDir,
    DataName,
    Epochs,
    MethodName,
    ModelName,
    Plugins,
    RecipeName,
    Trust,
    given,
    load_plugins,
    print_json,
    require_alone,
    require_either,
    typed_command,
)
from normfree.report.tables import Column, Table, print_table

if TYPE_CHECKING:
    from normfree.train import RunResult, TrainConfig

_log = logging.getLogger("normfree.train")
_SLURM_SECONDS = 60.0  # for SLURM to answer
EXIT_DIVERGED = 3  # exit status; a signal gives 128 plus its number, as in a shell


def train_model(
    context: typer.Context,
    recipe: RecipeName = None,
    model: ModelName = None,
    method: MethodName = None,
    data: DataName = None,
    data_dir: DataDir = None,
    epochs: Epochs = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="RATE", help="The learning rate.")] = None,
    device: Annotated[str | None, DEVICE] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change any setting (see --show); may be repeated."),
    ] = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; default: a new folder in runs/.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Continue the run in this folder, bit for bit.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run in the folder of --out.")] = False,
    source: Annotated[Path | None, SOURCE] = None,
    target: Annotated[Path | None, TARGET] = None,
    text: Annotated[Path | None, TEXT] = None,
    vocabulary: Annotated[int, SIZE] = 8000,
    listing: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print all settings with explanations, as TOML; do not train.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Measure a few steps; print parameters, memory, steps and time; write nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Train a network on images or text, and test it at the end.

    The exit status is 0 for a finished run, 2 after an error, 3 for a diverged run, 130 after ctrl-C and 143 after
    SIGTERM. Continue an interrupted run with --resume. In a job of SLURM that gets SIGUSR1, a run saves its state; with
    --out or --resume the job is queued again, and the run continues.

    For example: normfree train fashion --lr 0.05 --set batch_size=64;
    or: normfree train translation --source train.de --target train.en
    """
    require_alone(context, "--list", beside=("--json", "--plugin"))
    require_either(context, "--show", ["--json"], "--show prints TOML")
    require_either(context, "--resume", ["--out"], f"the run in '{resume}' stays in its folder")
    require_either(context, "--overwrite", ["--resume"], "--resume continues the run")
    require_either(context, "--dry-run", ["--resume", "--show"], "--dry-run measures a new run")
    if overwrite and out is None:
        raise ValueError("--overwrite needs --out, the folder of the run to replace; without it, every run has its own")
    is_text = source is not None or target is not None or text is not None
    if "--vocabulary" in given(context) and not is_text:
        raise ValueError(
            "--vocabulary needs --source and --target, or --text; leave it out, because prepared data has its own "
            "vocabulary"
        )
    load_plugins(plugin)
    named = {"--model": model, "--method": method, "--data": data, "--data-dir": data_dir, "--epochs": epochs}
    named |= {"--lr": lr, "--device": device}
    changes = list(changes or [])
    if is_text:
        changes.append(f"data={prepared_name(source, target, text, vocabulary, prepare=not (show or dry_run))}")
    settings = [f"{name[2:].replace('-', '_')}={value}" for name, value in named.items() if value is not None]
    settings += changes
    if listing or not (recipe or settings or config or resume or show):
        list_recipes(as_json)
        raise typer.Exit(0 if listing else 2)  # 2 as for `normfree` without arguments
    from normfree.train.recipes import configuration

    chosen = configuration(recipe, file=config, changes=settings, resume=resume, trust=trust)
    if show:
        typer.echo(chosen.to_toml(explained=True), nl=False)
        return
    if dry_run:
        _print_dry_run(chosen, out, overwrite=overwrite, as_json=as_json, show=_is_first_process())
        return
    from normfree.train.run.run_folder import RunFolder

    folder = resume or out or _new_folder(chosen)
    # A job of SLURM that was queued again continues the run in its folder.
    goes_on = resume is not None or (out is not None and was_requeued() and RunFolder(out).has_begun)
    command = typed_command("train", context)
    result = _fit(chosen, folder, resume=goes_on, overwrite=overwrite and not goes_on, command=command)
    if _is_first_process():
        _print(result, folder, as_json, plugin)
        if (out or resume) is not None and requeue(result.signal):
            typer.echo("SLURM queued the job again, which continues the run", err=True)
    if result.status == "diverged":
        raise typer.Exit(EXIT_DIVERGED)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def _fit(config: TrainConfig, folder: Path, *, resume: bool, overwrite: bool, command: str) -> RunResult:
    """Train with a line of progress, preceded by the lines of the log."""
    from normfree.train.engine.distributed import SharedError
    from normfree.train.engine.loop import fit

    first = _is_first_process()
    try:
        with _log_shown(first):
            return fit(config, out=folder, resume=resume, overwrite=overwrite, progress=first, command=command)
    except SharedError:
        if first:
            raise
        raise typer.Exit(2) from None  # the first process prints the error


@contextmanager
def _log_shown(show: bool) -> Iterator[None]:
    """Print the lines of the log of training on stderr: which kernels run, and which settings do not suit the run."""
    from normfree.report import open_console

    log, handler = logging.getLogger("normfree.train"), logging.Handler()
    handler.emit = lambda record: open_console(stderr=True).print(record.getMessage(), style="dim")  # type: ignore[method-assign]
    level = log.level
    if show:
        log.setLevel(logging.INFO)
        log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


def was_requeued() -> bool:
    """Whether this job was queued again, so that its run may have begun."""
    return os.environ.get("SLURM_RESTART_COUNT", "0").strip() not in ("", "0")


def requeue(number: int | None) -> bool:
    """Queue this job again if the signal that ended the run is the one before the end of a job's time.

    Args:
        number: The signal; None if there was none.

    Returns:
        Whether SLURM queued the job. If it refuses, the log says why.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or number != signal.SIGUSR1:
        return False
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=_SLURM_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        _log.warning("SLURM did not queue job %s again: %s; start it again yourself", job, reason)
        return False
    return True


def _new_folder(config: TrainConfig) -> Path:
    """Return a folder in runs/ that does not exist yet, named after the main settings."""
    from normfree.storage.writing import plain_name

    words = f"{config.model}-{config.method}-{config.data.partition(':')[0]}-seed{config.seed}"
    base = Path("runs") / plain_name(words)
    number = 1
    while (path := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return path


def _print(result: RunResult, folder: Path, as_json: bool, plugins: Sequence[str] | None = None) -> None:
    """Print how a run ended, and the command for the next step."""
    if as_json:
        print_json({**result.to_json(), "folder": str(folder)})
        return
    from normfree.report import open_console
    from normfree.report.terminal import duration, percent

    console, config = open_console(), result.config

    def say(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, style=style)

    look = shlex.join(["normfree", "diagnose", str(folder), *(p for name in plugins or () for p in ("--plugin", name))])
    say(f"{config.model} ({config.method}) on {config.data}, {result.epochs:.3g} of {config.epochs} epochs")
    train = None if result.train_loss is None else (result.train_loss, result.train_accuracy)
    for name, found in (("training", train), ("validation", result.validation), ("test", result.test)):
        if found is not None:
            loss, accuracy = found
            tokens = result.unit == "tokens" and name != "training"
            perplexity = f", perplexity {math.exp(min(loss, 700)):.4g}" if tokens else ""
            say(f"{name:11s} accuracy {percent(accuracy, digits=2)}, loss {loss:.4g}{perplexity}")
    if result.linear_accuracy is not None:
        say(f"for comparison: a linear classifier gets {percent(result.linear_accuracy, digits=2)}")
    if result.bleu is not None:
        say(f"test        BLEU {result.bleu.score:.2f}  ({result.bleu.signature})")
    took = f"{result.throughput:,.0f} {result.unit}/s" if result.throughput else "nothing was left to train"
    say(f"{took}, {duration(result.seconds)}, {folder}", "dim")
    if result.status == "diverged":
        say(
            "diverged: the loss is no longer finite, or above the limit. The folder keeps the model of the last "
            f"checkpoint before that, or the initial model. Try a lower lr, or see where the signal goes with: {look}",
            "red",
        )
        return
    if result.status == "interrupted":
        name = signal.Signals(result.signal).name if result.signal else "a signal"
        say(f"stopped by {name}; continue with: normfree train --resume {shlex.quote(str(folder))}", "yellow")
        return
    if result.guesses and result.judged is not None:
        name, (loss, _) = result.judged
        above = "above that" if loss > 1.005 * result.guess_loss else "that"
        kinds = "tokens" if result.unit == "tokens" else "classes"
        say(
            f"nothing was learned: the {name} loss, {loss:.4g}, is {above} of a guess among {result.classes:,} "
            f"{kinds}, {result.guess_loss:.4g}. Try another lr or more epochs, or see where the signal is lost with: "
            f"{look}",
            "yellow",
        )
    for warning in config.warnings(result.steps):
        say(warning, "yellow")


# A dry run


def _print_dry_run(config: TrainConfig, out: Path | None, *, overwrite: bool, as_json: bool, show: bool) -> None:
    """Measure a few steps of a run, and print its parameters, steps, device, memory and time.

    `show` is False in all processes of a distributed run but one.
    """
    from normfree.report import open_console
    from normfree.report.terminal import duration, progress
    from normfree.train.engine.dry_run import measure_run
    from normfree.train.engine.process_state import StopRequestedError
    from normfree.train.run.run_folder import RunFolder

    if out is not None:
        RunFolder(out).require_new(overwrite=overwrite)
    try:
        with progress(f"{config.model}, steps", show=show) as update:
            found = measure_run(config, update)
    except StopRequestedError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if not show:
        return
    if as_json:
        print_json(found.to_json())
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
        "steps": f"{found.steps:,}: {found.epochs} epochs of {found.steps_per_epoch:,}, with "
        f"{found.items_per_step:,.0f} {found.unit} each",
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


def list_recipes(as_json: bool) -> None:
    """Print the recipes, as `normfree train --list` does."""
    from normfree.train.recipes import recipes

    found = [(r.name, r.summary, r.reference, r.config) for r in recipes().values()]
    if as_json:
        print_json([{"name": n, "summary": s, "reference": r, "config": asdict(c)} for n, s, r, c in found])
        return
    columns = tuple(
        Column(name, style="cyan" if name == "recipe" else None) for name in ("recipe", "description", "from")
    )
    rows = tuple((name, summary, reference) for name, summary, reference, _ in found)
    caption = "normfree train RECIPE runs one; --show prints its settings, --set changes one."
    print_table(Table("Recipes", columns, rows, caption=caption))
