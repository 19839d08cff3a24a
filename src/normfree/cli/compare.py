"""Verbs that train many runs: `compare` methods at several depths, `tune` settings, and the `demo` on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.options import (
    DEVICE,
    ConfigFile,
    CpusPerRun,
    DataDir,
    Epochs,
    GpusPerRun,
    MethodName,
    ModelName,
    On,
    Plugins,
    command_line,
    complete_data,
    complete_recipe,
    configuration,
    load_plugins,
    require_alone,
    require_engine,
    require_folder,
)
from normfree.errors import require_package

if TYPE_CHECKING:
    from normfree.train import TrainConfig


def compare_methods(
    context: typer.Context,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", help="A method; may be repeated (default: fixup, batchnorm).")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="A model, one per depth, or torchvision:resnet18, …; may be repeated (default: resnet8, resnet20).",
        ),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="All other settings; see normfree train --list.")] = "fashion",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    lr: Annotated[
        list[float] | None,
        typer.Option("--lr", help="A learning rate to try; the best by validation accuracy is shown. May be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, 0, 1, 2, …")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the runs and results.")] = Path(
        "runs/compare"
    ),
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time, one thread each (default: one per CPU core).")
    ] = None,
    on: On = "local",
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
    import json

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
    require_engine(on, jobs, cpus_per_run, gpus_per_run)
    if plugin and on != "local":
        raise ValueError(f"--plugin cannot be combined with --on {on}: the workers do not load plug-ins")
    require_package("matplotlib", "the plot of a comparison")
    require_package("jinja2", "the page of a comparison")
    load_plugins(plugin)
    base = _base(recipe, changes or [])
    from normfree.comparison import compare
    from normfree.files import to_json_values
    from normfree.report.terminal import progress

    processes = 1 if plugin or on != "local" else jobs or default_jobs(base.device)
    told = False

    with progress("runs", estimate=False) as update:

        def show(done: int, total: int, text: str) -> None:
            nonlocal told
            if not told and total > 1:
                before = f", {done} of them trained before" if done else ""
                messages.print(f"{total} runs{before}", markup=False)
            told = True
            update(done, total, text)

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
            progress=show,
        )
    if as_json:
        typer.echo(json.dumps(to_json_values(found.to_json()), indent=1, ensure_ascii=False))
    elif found.runs:
        print_table(table(found))
    if found.signal is not None:
        messages.print(
            "stopped; the runs so far are kept; run the same command to continue", markup=False, style="yellow"
        )
        raise typer.Exit(128 + found.signal)
    typed: dict[str, object] = {
        "-m": method,
        "--model": model,
        "--recipe": recipe,
        "--set": changes,
        "--lr": lr,
        "--seeds": seeds,
    }
    typed |= {"--out": out, "--jobs": jobs, "--on": None if on == "local" else on}
    typed |= {"--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run, "--plugin": plugin}
    for path in save(found, out, command=command_line("compare", options=typed)):
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


def default_jobs(device: str) -> int:
    """Return one run per CPU core that this process may use; on a GPU one run at a time."""
    import torch

    from normfree.provenance import available_cores

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return 1
    return available_cores()


def tune_settings(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A named configuration; see normfree train --list.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="NAME=RANGE",
            help="A setting to search: lr=0.001..1:log, batch_size=32..256:step=32, or choices as in "
            "method=fixup,batchnorm; may be repeated.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials in all.")] = 50,
    model: ModelName = None,
    method: MethodName = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="See normfree data list.", autocompletion=complete_data)
    ] = None,
    data_dir: DataDir = None,
    epochs: Epochs = None,
    device: Annotated[str | None, DEVICE] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the search and its runs.")] = Path(
        "runs/tune"
    ),
    metric: Annotated[str, typer.Option("--metric", help="The validation score: accuracy or loss.")] = "accuracy",
    sampler: Annotated[str, typer.Option("--sampler", help="How values are chosen: tpe, random or grid.")] = "tpe",
    pruner: Annotated[
        str, typer.Option("--pruner", help="How hopeless trials are stopped: median, hyperband or none.")
    ] = "median",
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trials at a time, one thread each (default: 1 per CPU core).")
    ] = None,
    on: On = "local",
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Search for the settings with the best validation score, by the samplers and pruners of Optuna.

    The same command continues a search. Started several times, also on other machines that share the folder, its
    processes share the trials until there are --trials in all. Prints the command that trains with the best settings,
    and writes tuning.json, .png and .svg. The exit status is 0; 2 after an error; 3 if no trial finished; 128 plus the
    number of a signal that stopped it.

    For example: normfree tune fashion --search lr=0.001..1:log --epochs 2 --trials 20
    """
    import json

    from normfree.cli.train import DIVERGED
    from normfree.report import open_console, print_table
    from normfree.report.terminal import progress

    require_engine(on, jobs, cpus_per_run, gpus_per_run)
    require_package("optuna", "a search")
    named = {"--model": model, "--method": method, "--data": data, "--data-dir": data_dir, "--epochs": epochs}
    named |= {"--device": device}
    settings = [f"{name[2:].replace('-', '_')}={value}" for name, value in named.items() if value is not None]
    settings += changes or []
    _require_free(settings, search or [])
    base = configuration(recipe, file=config, changes=settings)
    from normfree.files import to_json_values
    from normfree.tuning.tuning import tune
    from normfree.tuning.tuning_report import save, score_text, table, train_options

    messages, told = open_console(stderr=True), False
    processes = jobs or default_jobs(base.device) if on == "local" else 1
    with progress("trials") as update:

        def show(done: int, total: int, text: str) -> None:
            nonlocal told
            if not told:
                before = f", {done} of them done before" if done else ""
                messages.print(f"{total} trial{'s' if total != 1 else ''}{before}", markup=False)
                told = True
            update(done, total, text)

        kinds: dict[str, Any] = {"metric": metric, "sampler": sampler, "pruner": pruner}
        where: dict[str, Any] = {"on": on, "cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run}
        found = tune(base, search or [], trials=trials, out=out, jobs=processes, progress=show, **kinds, **where)
    if as_json:
        typer.echo(json.dumps(to_json_values(found.to_json()), indent=1, ensure_ascii=False))
    elif found.trials:
        print_table(table(found))
    typed = {**named, "--set": changes, "--config": config}
    options = {"--search": search, "--trials": trials, **typed, "--out": out, "--metric": metric}
    options |= {"--sampler": sampler, "--pruner": pruner}
    command = command_line("tune", *([recipe] if recipe else []), options=options)
    for path in save(found, out, command=command):
        messages.print(f"wrote {path}", markup=False)
    if found.signal is not None:
        messages.print(
            "stopped; the trials so far are kept; run the same command to continue", markup=False, style="yellow"
        )
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
        raise typer.Exit(DIVERGED)
    if not as_json:
        console = open_console()
        score = score_text(found, found.best.score)
        console.print(f"best: trial {found.best.number}, validation {metric} {score}; train with it:", markup=False)
        train = command_line("train", *([recipe] if recipe else []), options=typed)
        console.print(f"{train} {train_options(found.best, found.search)}", markup=False, soft_wrap=True)


def _require_free(settings: list[str], search: list[str]) -> None:
    """Refuse a setting that is both fixed and searched."""
    fixed = {text.partition("=")[0].strip() for text in settings}
    for name in (text.partition("=")[0].strip() for text in search):
        if name in fixed:
            raise ValueError(f"expected '{name}' fixed or searched, got both; leave one of them out")


def make_demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the page and the runs.")] = Path("demo"),
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time, one thread each (default: one per CPU core).")
    ] = None,
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
    console = open_console()
    with progress("demo") as update:
        demo = run_demo(out, jobs=jobs or default_jobs("cpu"), progress=update)
    if demo is None:
        open_console(stderr=True).print(
            "stopped; the runs so far are kept; run the same command to continue", style="yellow"
        )
        raise typer.Exit(130)
    print_table(signal_table(demo), console)
    print_table(table(demo.depth), console)
    page, picture = save(demo, out)
    console.print(f"Open {page} in a browser; {picture} is its picture.", markup=False, style="bold")
