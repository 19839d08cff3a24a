"""`normfree train`: a recipe or a configuration becomes a trained model; `normfree evaluate`: its test score again."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normfree.cli.options import DEVICE, given, require_alone, require_either
from normfree.cli.plugins import Plugins, load_plugins
from normfree.cli.text import SIZE, SOURCE, TARGET, TEXT, prepared_name
from normfree.cli.typed import typed

if TYPE_CHECKING:
    from rich.console import Console

    from normfree.train import RunResult, TrainConfig
    from normfree.train.run.result import Snapshot

DIVERGED = 3  # exit status; a signal gives 128 + its number, as a shell does


def train_model(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A named configuration; see --list.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="See normfree models.")] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", metavar="NAME", help="See normfree methods.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="See normfree data list; folder:PATH for your images.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data sets.")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs", metavar="N", help="Passes over the training data.")] = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="RATE", help="The learning rate.")] = None,
    device: Annotated[str | None, DEVICE] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change this or any other setting (--show); may come again."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings from a TOML file.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; made up if not given.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder, bit for bit.")
    ] = None,
    source: Annotated[Path | None, SOURCE] = None,
    target: Annotated[Path | None, TARGET] = None,
    text: Annotated[Path | None, TEXT] = None,
    vocabulary: Annotated[int, SIZE] = 8000,
    listing: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print all settings and what they mean, as TOML; do not train.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
) -> None:
    """Train a network on images or text, without normalization layers or with them, and test it at the end.

    The exit status is 0 for a finished run, 3 for one that diverged, 130 after ctrl-C and 143 after SIGTERM; an
    interrupted run goes on with --resume.

    For example: normfree train fashion --lr 0.05 --set batch_size=64;
    or: normfree train translation --source train.de --target train.en
    """
    require_alone(context, "--list", beside=("--json", "--plugin"))
    require_either(context, "--show", ["--json"], "--show prints TOML")
    require_either(context, "--resume", ["--out"], f"the run in '{resume}' stays in its folder")
    is_text = source is not None or target is not None or text is not None
    if "--vocabulary" in given(context) and not is_text:
        raise ValueError(
            "expected --vocabulary beside --source and --target, or --text, got none of them; leave it out, since "
            "data that is prepared has its vocabulary"
        )
    load_plugins(plugin)
    named = {"--model": model, "--method": method, "--data": data, "--data-dir": data_dir, "--epochs": epochs}
    named |= {"--lr": lr, "--device": device}
    changes = list(changes or [])
    if is_text:
        changes.append(f"data={prepared_name(source, target, text, vocabulary, prepare=not show)}")
    settings = [f"{name[2:].replace('-', '_')}={value}" for name, value in named.items() if value is not None]
    settings += changes
    if listing or not (recipe or settings or config or resume or show):
        _list_recipes(as_json)
        raise typer.Exit(0 if listing else 2)  # as for normfree alone
    chosen = _configuration(recipe, settings, config, resume)
    if show:
        typer.echo(chosen.to_toml(explained=True), nl=False)
        return
    from normfree.train import fit
    from normfree.train.engine.distributed import SharedError

    folder = resume or out or _new_folder(chosen)
    from normfree.report import open_console
    from normfree.report.progress import metrics_text, progress

    first = int(os.environ.get("RANK", "0")) == 0
    typed_in = {**named, "--set": changes, "--config": config, "--out": out, "--resume": resume, "--plugin": plugin}
    told = not first
    try:
        with progress(chosen.model, done=_steps_done(resume), show=first) as update:

            def tell(s: Snapshot) -> None:
                nonlocal told
                if not told:
                    _print_doubts(chosen, s.total, s.unit, open_console(stderr=True))
                told = True
                update(
                    s.done,
                    s.total,
                    metrics_text(loss=s.loss, accuracy=s.accuracy, throughput=s.throughput, unit=s.unit),
                )

            result = fit(
                chosen,
                out=folder,
                resume=resume is not None,
                progress=tell,
                command=typed("train", *([recipe] if recipe else []), options=typed_in),
            )
    except SharedError:
        if first:
            raise
        raise typer.Exit(2) from None  # the first process tells it
    if first:
        _print(result, folder, as_json, plugin)
    if result.status == "diverged":
        raise typer.Exit(DIVERGED)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def evaluate_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Annotated[str, DEVICE] = "auto",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data, if it moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plugin: Plugins = None,
) -> None:
    """Score the model of a run on the test images or sentences.

    For example: normfree evaluate runs/fashion
    """
    load_plugins(plugin)
    from normfree.report.progress import progress
    from normfree.train import evaluate, evaluate_translation, read_config

    config = read_config(run)
    with progress(config.model) as update:
        found = evaluate(run, device=device, data_dir=data_dir, progress=lambda done: update(done, None, "batches"))
    with progress("translating") as update:
        translated = evaluate_translation(
            run, device=device, data_dir=data_dir, progress=lambda done, total: update(done, total, "sentences")
        )
    if as_json:
        from normfree.files import plain_json

        plain = found._asdict() | ({} if translated is None else {"bleu": translated._asdict()})
        typer.echo(json.dumps(plain_json(plain), allow_nan=False))
        return
    what = f"{config.model} ({config.method}) on {config.data}"
    typer.echo(f"{what}: {_percent(found.accuracy)} right, loss {found.loss:.4g}")
    if translated is not None:
        typer.echo(f"BLEU {translated.score:.2f}  ({translated.signature})")


def _configuration(recipe: str | None, changes: list[str], file: Path | None, resume: Path | None) -> TrainConfig:
    """Recipe, then file, then single changes, each over the one before; a run to resume is its own recipe."""
    from normfree.train.config import TrainConfig
    from normfree.train.recipes import recipe as named

    if resume is not None and recipe is None and file is None:
        from normfree.train import read_config

        chosen = read_config(resume)
    else:
        _require_recipe(recipe)
        chosen = TrainConfig() if recipe is None else named(recipe)
    if file is not None:
        chosen = TrainConfig.from_toml(file, base=chosen)
    return chosen.with_changes(**TrainConfig.parse_changes(changes))


def _require_recipe(name: str | None) -> None:
    """Refuse the name of a model in the place of a recipe's, and say where it belongs."""
    from normfree.train.recipes import recipes

    if name is None or name in recipes():
        return
    from normfree.models import is_model_name
    from normfree.models.foreign import is_foreign

    if is_foreign(name) or is_model_name(name):
        raise ValueError(f"expected a recipe, got the model '{name}'; give it as --model {name}, or see --list")


