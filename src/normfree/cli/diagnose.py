"""`normfree diagnose`: how the signal travels through a model, and what that means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.options import DEVICE, require_either
from normfree.cli.plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normfree.diagnostics.diagnosis import Diagnosis

STATUSES = ("growing", "vanishing", "exploding", "dead branch")

Example = Annotated[
    str, typer.Option("--example", metavar="MODULE:FUNCTION", help="Gives the input: a tensor, tuple or dict.")
]


def diagnose_model(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model by name, torchvision:NAME, timm:NAME or package.module:factory, or the folder of a run or a "
            "converted model.",
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="A method, repeated to compare (default: fixup)."),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            "--input",
            help="Shape of one input, such as 3x224x224, or the length of a sequence. If not given: what a model by "
            "name is for, what a run was trained on, and 3x224x224 for others.",
        ),
    ] = "",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Number of inputs, N(0, 1) noise or random words.")] = 8,
    example: Example = "",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A real batch: .safetensors with 'inputs' (and 'targets'), or .npy inputs."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Weights to load, .safetensors.")] = None,
    out: Annotated[
        list[Path] | None, typer.Option("--out", "-o", help="Write .html, .png, .svg or .json; may be repeated.")
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            help="Exit with 1 at this verdict or worse: growing, vanishing, exploding, dead branch. A single block "
            "that stands out counts as growing, and as vanishing where it does so tenfold.",
        ),
    ] = "",
    evaluate: Annotated[bool, typer.Option("--eval", help="Diagnose in evaluation mode.")] = False,
    device: Annotated[str, DEVICE] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, noise and injected gradient.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plugin: Plugins = None,
) -> None:
    """Show how the signal travels through a model, forward and backward, and say what to do.

    For example: normfree diagnose preact_resnet50 -m he_in -m batchnorm -m convshort -m convshort_brock -o report.html
    """
    import json

    import torch

    from normfree.diagnostics import diagnosis as room
    from normfree.diagnostics.named_models import (
        build_by_name,
        read_batch,
        reads_tokens,
        sequence_length,
        shape_options,
        to_device,
    )
    from normfree.models.foreign import is_foreign
    from normfree.nn.devices import device_of
    from normfree.report.progress import progress
    from normfree.report.tables import print_table
    from normfree.report.terminal import open_console

    load_plugins(plugin)
    if fail_on and fail_on not in STATUSES:
        raise ValueError(f"expected --fail-on to be one of {', '.join(STATUSES)}, got '{fail_on}'")
    for path in out or []:
        if path.suffix.lower() not in (".html", ".png", ".svg", ".json"):
            raise ValueError(f"expected --out to end in .html, .png, .svg or .json, got '{path.name}'")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"expected --out in a folder that exists, got '{path}'; make the folder first")
    folder = folder_of(model)
    if folder is None:
        require_model(model, "diagnose")
    if folder is not None and (method or checkpoint is not None):
        raise ValueError(
            f"expected the folder '{model}' alone, got {'--method' if method else '--checkpoint'} too; the model in it "
            "has its method and weights, so leave that out"
        )
    if checkpoint is not None and (inside := _folder_around(checkpoint)) is not None:
        raise ValueError(
            f"expected the weights of a model alone, got '{checkpoint}' of a folder that says how they are to be read; "
            f"diagnose the folder instead: normfree diagnose {inside}"
        )
    if is_foreign(model) and method:
        raise ValueError(f"--method is for models by name; '{model}' is diagnosed as it is, so leave --method out")
    place = device_of(device)
    require_one_input(context)
    targets: Tensor | None = None
    name = model if folder is None else _name_in(folder)
    if data is not None:
        inputs, targets = read_batch(data, name)
    elif folder is not None and not example and (not shape or reads_tokens(name)):
        from normfree.train.run.loading import noise_for

        inputs = noise_for(folder, batch=batch, length=sequence_length(shape) if shape else None, seed=seed)
    else:
        inputs = example_inputs(name, example, shape, batch, seed)
    found: list[Diagnosis] = []
    for spec in [""] if is_foreign(model) or folder is not None else dict.fromkeys(method or ["fixup"]):
        label = spec or model
        with progress(f"diagnosing {label}"):
            try:
                built = (
                    build_by_name(model, spec, inputs=inputs, checkpoint=checkpoint, seed=seed)
                    if folder is None
                    else _loaded(folder)
                )
                built.train(not evaluate)
                built.to(place)
                generator = torch.Generator().manual_seed(seed)
                moved = to_device(inputs, place), None if targets is None else targets.to(place)
                found.append(room.diagnose(built, *moved, name=label, generator=generator))
            except (RuntimeError, IndexError, TypeError) as error:  # as torch says that shapes or labels do not fit
                raise ValueError(
                    f"expected a batch that '{model}' accepts, but {label} stopped: {error}; check --input, "
                    "--example or --data"
                ) from error
    if as_json:
        typer.echo(json.dumps(room.json_data(found), indent=1))
    else:
        console = open_console()
        print_table(room.table(found), console)
        console.print(room.summary(*found), highlight=False, markup=False)
        if data is None and not example:
            console.print(f"(the input was noise: {shape_options(inputs)})", highlight=False, markup=False)
    for path in out or []:
        room.save(found, path, title=f"Signal propagation in {model}")
        open_console(stderr=True).print(f"wrote {path}")
    if fail_on and any(d.verdict.at_least(fail_on) for d in found):  # type: ignore[arg-type]
        raise typer.Exit(1)


def require_one_input(context: typer.Context) -> None:
    """Refuse noise of a shape beside an input that is whole."""
    require_either(context, "--example", ["--data", "--input", "--batch"], "--example gives the whole input")
    require_either(context, "--data", ["--input", "--batch"], "--data gives the whole input")


def folder_of(model: str) -> Path | None:
    """The folder of a run or a converted model, where an argument names one."""
    path = Path(model)
    if not path.is_dir():
        return None
    from normfree.models import is_model_name
    from normfree.train.run.loading import holds_model

    return path if holds_model(path) or not is_model_name(model) else None


def require_model(model: str, verb: str) -> None:
    """Refuse a file of the user's own where a model in it, or one that has its weights, is meant."""
    name = model.removesuffix(".py")
    if name.isidentifier() and Path(f"{name}.py").is_file():
        raise ValueError(
            f"expected a model, got the file {name}.py; name what makes one in it: normfree {verb} {name}:FACTORY"
        )
    if Path(model).is_file():
        raise ValueError(
            f"expected a model, got the file '{model}'; name what makes the model, and give its weights by --checkpoint"
        )


