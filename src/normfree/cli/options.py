"""What several verbs share: options, checks of the arguments, the model and its input, and output."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_data, complete_method, complete_model, complete_recipe
from normfree.errors import require_package

if TYPE_CHECKING:
    from torch import nn

    from normfree.report.terminal import ProgressCallback, Update

# Options

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model by name, torchvision:NAME, timm:NAME, package.module:factory, or the folder of a run or "
        "converted model.",
        autocompletion=complete_model,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the weights, the random input and the random gradient.")
]
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text or a table.")]
DEVICE = typer.Option(
    "--device", metavar="NAME", help="cpu, cuda, …; auto takes a CUDA GPU if there is one, else the CPU."
)
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="See normfree models.", autocompletion=complete_model)
]
RecipeName = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help="A named configuration; see normfree train --list.", autocompletion=complete_recipe
    ),
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="NAME",
        help="A data set by name (see normfree data list), folder:PATH for your images, or pairs:PATH or text:PATH for "
        "prepared text.",
        autocompletion=complete_data,
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option("--method", "-m", metavar="NAME", help="See normfree methods.", autocompletion=complete_method),
]
DataDir = Annotated[str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data sets.")]
Epochs = Annotated[str | None, typer.Option("--epochs", metavar="N", help="Passes over the training data.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings from a TOML file.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE", help="Import a module that registers methods; may be repeated."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import the module that a stored folder or configuration names for its model, and run its code."
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="Where the runs are trained: local (processes of this machine), ray (a Ray cluster) or ray://HOST:PORT.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="Runs at a time, one thread each (default: one per CPU core)."),
]
ChangedSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
]
CpusPerRun = Annotated[
    float | None, typer.Option("--cpus-per-run", metavar="N", help="CPU cores of each run on a cluster (default: 1).")
]
GpusPerRun = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-run",
        metavar="N",
        help="GPUs of each run on a cluster, or a share such as 0.25 (default: 1 if the device is cuda, else 0).",
    ),
]


# Checks, and the meaning of arguments


def require_executor(on: str, jobs: int | None, cpus_per_run: float | None, gpus_per_run: float | None) -> None:
    """Refuse a place that is unknown or cannot be used, and options that do not belong to it, before any work."""
    if on == "local":  # without the import of torch
        for name, value in (("--cpus-per-run", cpus_per_run), ("--gpus-per-run", gpus_per_run)):
            if value is not None:
                raise ValueError(f"{name} needs a cluster; leave it out, or add --on ray")
        return
    from normfree.comparison.ray_connection import require_reachable
    from normfree.comparison.run_executor import choose_executor

    choose_executor(on, shared=Path(), cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run)
    if jobs is not None:
        raise ValueError("--jobs is for this machine, and a cluster runs as many as its resources allow; leave it out")
    require_reachable("" if on == "ray" else on)


def load_plugins(modules: Sequence[str] | None) -> None:
    """Import modules by name, from the current folder or the environment.

    Raises:
        ValueError: if a name is not a module name, or a module or one of its imports is not found or fails.
    """
    if not modules:
        return
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the installed script does not search the current folder
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(
                f"--plugin: expected the name of a module such as 'my_methods', got {module!r}; "
                "leave out folders and the ending .py"
            )
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module == missing or module.startswith(f"{missing}."):
                raise ValueError(
                    f"--plugin: expected a module that can be imported, got {module!r}, which was not found; "
                    "run in its folder or install it"
                ) from error
            raise ValueError(f"--plugin: {module!r} imports {missing!r}, which was not found; install it") from error
        except ValueError:
            raise  # the library's own message about a bad method
        except Exception as error:  # the user's code may raise anything
            from normfree.models.third_party import describe_error

            raise ValueError(
                f"--plugin: expected a module that can be imported, but {module!r} failed: {describe_error(error)}; "
                "import it in Python to see where"
            ) from error


def _typed(context: typer.Context) -> Iterator[tuple[str, list[str]]]:
    """Yield the options that were typed, by their first names, and "" for arguments; each with its values."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[str(parameter.name)]
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            yield parameter.opts[0] if parameter.param_type_name == "option" else "", list(map(str, values))


def given(context: typer.Context) -> list[str]:
    """Return the arguments that were typed, and the options by their first names."""
    return [word for name, values in _typed(context) for word in ([name] if name else values)]


def typed_command(verb: str, context: typer.Context) -> str:
    """Return the command that was typed, in the order of the verb's options, for results that record it."""
    words = ["normfree", verb]
    for name, values in _typed(context):
        words += values if not name else [word for value in values for word in (name, value)] or [name]
    return shlex.join(words)


def require_alone(context: typer.Context, option: str, beside: Sequence[str] = ()) -> None:
    """Refuse arguments and options beside `option` that it would ignore; those in `beside` are allowed."""
    typed = given(context)
    if option in typed and (others := [name for name in typed if name not in (option, *beside)]):
        raise ValueError(f"{option} cannot be combined with {', '.join(others)}; leave one of them out")


def require_either(context: typer.Context, option: str, others: Sequence[str], why: str) -> None:
    """Refuse `option` together with one of `others`; `why` names the one that would be ignored."""
    for name in others:
        if {option, name} <= set(given(context)):
            raise ValueError(f"{option} cannot be combined with {name}; {why}")


def require_output(path: Path, formats: Sequence[str], option: str = "--out") -> None:
    """Refuse a file that could not be written, before anything is measured: its format, folder and packages."""
    suffix = path.suffix.lower()
    if suffix not in formats:
        *first, last = formats
        known = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"expected {option} to end in {known}, got '{path.name}'")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"expected {option} in a folder that exists, got '{path}'; make the folder first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"expected {option} to be a file that can be written, got '{path}'; choose another")
    if suffix in (".png", ".svg"):
        require_package("matplotlib", "a plot")
    if suffix == ".html":
        require_package("jinja2", "a page")


def require_folder(path: Path, option: str) -> None:
    """Refuse a folder that could not be written, before anything is fetched or measured."""
    above = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not above.is_dir():
        raise ValueError(
            f"expected {option} to be a folder, but '{above}' is a file; move it, or choose another folder"
        )
    if not os.access(above, os.W_OK):
        raise ValueError(f"expected {option} to be a folder that can be written, got '{path}'; choose another")


def default_jobs(device: str) -> int:
    """Return one run per CPU core that this process may use; on a GPU one run at a time."""
    import torch

    from normfree.storage.provenance import available_cores

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return 1
    return available_cores()


# The model and its input


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


# Output


def print_json(data: Any) -> None:
    """Print plain data as JSON in ASCII, which any terminal can show; numbers that are not finite become strings."""
    from normfree.storage.writing import to_json_values

    typer.echo(json.dumps(to_json_values(data), indent=1))


def announcing(update: Update, noun: str) -> ProgressCallback:
    """Return a progress callback that begins with a line on how many `noun` there are, and how many are done."""
    from normfree.report import open_console

    told = False

    def show(done: int, total: int, text: str) -> None:
        nonlocal told
        if not told and total > 1:
            before = f", {done} of them done before" if done else ""
            open_console(stderr=True).print(f"{total} {noun}{before}", markup=False)
        told = True
        update(done, total, text)

    return show


def say_stopped(noun: str) -> None:
    """Say that a signal ended the work, and how to continue it."""
    from normfree.report import open_console

    text = f"stopped; the {noun} so far are kept; run the same command to continue"
    open_console(stderr=True).print(text, markup=False, style="yellow")