def _steps_done(run: Path | None) -> int:
    """The steps that earlier processes did, by the name of the last checkpoint."""
    from normfree.train.run.run_folder import RunFolder

    return 0 if run is None else RunFolder(run).saved_step or 0


def _new_folder(config: TrainConfig) -> Path:
    """A folder below runs/ that no run has taken."""
    method = config.method.replace(":", "-").replace("/", "over").replace("=", "").replace(",", "-").replace(" ", "-")
    model = config.model.replace(":", "-")
    base = Path("runs") / f"{model}-{method}-{config.data.partition(':')[0]}-seed{config.seed}"
    number = 1
    while (path := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return path


def _print(result: RunResult, folder: Path, as_json: bool, plugins: Sequence[str] | None = None) -> None:
    if as_json:
        from normfree.files import plain_json

        typer.echo(json.dumps(plain_json({**result.to_json(), "folder": str(folder)}), indent=1))
        return
    from normfree.report import open_console
    from normfree.report.formatting import duration

    console = open_console()
    config = result.config
    look = shlex.join(["normfree", "diagnose", str(folder), *(p for name in plugins or () for p in ("--plugin", name))])
    console.print(
        f"{config.model} ({config.method}) on {config.data}, {result.epochs:.3g} of {config.epochs} epochs",
        markup=False,
    )
    if result.train_loss is not None:
        console.print(
            f"training    {_percent(result.train_accuracy)} right, loss {result.train_loss:.4g}", markup=False
        )
    for name, found in (("validation", result.validation), ("test", result.test)):
        if found is not None:
            surprise = f", perplexity {math.exp(min(found.loss, 700)):.4g}" if result.unit == "tokens" else ""
            console.print(f"{name:11s} {_percent(found.accuracy)} right, loss {found.loss:.4g}{surprise}", markup=False)
    if result.linear_accuracy is not None:
        console.print(f"for comparison: a linear classifier gets {_percent(result.linear_accuracy)}", markup=False)
    if result.bleu is not None:
        console.print(f"test        BLEU {result.bleu.score:.2f}  ({result.bleu.signature})", markup=False)
    took = f"{result.throughput:,.0f} {result.unit}/s" if result.throughput else "nothing was left to train"
    speed = f"{took}, {duration(result.seconds)}"
    console.print(f"{speed}, {folder}", markup=False, style="dim")
    if result.status == "diverged":
        console.print(
            "diverged: the loss is no longer finite, or above the limit; kept is the model of the last checkpoint "
            f"before that, or of the start. Try a lower lr, or look with: {look}",
            markup=False,
            style="red",
        )
        return
    if result.status == "interrupted":
        name = signal.Signals(result.signal).name if result.signal else "a signal"
        console.print(f"stopped by {name}; go on with: normfree train --resume {folder}", markup=False, style="yellow")
        return
    if result.guesses and result.judged is not None:
        name, (loss, _) = result.judged
        above = "above that" if loss > 1.005 * result.guess_loss else "that"
        kinds = "tokens" if result.unit == "tokens" else "classes"
        console.print(
            f"nothing was learned: the {name} loss, {loss:.4g}, is {above} of a guess among {result.classes:,} "
            f"{kinds}, {result.guess_loss:.4g}. Try another lr or more epochs, or see where the signal is lost with: "
            f"{look}",
            markup=False,
            style="yellow",
        )
    _print_doubts(config, result.steps, result.unit, console)


def _print_doubts(config: TrainConfig, steps: int, unit: str, console: Console) -> None:
    """What spoils a run of so many steps, although it can be made."""
    if config.warmup > (steps if config.warmup_in == "steps" else config.epochs) > 0:
        doubt = (
            f"the warm-up of {config.warmup:g} {config.warmup_in} is longer than the run of {steps:,} steps, which "
            "does not come to its learning rate; make it shorter with --set warmup=…"
        )
        console.print(doubt, markup=False, style="yellow")
    if steps == config.epochs > 0:
        kinds = {"pairs": " tokens takes all training sentences", "text": " blocks takes the whole training text"}
        what = kinds.get(config.data.partition(":")[0], " takes all training images")
        twice = ", and some twice if they are fewer" if unit == "images" else ""
        doubt = f"a batch of {config.batch_size:,}{what} at once{twice}; make it smaller with --set batch_size=…"
        console.print(doubt, markup=False, style="yellow")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _list_recipes(as_json: bool) -> None:
    from dataclasses import asdict

    from normfree.report import Column, Table, print_table
    from normfree.train.recipes import recipes

    found = [(r.name, r.summary, r.reference, r.make()) for r in recipes().values()]
    if as_json:
        plain = [{"name": n, "summary": s, "reference": r, "config": asdict(c)} for n, s, r, c in found]
        typer.echo(json.dumps(plain, indent=1, ensure_ascii=False))
        return
    columns = tuple(
        Column(name, style="cyan" if name == "recipe" else None) for name in ("recipe", "what it is", "from")
    )
    rows = tuple((name, summary, reference) for name, summary, reference, _ in found)
    caption = "normfree train RECIPE runs one; --show prints its settings, --set changes one."
    print_table(Table("Recipes", columns, rows, caption=caption))
