"""`normfree diagnose`: how the signal travels through a model, and whether that is healthy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_method
from normfree.cli.options import (
    DEVICE,
    AsJson,
    Checkpoint,
    Example,
    Model,
    Plugins,
    Seed,
    Trust,
    build_or_load,
    explained_misfit,
    load_plugins,
    model_folder,
    model_inputs,
    name_in_folder,
    print_json,
    require_model,
    require_one_input,
    require_output,
)

if TYPE_CHECKING:
    from torch import Tensor

    from normfree.diagnostics.diagnosis import Diagnosis

STATUSES = ("growing", "drifting", "vanishing", "exploding", "faulty", "dead branch")
FORMATS = (".html", ".png", ".svg", ".json")


def diagnose_model(
    context: typer.Context,
    model: Model,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="A method, for normfree's own models only; repeat it to compare methods. Default: fixup, or he_in "
            "for a model without residual sums.",
            autocompletion=complete_method,
        ),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of one input, such as 3x224x224, or the length of a sequence. Default: the shape that a model "
            "by name is made for or a run was trained on, and 3x224x224 for other models.",
        ),
    ] = "",
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="Number of inputs: N(0, 1) noise or random tokens.")
    ] = 8,
    example: Example = "",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="A file with a real batch, not a data set as in train: .safetensors with 'inputs' (and 'targets'), or "
            ".npy inputs.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write .html, .png, .svg or .json; may be repeated."),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            metavar="WORD",
            help="Exit with 1 at this verdict or worse: growing, drifting, vanishing, exploding, faulty, dead branch. "
            "A block unlike the others counts as growing, or as exploding or vanishing if it differs tenfold. "
            "If the input is not finite, the exit status is always 1.",
        ),
    ] = "",
    widths: Annotated[
        str,
        typer.Option(
            "--widths",
            metavar="N,N,…",
            help="A coordinate check instead: train the model for 4 steps at these widths, such as 64,128,256, and "
            "compare how far its activations move. MODEL has {} in place of the width: resmlp-8-{}.",
        ),
    ] = "",
    evaluate: Annotated[bool, typer.Option("--eval", help="Diagnose in evaluation mode.")] = False,
    device: Annotated[str, DEVICE] = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Measure how the signal travels through a model, forward and backward, and suggest a remedy.

    For example: normfree diagnose preact_resnet50 -m he_in -m batchnorm -m convshort -m convshort_brock -o report.html
    """
    from normfree.models.builder import check_method, is_foreign
    from normfree.nn.devices import device_of

    load_plugins(plugin)
    _require_outputs(fail_on, out or [], (".png", ".svg", ".json") if widths else FORMATS)
    if widths or "{}" in model:
        _check_widths(model, widths, method or [], shape, batch, seed, out or [], as_json)
        return
    folder = model_folder(model)
    _require_weights(model, folder, method, checkpoint)
    require_one_input(context)
    inputs, targets = _inputs(model, folder, data, example, shape, batch, seed)
    place = device_of(device)
    if is_foreign(model) and method:
        raise ValueError(f"--method needs a model of normfree; '{model}' is diagnosed as it is, so leave --method out")
    single = is_foreign(model) or folder is not None  # such a model has its method already
    specs = [""] if single else list(dict.fromkeys(method or [_default_method(model)]))
    for spec in filter(None, specs):  # all of them before the first is measured
        check_method(model, spec)
    found = [
        _diagnose(
            model,
            spec,
            folder,
            inputs,
            targets,
            checkpoint=checkpoint,
            seed=seed,
            train=not evaluate,
            to=place,
            trust=trust,
        )
        for spec in specs
    ]
    _show(found, model, out or [], as_json, noise=None if data is not None or example else inputs)
    failed = fail_on and any(d.verdict.at_least(fail_on) for d in found)  # type: ignore[arg-type]
    if failed or not all(d.signal.inputs.finite for d in found):
        raise typer.Exit(1)


def _default_method(model: str) -> str:
    """Return the method of a model of normfree that is named without one: Fixup, or plain He without residual sums."""
    from normfree.models import is_model_name
    from normfree.models.builder import supports

    return "he_in" if is_model_name(model) and not supports(model, "fixup") else "fixup"


