"""The model and the input of `convert`, `diagnose` and `lr`: their options, their checks, and how to get them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_model
from normfree.cli.options import require_either

if TYPE_CHECKING:
    from torch import nn

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model by name, torchvision:NAME, timm:NAME, package.module:factory, or the folder of a run or "
        "converted model.",
        autocompletion=complete_model,
    ),
]

Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the weights, the noise and the gradient.")]

Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FILE", help="Weights to load: a .safetensors file of a state_dict."),
]

Example = Annotated[
    str,
    typer.Option(
        "--example", metavar="MODULE:FUNCTION", help="A function that returns the input: a tensor, tuple or dict."
    ),
]


def require_one_input(context: typer.Context) -> None:
    """Refuse two sources of the input: an example function, a data file, or a shape for noise."""
    require_either(context, "--example", ["--data", "--input", "--batch"], "--example gives the whole input")
    require_either(context, "--data", ["--input", "--batch"], "--data gives the whole input")


def require_model(model: str, verb: str) -> None:
    """Refuse the name of a file in place of a model's, and name the remedy."""
    name = model.removesuffix(".py")
    if name.isidentifier() and Path(f"{name}.py").is_file():
        raise ValueError(
            f"expected a model, got the file {name}.py; name a factory in it: normfree {verb} {name}:FACTORY"
        )
    if Path(model).is_file():
        raise ValueError(
            f"expected a model, got the file '{model}'; give a model name or module:factory, and pass a file of "
            "weights as --checkpoint"
        )


def example_inputs(model: str, example: str, shape: str, batch: int, seed: int) -> Any:
    """Call the function of --example, or draw noise in the shape that the model reads."""
    from normfree.models.builder import is_foreign
    from normfree.models.example_inputs import inputs_from_function, random_inputs

    if not example:
        return random_inputs(model, shape, batch=batch, seed=seed)
    if not is_foreign(model):
        raise ValueError(f"--example is for third-party models; the input of '{model}' is known, so leave it out")
    return inputs_from_function(example, seed=seed)


def model_folder(model: str) -> Path | None:
    """Return the folder of a run or a converted model if the argument names one."""
    path = Path(model)
    if not path.is_dir():
        return None
    from normfree.models import is_model_name
    from normfree.train.run.loading import holds_model

    return path if holds_model(path) or not is_model_name(model) else None


def model_inputs(model: str, folder: Path | None, example: str, shape: str, batch: int, seed: int) -> Any:
    """Call the function of --example, or draw noise for a model by name or in a folder, which knows its shape."""
    from normfree.models.example_inputs import reads_tokens, sequence_length

    name = model if folder is None else name_in_folder(folder)
    if folder is not None and not example and (not shape or reads_tokens(name)):
        from normfree.train.run.loading import noise_for

        return noise_for(folder, batch=batch, length=sequence_length(shape) if shape else None, seed=seed)
    return example_inputs(name, example, shape, batch, seed)


def name_in_folder(folder: Path) -> str:
    """Return the name of the model in a folder; a converted model counts as one of another package."""
    from normfree.conversion.saving import is_converted
    from normfree.train.run.loading import read_config

    return f"converted:{folder.name}" if is_converted(folder) else read_config(folder).model


def build_or_load(
    model: str, method: str, folder: Path | None, inputs: Any, seed: int, *, checkpoint: Path | None = None, trust: bool
) -> nn.Module:
    """Build a model by name, or load that of a folder."""
    if folder is None:
        from normfree.models.example_inputs import build_by_name

        return build_by_name(model, method, inputs=inputs, checkpoint=checkpoint, seed=seed)
    from normfree.train.run.loading import load

    return load(folder, trust=trust)


@contextmanager
def explained_misfit(model: str, name: str) -> Iterator[None]:
    """Turn torch's errors for shapes or labels that do not fit into one sentence."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        raise ValueError(
            f"expected a batch that '{model}' accepts, but {name} failed: {error}; check --input, --example or --data"
        ) from error
