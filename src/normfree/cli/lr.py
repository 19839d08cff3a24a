"""`normfree lr`: a learning rate that trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_method
from normfree.cli.options import (
    DEVICE,
    AsJson,
    Example,
    Model,
    Plugins,
    Trust,
    build_or_load,
    explained_misfit,
    load_plugins,
    model_folder,
    model_inputs,
    name_in_folder,
    print_json,
    require_either,
    require_model,
    require_output,
)

if TYPE_CHECKING:
    from torch import nn


def find_rate(
    context: typer.Context,
    model: Model,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="The method (default: fixup for normfree's models; another package's model stays as it is). With a "
            "method, another package's model is converted.",
            autocompletion=complete_method,
        ),
    ] = "",
    shape: Annotated[str, typer.Option("--input", metavar="SHAPE", help="Shape of one input, such as 3x64x64.")] = "",
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Number of inputs in a batch.")] = 16,
    count: Annotated[int, typer.Option("--batches", metavar="N", min=1, help="Number of batches.")] = 8,
    example: Example = "",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="A file of real data, not a data set as in train: .safetensors with 'inputs' and 'targets'; it is cut "
            "into batches.",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="NAME", help="sgd, adam or adamw.")] = "sgd",
    momentum: Annotated[float, typer.Option("--momentum", metavar="NUMBER", help="Momentum of sgd.")] = 0.9,
    clip: Annotated[
        float | None,
        typer.Option(
            "--clip",
            metavar="RATIO",
            help="Adaptive gradient clipping at this ratio, as clip=agc with clip_at=RATIO in train; none by default.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw the losses, .png or .svg.")
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the weights, the noise, and the orders of the batches.")
    ] = 0,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Find a learning rate that trains a model: a range test on a few batches, and the bound from the curvature.

    Without --data, the batches are noise with random labels, which shows where training diverges, but not how fast
    your data can be learned.

    For example: normfree lr torchvision:mobilenet_v3_small -m fixup --input 3x64x64 -o rate.png
    """
    from normfree.models.example_inputs import to_device
    from normfree.nn.devices import device_of
    from normfree.optim.rate_search import find_lr
    from normfree.report.terminal import open_console, progress

    load_plugins(plugin)
    if out is not None:
        require_output(out, (".png", ".svg"))
    folder = model_folder(model)
    if folder is None:
        require_model(model, "lr")
    elif method:
        raise ValueError(f"expected the folder '{model}' alone, got --method too; the model in it has its method")
    require_either(context, "--example", ["--data", "--input", "--batch"], "--example gives the whole input")
    require_either(context, "--data", ["--input"], "--data gives the inputs")
    place = device_of(device)
    with progress(f"searching a rate for {model}"):
        batches = _batches(model, folder, data, example, shape, batch, count, seed)
        built = _built(model, method, folder, batches[0][0], seed, trust).to(place)
        with explained_misfit(model, "it"):
            batches = [
                (to_device(x, place), _targets(built, x, y, place, seed + i)) for i, (x, y) in enumerate(batches)
            ]
            found = find_lr(built, batches, optimizer=optimizer, momentum=momentum, clip=clip, seed=seed)
    if as_json:
        print_json(found.to_json())
    else:
        console = open_console()
        console.print(str(found), highlight=False, markup=False)
        if data is None:
            console.print("(the targets were random labels; --data gives real batches)", highlight=False, markup=False)
    if out is not None:
        found.save(out)
        open_console(stderr=True).print(f"wrote {out}")


def _batches(
    model: str, folder: Path | None, data: Path | None, example: str, shape: str, batch: int, count: int, seed: int
) -> list[tuple[Any, Any]]:
    """Read the batches from a file, or draw inputs whose targets are None."""
    if data is not None:
        from normfree.models.example_inputs import read_batch

        inputs, targets = read_batch(data, model if folder is None else name_in_folder(folder))
        if targets is None:
            raise ValueError(f"expected a tensor 'targets' in '{data}', got inputs only; add the labels")
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        pieces = [part.split(batch) for part in (*parts, targets)]
        rows = list(zip(*pieces, strict=True))[:count]
        return [(row[0] if len(row) == 2 else tuple(row[:-1]), row[-1]) for row in rows]
    return [(model_inputs(model, folder, example, shape, batch, seed + i), None) for i in range(count)]


def _built(model: str, method: str, folder: Path | None, inputs: Any, seed: int, trust: bool) -> nn.Module:
    """Build, convert or load the model."""
    import torch

    from normfree.models.builder import is_foreign

    foreign = folder is None and is_foreign(model)
    built = build_or_load(model, "" if foreign else method or "fixup", folder, inputs, seed, trust=trust)
    if foreign and method:
        from normfree.conversion import convert

        built = convert(built, method, inputs, generator=torch.Generator().manual_seed(seed))[0]
    return built


def _targets(model: nn.Module, inputs: Any, targets: Any, place: Any, seed: int) -> Any:
    """Move targets to the device, or draw a label for every position of the model's output."""
    import torch

    from normfree.diagnostics.measurement.inputs_and_outputs import first_tensor
    from normfree.models.example_inputs import to_device
    from normfree.nn.model_state import call_arguments, eval_mode

    if targets is not None:
        return targets.to(place)
    args, kwargs = call_arguments(to_device(inputs, place))
    with torch.no_grad(), eval_mode(model):
        shape = first_tensor(model(*args, **kwargs)).shape
    places, classes = (shape[:2], shape[2]) if len(shape) == 3 else ((shape[0], *shape[2:]), shape[1])
    labels = torch.randint(classes, places, generator=torch.Generator().manual_seed(seed))
    return labels.to(place)