def _check_widths(
    model: str, widths: str, methods: list[str], shape: str, batch: int, seed: int, out: Sequence[Path], as_json: bool
) -> None:
    """Compare how far activations move in a few steps at several widths, and print, draw or write it."""
    numbers = [int(text) for text in widths.split(",") if text.strip().isdecimal() and int(text) > 0]
    if "{}" not in model or len(set(numbers)) < 2 or len(numbers) != len(widths.split(",")) or len(methods) > 1:
        raise ValueError(
            "expected a model with {} in place of its width, two or more --widths and one --method, as in: normfree "
            f"diagnose 'resmlp-8-{{}}' --widths 32,64,128 -m he_in; got '{model}' and '{widths}'"
        )
    import json

    from normfree.diagnostics.width_check import coordinate_check
    from normfree.models.example_inputs import build_by_name, random_inputs
    from normfree.report.tables import print_table
    from normfree.report.terminal import open_console, progress
    from normfree.storage.writing import to_json_values

    names = {width: model.replace("{}", str(width)) for width in numbers}
    method = methods[0] if methods else _default_method(names[numbers[0]])
    inputs = random_inputs(names[numbers[0]], shape, batch=batch, seed=seed)
    with progress(f"training {model} at {len(names)} widths"):
        found = coordinate_check(
            lambda width: build_by_name(names[width], method, inputs=inputs, seed=seed), numbers, inputs
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_table(found.table(), open_console())
    for path in out:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(to_json_values(found.to_json()), indent=1), encoding="utf-8")
        else:
            found.save(path)
        open_console(stderr=True).print(f"wrote {path}")


def _require_outputs(fail_on: str, out: Sequence[Path], formats: Sequence[str] = FORMATS) -> None:
    """Refuse an unknown verdict, and files that could not be written, before anything is measured."""
    if fail_on and fail_on not in STATUSES:
        raise ValueError(f"expected --fail-on to be one of {', '.join(STATUSES)}, got '{fail_on}'")
    for path in out:
        require_output(path, formats)


def _require_weights(model: str, folder: Path | None, method: list[str] | None, checkpoint: Path | None) -> None:
    """Refuse a method or a checkpoint that the model does not take."""
    if folder is None:
        require_model(model, "diagnose")
    elif method or checkpoint is not None:
        raise ValueError(
            f"expected the folder '{model}' alone, got {'--method' if method else '--checkpoint'} too; the model in it "
            "has its method and weights, so leave that out"
        )
    if checkpoint is not None and (inside := _folder_around(checkpoint)) is not None:
        raise ValueError(
            f"the file '{checkpoint}' belongs to the run or converted model in '{inside}'; "
            f"diagnose the folder instead: normfree diagnose {inside}"
        )


def _inputs(
    model: str, folder: Path | None, data: Path | None, example: str, shape: str, batch: int, seed: int
) -> tuple[Any, Tensor | None]:
    """Read or draw the inputs, and the targets if a file has them."""
    if data is not None:
        from normfree.models.example_inputs import read_batch

        return read_batch(data, model if folder is None else name_in_folder(folder))
    return model_inputs(model, folder, example, shape, batch, seed), None


def _diagnose(
    model: str,
    method: str,
    folder: Path | None,
    inputs: Any,
    targets: Tensor | None,
    *,
    checkpoint: Path | None,
    seed: int,
    train: bool,
    to: Any,
    trust: bool,
) -> Diagnosis:
    """Build or load one model, and diagnose it on a device."""
    import torch

    from normfree.diagnostics import diagnose
    from normfree.models.example_inputs import to_device
    from normfree.nn.devices import require_room_for_activations
    from normfree.report.terminal import notice, progress

    label = method or model
    slow = f"diagnosing {label}: building and measuring {model} takes a while"
    with progress(f"diagnosing {label}"), notice(slow), explained_misfit(model, label):
        built = build_or_load(model, method, folder, inputs, seed, checkpoint=checkpoint, trust=trust)
        built.train(train).to(to)
        if isinstance(inputs, torch.Tensor):
            require_room_for_activations(built, [inputs[:2]], len(inputs), "pass a smaller --batch", to)
        moved = to_device(inputs, to), None if targets is None else targets.to(to)
        return diagnose(built, *moved, name=label, generator=torch.Generator().manual_seed(seed))


def _show(found: list[Diagnosis], model: str, out: Sequence[Path], as_json: bool, noise: Any) -> None:
    """Print the diagnoses, and write them to the files; `noise` is the input if it was drawn."""
    from normfree.diagnostics import diagnosis
    from normfree.models.example_inputs import shape_options
    from normfree.report.tables import print_table
    from normfree.report.terminal import open_console

    if as_json:
        print_json([one.to_json() for one in found])
    else:
        console = open_console()
        print_table(diagnosis.table(found), console)
        console.print(diagnosis.summary(*found), highlight=False, markup=False)
        if noise is not None:
            console.print(f"(the input was noise: {shape_options(noise)})", highlight=False, markup=False)
    for path in out:
        diagnosis.save(found, path, title=f"Signal propagation in {model}")
        open_console(stderr=True).print(f"wrote {path}")


def _folder_around(weights: Path) -> Path | None:
    """Return the folder of the run or converted model that a weights file is part of, if any.

    A file that only lies near a run does not belong to it.
    """
    from normfree.conversion.saving import is_converted
    from normfree.train.run import checkpoint
    from normfree.train.run.loading import holds_model

    if is_converted(weights.parent):
        return weights.parent
    folder = weights.parent.parent if checkpoint.step_of(weights.parent) >= 0 else weights
    return folder if holds_model(folder) else None
