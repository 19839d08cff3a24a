"""`normfree convert`: take the normalization out of a model, and save the result in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_method
from normfree.cli.options import (
    AsJson,
    Checkpoint,
    Example,
    Plugins,
    Seed,
    example_inputs,
    load_plugins,
    print_json,
    require_folder,
    require_model,
    require_one_input,
)

if TYPE_CHECKING:
    from torch import nn

    from normfree.diagnostics.diagnosis import Diagnosis
    from normfree.plan import ResidualPlan


def convert_model(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME or package.module:factory.")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", metavar="NAME", help="The method (default: fixup).", autocompletion=complete_method
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the converted model and the report.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a converted model in the folder of --out.")
    ] = False,
    shape: Annotated[str, typer.Option("--input", metavar="SHAPE", help="Shape of one input, such as 3x224x224.")] = "",
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Number of inputs, N(0, 1) noise.")] = 8,
    example: Example = "",
    checkpoint: Checkpoint = None,
    fold: Annotated[
        bool,
        typer.Option("--fold-batchnorm", help="Fold batch norms into the weights; the function stays the same."),
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Take the normalization out of a model, apply a method, and compare the signal before and after.

    The folder of --out gets weights.safetensors, plan.json, report.html, and load.py, which loads the model again.

    For example: normfree convert torchvision:resnet50 --method fixup --out resnet50-fixup
    """
    from normfree.diagnostics import diagnosis
    from normfree.report import open_console, print_table
    from normfree.report.terminal import progress

    require_one_input(context)
    load_plugins(plugin)
    chosen = _method(model, method, checkpoint, fold)
    if overwrite and out is None:
        raise ValueError("--overwrite needs --out, the folder of the converted model to replace; leave it out")
    if out is not None:
        require_folder(out, "--out")
        _require_new(out, overwrite)
    inputs = example_inputs(model, example, shape, batch, seed)
    with progress(f"converting {model}", 3) as update:
        converted = _convert(model, chosen, inputs, checkpoint, seed)
        update(1, 3, "measuring the signal")
        found = _diagnoses(converted, inputs, seed, lambda count: update(1 + count, 3, "measuring the signal"))
    missing = "" if out is None else _save(out, converted, found, inputs, model, overwrite)
    if as_json:
        record = {
            "model": model,
            "method": chosen or "fold_batchnorm",
            "plan": converted.plan.to_json(),
            "diagnoses": [one.to_json() for one in found],
        }
        print_json(record)
    else:
        console = open_console()
        console.print(str(converted.plan), markup=False, highlight=False)
        if found:
            print_table(diagnosis.table(found), console)
            console.print(diagnosis.summary(found[-1]), highlight=False, markup=False)
        else:
            console.print("no verdict: the model has no residual sum", markup=False)
    if out is not None:
        messages = open_console(stderr=True)
        if missing:
            messages.print(missing, markup=False, style="yellow")
        trust = ", trust=True" if ":" in model and not model.startswith(("torchvision:", "timm:")) else ""
        messages.print(f"wrote {out}; load it with: normfree.load('{out}'{trust})", markup=False)


@dataclass(frozen=True)
class _BeforeAndAfter:
    """A model before and after conversion, and the names of both in the report."""

    before: nn.Module
    after: nn.Module
    plan: ResidualPlan
    names: tuple[str, str]


def _require_new(folder: Path, overwrite: bool) -> None:
    """Raise `ValueError` if a folder holds anything; with `overwrite`, if it holds anything but a converted model."""
    from normfree.conversion.saving import PLAN, require_free

    require_free(folder)
    if not overwrite and (folder / PLAN).exists():
        raise ValueError(
            f"expected a new folder for the converted model, but '{folder}' holds one; replace it with --overwrite, or "
            "choose another folder"
        )


