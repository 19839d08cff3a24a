"""`normfree tune`: search for good settings."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from normfree.cli.options import (
    DEVICE,
    AsJson,
    ChangedSettings,
    ConfigFile,
    CpusPerRun,
    DataDir,
    DataName,
    Epochs,
    GpusPerRun,
    Jobs,
    MethodName,
    ModelName,
    On,
    RecipeName,
    announcing,
    default_jobs,
    print_json,
    require_executor,
    say_stopped,
    typed_command,
)
from normfree.errors import require_package


def tune_settings(
    context: typer.Context,
    recipe: RecipeName = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="NAME=RANGE",
            help="A setting to search: lr=0.001..1:log, batch_size=32..256:step=32, or choices as in "
            "method=fixup,batchnorm; may be repeated.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", min=1, help="Number of trials in all.")] = 50,
    model: ModelName = None,
    method: MethodName = None,
    data: DataName = None,
    data_dir: DataDir = None,
    epochs: Epochs = None,
    device: Annotated[str | None, DEVICE] = None,
    changes: ChangedSettings = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the search and its runs.")] = Path(
        "runs/tune"
    ),
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="The validation score: accuracy or loss.")
    ] = "accuracy",
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="NAME", help="How values are chosen: tpe, random or grid.")
    ] = "tpe",
    pruner: Annotated[
        str,
        typer.Option("--pruner", metavar="NAME", help="How low scores end a trial early: median, hyperband or none."),
    ] = "median",
    jobs: Jobs = None,
    on: On = "local",
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    as_json: AsJson = False,
) -> None:
    """Search for the settings with the best validation score, by the samplers and pruners of Optuna.

    The same command continues a search. Started several times, also on other machines that share the folder, its
    processes share the trials until there are --trials in all. Prints the command that trains with the best settings,
    and writes tuning.json, .png and .svg. The exit status is 0; 2 after an error; 3 if no trial finished; 128 plus the
    number of a signal that stopped it.

    For example: normfree tune fashion --search lr=0.001..1:log --epochs 2 --trials 20
    """
    from normfree.cli.train import EXIT_DIVERGED
    from normfree.report import open_console, print_table
    from normfree.report.terminal import progress

    require_executor(on, jobs, cpus_per_run, gpus_per_run)
    require_package("optuna", "a search")
    named = {"--model": model, "--method": method, "--data": data, "--data-dir": data_dir, "--epochs": epochs}
    named |= {"--device": device}
    settings = [f"{name[2:].replace('-', '_')}={value}" for name, value in named.items() if value is not None]
    settings += changes or []
    _require_free(settings, search or [])
    from normfree.train.recipes import configuration

    base = configuration(recipe, file=config, changes=settings)
    from normfree.tuning.tune_runs import tune
    from normfree.tuning.tuning_result import save, score_text, table, train_options

    messages = open_console(stderr=True)
    processes = jobs or default_jobs(base.device) if on == "local" else 1
    kinds: dict[str, Any] = {"metric": metric, "sampler": sampler, "pruner": pruner}
    where: dict[str, Any] = {"on": on, "cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run, "jobs": processes}
    with progress("trials") as update:
        show = announcing(update, "trials")
        found = tune(base, search or [], trials=trials, out=out, progress=show, **kinds, **where)
    if as_json:
        print_json(found.to_json())
    elif found.trials:
        print_table(table(found))
    for path in save(found, out, command=typed_command("tune", context)):
        messages.print(f"wrote {path}", markup=False)
    if found.signal is not None:
        say_stopped("trials")
        raise typer.Exit(128 + found.signal)
    if unfinished := sum(trial.status == "unfinished" for trial in found.trials):
        messages.print(f"{unfinished} more in progress in other processes", markup=False)
    if found.best is None:
        diverged = sum(trial.status == "diverged" for trial in found.trials)
        messages.print(
            f"no trial finished, {diverged} of {len(found.trials)} diverged; search lower rates, or another method",
            markup=False,
            style="red",
        )
        raise typer.Exit(EXIT_DIVERGED)
    if not as_json:
        console = open_console()
        score = score_text(found, found.best.score)
        console.print(f"best: trial {found.best.number}, validation {metric} {score}; train with it:", markup=False)
        fixed = [word for text in settings for word in ("--set", text)] + (["--config", str(config)] if config else [])
        train = shlex.join(["normfree", "train", *([recipe] if recipe else []), *fixed])
        console.print(f"{train} {train_options(found.best, found.search)}", markup=False, soft_wrap=True)


def _require_free(settings: list[str], search: list[str]) -> None:
    """Refuse a setting that is both fixed and searched."""
    fixed = {text.partition("=")[0].strip() for text in settings}
    for name in (text.partition("=")[0].strip() for text in search):
        if name in fixed:
            raise ValueError(f"expected '{name}' fixed or searched, got both; leave one of them out")
