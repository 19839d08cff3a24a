"""A converted model in a folder, and from it again.

    weights.safetensors     every tensor of its `state_dict`
    plan.json               where the original comes from, the method, the plan and what was changed
    example.safetensors     the example that it was converted with, two images of it
    load.py                 the lines that load it

A folder holds no code of the model: the original is built again, converted again, and filled with the weights.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from normfree.conversion.changes import Changes
from normfree.conversion.folding.batchnorm import fold_batchnorm
from normfree.conversion.folding.summary import Folding
from normfree.conversion.pipeline import Example, convert_
from normfree.conversion.serialization import pack_example, plan_from_json, unpack_example
from normfree.files import TEMPORARY, explained, sync, write_json
from normfree.models.foreign import create_model
from normfree.models.weight_files import load_weights, render_weights
from normfree.plan import ResidualPlan
from normfree.provenance import commit, versions

WEIGHTS, PLAN, EXAMPLE, LINES, REPORT = (
    "weights.safetensors",
    "plan.json",
    "example.safetensors",
    "load.py",
    "report.html",
)
FOLD = "fold_batchnorm"  # stands in the place of a method
Factory = Callable[[], nn.Module] | nn.Module | str
_FORMAT = 1

_LOAD = '''"""Load the converted model in this folder."""

from pathlib import Path

import normfree as nf


def load(factory={factory}):
    """The model; `factory` gives its original, {kind}, as it was before the conversion."""
    return nf.load(Path(__file__).parent, factory)
'''


def save_converted(
    folder: str | Path, model: nn.Module, plan: ResidualPlan, *, example: Example, source: str | None = None
) -> Path:
    """Write a converted model into a folder of its own, whole or not at all, and return where it lies.

    `plan` and `example` are those of the conversion; a model from `fold_batchnorm` has its record as `plan.changes`.
    `source` names the original as `create` does ('torchvision:resnet50'), so that loading needs no factory. A converted
    model that is there already is replaced.

    Raises `ValueError` when the plan says nothing of a conversion, the folder holds something else, or a tensor cannot
    be written, and `OSError` in one sentence when the folder cannot.
    """
    folder = Path(folder)
    few = example[:2] if isinstance(example, Tensor) and example.dim() == 4 else example  # of images two are enough
    tensors, packed = pack_example(few)
    record = {**describe(plan, source=source), "model": type(model).__name__, "example": packed}
    weights = render_weights(model.state_dict())
    require_free(folder)
    with explained("the converted model", folder, "what was there before is whole"):
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.absolute().parent))
        try:
            new.chmod(0o755)
            (new / WEIGHTS).write_bytes(weights)
            (new / EXAMPLE).write_bytes(render_weights(tensors))
            lines = _LOAD.format(factory=repr(source), kind=f"a {type(model).__name__}")
            (new / LINES).write_text(lines, encoding="utf-8")
            for name in (WEIGHTS, EXAMPLE, LINES):
                sync(new / name)
            write_json(new / PLAN, record)
            _take_place(new, folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    return folder


def load_converted(folder: str | Path, factory: Factory | None = None) -> tuple[nn.Module, ResidualPlan]:
    """The model of a folder in evaluation mode, and its plan: the original, converted again, with the stored weights.

    `factory` is a function that gives the original, a model like it, or its name; without one the name that was stored
    is used.

    Raises `ValueError` when a file is missing or damaged, or the original is not the one that was converted.
    """
    folder = Path(folder)
    record = _read_record(folder)
    plan = plan_from_json(record["plan"])
    tensors = _read_tensors(folder / WEIGHTS)
    example = read_example(folder)
    if factory is None and record["source"] is None:
        raise ValueError(
            f"expected a factory for the model in '{folder}', whose original has no name there; pass a function that "
            f"gives a {record['model']}, as in nf.load('{folder.name}', factory)"
        )
    model = convert_again(original(factory if factory is not None else record["source"]), plan, example, tensors)
    try:
        load_weights(folder / WEIGHTS, model)
    except ValueError as error:
        raise ValueError(_another(record["model"], model, str(error))) from error
    return model.eval(), plan


def original(factory: Factory, classes: int | None = None) -> nn.Module:
    """The model that a factory gives, or `create` by name; its draws come from a generator of its own."""
    if isinstance(factory, nn.Module):
        return copy.deepcopy(factory)
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global generator
        torch.manual_seed(0)
        model = create_model(factory, classes=classes) if isinstance(factory, str) else factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected the factory to give a torch.nn.Module, got {type(model).__name__}")
    return model


def convert_again(
    model: nn.Module, plan: ResidualPlan, example: Example, tensors: dict[str, Tensor] | None = None
) -> nn.Module:
    """The structure that the conversion behind `plan` gave, from an original that is used up; weights do not matter.

    `tensors` are those that will be filled in, for their types and for which layers have a bias.

    Raises `ValueError` for another model than the one that the plan is of.
    """
    modules = dict(model.named_modules())
    strange = [layer.name for layer in plan.layers() if layer.name not in modules]
    if strange:
        raise ValueError(_another("model that was converted", model, f"it has no '{strange[0]}'"))
    held = tensors or {}
    types = {held[name].dtype for name, _ in model.named_parameters() if name in held}
    if len(types) == 1:
        model.to(types.pop())  # the example has the same
    if isinstance(plan.changes, Changes):
        generator = torch.Generator().manual_seed(0)
        convert_(model, plan.changes.method, example, plan=replace(plan, changes=None), generator=generator)
    elif isinstance(plan.changes, Folding):
        model = _fold_again(model, example, held)
    else:
        raise ValueError("expected a plan with the changes of a conversion, got one without; pass what convert gave")
    _match_types_(model, held)
    return model


def describe(plan: ResidualPlan, *, source: str | None = None) -> dict[str, Any]:
    """What plan.json holds.

    Raises `ValueError` when the plan says nothing of a conversion.
    """
    if not isinstance(plan.changes, Changes | Folding):
        raise ValueError("expected a plan with the changes of a conversion, got one without; pass what convert gave")
    method = plan.changes.method if isinstance(plan.changes, Changes) else FOLD
    origin = {"commit": commit(), "versions": versions()}
    return {"format": _FORMAT, "source": source, "method": method, **origin, "plan": plan.to_json()}


def read_plan(folder: str | Path) -> ResidualPlan:
    """The plan in the folder of a converted model, or of a run that trained one.

    Raises `ValueError` when it is missing or damaged.
    """
    return plan_from_json(_read_record(Path(folder))["plan"])


def read_example(folder: str | Path) -> Example:
    """The example that a converted model lies with.

    Raises `ValueError` when it is missing or damaged.
    """
    folder = Path(folder)
    example: Example = unpack_example(_read_tensors(folder / EXAMPLE), _read_record(folder).get("example"))
    return example


def is_converted(folder: str | Path) -> bool:
    """Whether a folder looks like one of a converted model."""
    return (Path(folder) / PLAN).is_file() and not (Path(folder) / "config.toml").exists()


def require_free(folder: str | Path) -> None:
    """Raise `ValueError` when a folder holds anything but a converted model."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"expected a folder for the converted model, got the file '{folder}'; choose another name")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = PLAN in found and found <= {WEIGHTS, PLAN, EXAMPLE, LINES, REPORT}
    if found and not ours:
        other = sorted(found - {WEIGHTS, EXAMPLE, LINES, REPORT})[:1] or sorted(found)[:1]
        raise ValueError(
            f"expected a new folder for the converted model, but '{folder}' holds '{other[0]}'; choose another folder"
        )