def _folder_around(weights: Path) -> Path | None:
    """The folder of a run or a converted model that a file is part of: one that merely lies near is none's."""
    from normfree.conversion.saving import is_converted
    from normfree.train.run import checkpoint
    from normfree.train.run.loading import holds_model

    if is_converted(weights.parent):
        return weights.parent
    folder = weights.parent.parent if checkpoint.step_of(weights.parent) >= 0 else weights
    return folder if holds_model(folder) else None


def _name_in(folder: Path) -> str:
    """The name of the model in a folder; of a converted one, that it is somebody else's."""
    from normfree.conversion.saving import is_converted
    from normfree.train.run.loading import read_config

    return f"converted:{folder.name}" if is_converted(folder) else read_config(folder).model


def _loaded(folder: Path) -> nn.Module:
    from normfree.train.run.loading import load

    return load(folder)


def example_inputs(model: str, example: str, shape: str, batch: int, seed: int) -> Any:
    """Noise in the shape of what the model reads, or what a function of the user gives."""
    from normfree.diagnostics.named_models import inputs_from_function, random_inputs
    from normfree.models.foreign import is_foreign

    if not example:
        return random_inputs(model, shape, batch=batch, seed=seed)
    if not is_foreign(model):
        raise ValueError(f"--example is for other people's models; the input of '{model}' is known, so leave it out")
    return inputs_from_function(example, seed=seed)
