"""`normfree train`: train a model by a recipe or a configuration; `normfree evaluate`: score it on the test data."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normfree.cli.completion import complete_data, complete_method, complete_model, complete_recipe
from normfree.cli.data import SIZE, SOURCE, TARGET, TEXT, prepared_name
from normfree.cli.dry_run import print_dry_run
from normfree.cli.listing import list_recipes
from normfree.cli.options import (
    DEVICE,
    Plugins,
    Trust,
    command_line,
    given,
    load_plugins,
    require_alone,
    require_either,
)

if TYPE_CHECKING:
    from rich.console import Console

    from normfree.train import RunResult, TrainConfig
    from normfree.train.run.result import Snapshot

_log = logging.getLogger("normfree.train")
_SLURM_SECONDS = 60.0  # for SLURM to answer
DIVERGED = 3  # exit status; a signal gives 128 plus its number, as in a shell


def train_model(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A named configuration; see --list.", autocompletion=complete_recipe),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="See normfree models.", autocompletion=complete_model)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", metavar="NAME", help="See normfree methods.", autocompletion=complete_method),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="NAME",
            help="See normfree data list; folder:PATH for your images.",
            autocompletion=complete_data,
        ),
    ] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data sets.")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs", metavar="N", help="Passes over the training data.")] = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="RATE", help="The learning rate.")] = None,
    device: Annotated[str | None, DEVICE] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change any setting (see --show); may be repeated."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings from a TOML file.")] = None,
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

    The exit status is 0 for a finished run, 3 for a diverged one, 130 after ctrl-C and 143 after SIGTERM. Continue an
    interrupted run with --resume. A job of SLURM that gets SIGUSR1 saves its run and is queued again; then the same
    command with --out continues.

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
    chosen = configuration(recipe, file=config, changes=settings, resume=resume, trust=trust)
    if show:
        typer.echo(chosen.to_toml(explained=True), nl=False)
        return
    if dry_run:
        print_dry_run(chosen, out, overwrite=overwrite, as_json=as_json, show=_is_first_process())
        return
    from normfree.train.run.run_folder import RunFolder

    folder = resume or out or _new_folder(chosen)
    # A job of SLURM that was queued again continues the run in its folder.
    goes_on = resume is not None or (out is not None and was_requeued() and RunFolder(out).has_begun)
    typed = {**named, "--set": changes, "--config": config, "--out": out, "--resume": resume, "--plugin": plugin}
    command = command_line("train", *([recipe] if recipe else []), options=typed) + (" --trust" if trust else "")
    result = _fit(chosen, folder, resume=goes_on, overwrite=overwrite and not goes_on, command=command)
    if _is_first_process():
        _print(result, folder, as_json, plugin)
        if (out or resume) is not None and requeue(result.signal):
            typer.echo("SLURM queued the job again, which continues the run", err=True)
    if result.status == "diverged":
        raise typer.Exit(DIVERGED)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def configuration(
    name: str | None = None,
    *,
    file: str | Path | None = None,
    changes: Iterable[str] = (),
    resume: str | Path | None = None,
    trust: bool = False,
) -> TrainConfig:
    """Compose a configuration as the command line does: a recipe, a file over it, and single changes over both.

    Args:
        name: The recipe; the defaults if None.
        file: A TOML file with some of the settings.
        changes: Single settings of the form 'name=value'.
        resume: The folder of a run to resume. Its configuration is the base if neither recipe nor file is given.
        trust: Whether the file or folder may name a model of any module, which is then imported.

    Returns:
        The configuration.

    Raises:
        ValueError: If a name is unknown (for a model's name the message says how to pass it), a value is bad, or the
            model's name needs `trust`.
        OSError: If the file cannot be read.
    """
    from normfree.train.config import TrainConfig
    from normfree.train.recipes import recipe, recipes

    if resume is not None and name is None and file is None:
        from normfree.train.run.loading import read_config

        chosen = read_config(resume)
    else:
        if name is not None and name not in recipes():
            _refuse_model(name)
        chosen = TrainConfig() if name is None else recipe(name)
    if file is not None:
        chosen = TrainConfig.from_toml(file, base=chosen)
    changed = TrainConfig.parse_changes(changes)
    if "model" not in changed and (origin := file or resume) is not None:
        from normfree.models.third_party import require_trusted

        require_trusted(chosen.model, origin, trust)
    return chosen.with_changes(**changed)


def _refuse_model(name: str) -> None:
    """Raise `ValueError` if the name given as a recipe is that of a model; the message says how to pass a model."""
    from normfree.models import is_model_name
    from normfree.models.registry import is_foreign

    if is_foreign(name) or is_model_name(name):
        raise ValueError(f"expected a recipe, got the model '{name}'; give it as --model {name}, or see --list")


def _fit(config: TrainConfig, folder: Path, *, resume: bool, overwrite: bool, command: str) -> RunResult:
    """Train with a line of progress, preceded by the warnings about the configuration."""
    from normfree.report import open_console
    from normfree.train.engine.environment import SharedError
    from normfree.train.engine.live import progress_line
    from normfree.train.engine.loop import fit
    from normfree.train.run.run_folder import RunFolder

    first = _is_first_process()
    warned = not first
    try:
        with (
            _log_shown(first),
            progress_line(config.model, done=(RunFolder(folder).saved_step or 0) if resume else 0, show=first) as show,
        ):

            def show_progress(s: Snapshot) -> None:
                nonlocal warned
                if not warned:
                    _print_warnings(config, s.total, open_console(stderr=True))
                warned = True
                show(s)

            return fit(config, out=folder, resume=resume, overwrite=overwrite, progress=show_progress, command=command)
    except SharedError:
        if first:
            raise
        raise typer.Exit(2) from None  # the first process prints the error


@contextmanager
def _log_shown(show: bool) -> Iterator[None]:
    """Print the lines of the log of training on stderr: which kernels run, and why not the others."""
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
        from normfree.files import to_json_values

        plain = found._asdict() | ({} if translated is None else {"bleu": translated._asdict()})
        typer.echo(json.dumps(to_json_values(plain), allow_nan=False))
        return
    what = f"{config.model} ({config.method}) on {config.data}"
    typer.echo(f"{what}: accuracy {percent(found.accuracy, digits=2)}, loss {found.loss:.4g}")
    if translated is not None:
        typer.echo(f"BLEU {translated.score:.2f}  ({translated.signature})")


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
    from normfree.train.config import plain_name

    words = f"{config.model}-{config.method}-{config.data.partition(':')[0]}-seed{config.seed}"
    base = Path("runs") / plain_name(words)
    number = 1
    while (path := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return path


def _print(result: RunResult, folder: Path, as_json: bool, plugins: Sequence[str] | None = None) -> None:
    """Print how a run ended, and the command for the next step."""
    if as_json:
        from normfree.files import to_json_values

        typer.echo(json.dumps(to_json_values({**result.to_json(), "folder": str(folder)}), indent=1))
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
        say(f"stopped by {name}; continue with: normfree train --resume {folder}", "yellow")
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
    _print_warnings(config, result.steps, console)


def _print_warnings(config: TrainConfig, steps: int, console: Console) -> None:
    """Print the warnings about settings that do not suit a run of this length."""
    for warning in config.warnings(steps):
        console.print(warning, markup=False, style="yellow")