def _take_place(new: Path, folder: Path) -> None:
    """Let a folder stand where another one did."""
    old = None
    if folder.exists():
        away = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.absolute().parent))
        old = folder.replace(away / folder.name)
    try:
        new.replace(folder)
    except BaseException:
        if old is not None:
            old.replace(folder)
            old.parent.rmdir()
        raise
    sync(folder.absolute().parent)
    if old is not None:
        shutil.rmtree(old.parent, ignore_errors=True)


@torch.no_grad()
def _fold_again(model: nn.Module, example: Example, tensors: dict[str, Tensor]) -> nn.Module:
    """A model with its batch norms folded and a bias wherever `tensors` have one."""
    twin, _ = fold_batchnorm(_shifted(model), example)
    for name, module in twin.named_modules():
        has = isinstance(getattr(module, "bias", None), nn.Parameter)
        if tensors and has and f"{name}.bias" not in tensors:
            module.bias = None  # its statistics had shifted nothing
    return twin


def _shifted(model: nn.Module) -> nn.Module:
    """A copy whose running means are not 0, so that each batch norm leaves a bias behind."""
    twin = copy.deepcopy(model)
    for name, buffer in twin.named_buffers():
        if name.rpartition(".")[2] == "running_mean":
            buffer.fill_(1.0)
    return twin


def _match_types_(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the tensors of a model the types of those that will be filled in."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].dtype != tensor.dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / PLAN
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        expected = record["format"] == _FORMAT and {"source", "method", "plan"} <= set(record)
    except FileNotFoundError:
        raise ValueError(
            f"expected a converted model in '{folder}', found no {PLAN} there; give the folder that it was saved in"
        ) from None
    except (ValueError, KeyError, TypeError):
        expected = False
    if not expected:
        raise ValueError(f"expected the plan of a converted model, but '{path}' is damaged or of another version")
    return {"model": "model", **record}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"expected a whole converted model, but '{path}' is not there; save it again") from None
    except SafetensorError as error:
        raise ValueError(f"expected a whole converted model, but '{path}' is damaged: {error}") from error


def _another(expected: str, model: nn.Module, why: str) -> str:
    return (
        f"expected the original of the {expected}, got a {type(model).__name__} that differs: {why}; "
        "pass a factory that gives the model as it was before the conversion"
    )