def _save(
    folder: Path, converted: _BeforeAndAfter, found: list[Diagnosis], inputs: Any, source: str, overwrite: bool
) -> str:
    """Save the converted model and its report in one step, so that the folder never mixes two conversions.

    Returns:
        Why the report was left out; '' if it was not.
    """
    from normfree.conversion.saving import REPORT, save_converted
    from normfree.diagnostics import diagnosis
    from normfree.plan import remembered_example
    from normfree.storage.writing import atomic_folder, explain_os_errors

    missing = ""
    example = inputs if remembered_example(converted.after) is None else None
    with (
        explain_os_errors("the converted model", folder, "an earlier model there is unchanged"),
        atomic_folder(folder) as new,
    ):
        save_converted(new, converted.after, converted.plan, example=example, source=source)
        if found:
            try:
                diagnosis.save(found, new / REPORT, title=f"{source}, before and after")
            except ImportError as error:  # the page needs an optional package
                missing = f"{REPORT} was left out: {error}"
        _require_new(folder, overwrite)  # another process may have saved a model there meanwhile
    return missing


def _method(model: str, method: str | None, checkpoint: Path | None, fold: bool) -> str:
    """Return the method, or '' to fold batch norms; refuse options that would be ignored."""
    from normfree.methods import get
    from normfree.models.builder import is_foreign

    require_model(model, "convert")
    if not is_foreign(model):
        raise ValueError(
            f"expected torchvision:NAME, timm:NAME or package.module:factory, got '{model}'; normfree's own models are "
            "built with a method directly, see normfree models"
        )
    if fold and method is not None:
        raise ValueError(
            f"--method cannot be combined with --fold-batchnorm; '{method}' draws new weights, while folding keeps the "
            "function"
        )
    if fold:
        return ""
    chosen = get(method or "fixup")
    if checkpoint is not None and chosen.norm is None:
        raise ValueError(
            f"method '{chosen.name}' draws new weights, so --checkpoint would be lost; leave it out, or use "
            "--fold-batchnorm, which keeps the function of the model"
        )
    return method or "fixup"


def _convert(model: str, method: str, inputs: Any, checkpoint: Path | None, seed: int) -> _BeforeAndAfter:
    """Build a model by name, and convert it by a method or fold its batch norms."""
    from dataclasses import replace

    import torch

    from normfree.conversion import convert, fold_batchnorm
    from normfree.graph import discover
    from normfree.models.example_inputs import build_by_name
    from normfree.nn.model_state import call_arguments

    before = build_by_name(model, checkpoint=checkpoint, seed=seed)
    names = (f"{model}, before", f"{model}, {method or 'folded'}")
    if method:
        generator = torch.Generator().manual_seed(seed)
        return _BeforeAndAfter(before, *convert(before, method, inputs, generator=generator), names)
    after, changes = fold_batchnorm(before.eval(), inputs)
    if not changes.folded and not changes.kept:
        raise ValueError(
            f"expected a model with batch norms, but {model} has none, so there is nothing to fold; leave out "
            "--fold-batchnorm to convert it by a method"
        )
    args, kwargs = call_arguments(inputs)
    plan = replace(discover(after, *args, **kwargs), changes=changes)
    return _BeforeAndAfter(before, after, plan, names)


def _diagnoses(converted: _BeforeAndAfter, inputs: Any, seed: int, done: Callable[[int], None]) -> list[Diagnosis]:
    """Diagnose the model before and after; a model without residual sums is left out."""
    from dataclasses import replace

    import torch

    from normfree.diagnostics import diagnose

    found: list[Diagnosis] = []
    unchanged = replace(converted.plan, changes=None)  # the original model has no changes
    both = ((converted.before, unchanged), (converted.after, converted.plan))
    for (model, plan), name in zip(both, converted.names, strict=True):
        if plan.branches:
            generator = torch.Generator().manual_seed(seed)
            found.append(diagnose(model, inputs, name=name, plan=plan, generator=generator))
        done(len(found))
    return found
