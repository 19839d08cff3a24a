"""Save a converted model to a folder, and load it again.

    weights.safetensors     every tensor of its `state_dict`
    plan.json               the source of the original, the method, the plan and the changes
    example.safetensors     the example of the conversion; of images, the first two
    load.py                 a script that loads it

A folder holds no code of the model. Loading builds the original, converts it again and fills in the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Changes, Folding, explained_plan_errors, plan_from_json
from normfree.conversion.folding.batchnorm import fold_batchnorm
from normfree.conversion.pipeline import Example, repeat_conversion_
from normfree.methods.method_registry import FIRST_RELEASE, as_of
from normfree.models.third_party import create_model, require_trusted, transformers_model
from normfree.models.weight_files import SizeLimit, load_weights
from normfree.nn.model_state import small_copy
from normfree.plan import ResidualPlan, remember_plan_, remembered_example, remembered_plan
from normfree.storage.provenance import RELEASE, commit, versions
from normfree.storage.reading import Checksum, list_checksums, read_sealed_json, read_tensors, warn_without_checksum
from normfree.storage.writing import atomic_folder, explain_os_errors, render_weights, write_sealed_json

WEIGHTS, PLAN, EXAMPLE, LOAD_SCRIPT, REPORT = (
    "weights.safetensors",
    "plan.json",
    "example.safetensors",
    "load.py",
    "report.html",
)
FOLD = "fold_batchnorm"  # written in place of a method
Factory = Callable[[], nn.Module] | nn.Module | str
_FORMAT = 1
_TRANSFORMERS_WEIGHTS = "model.safetensors"
_NO_CHANGES = "expected a plan with the changes of a conversion, got one without; pass the plan that convert returned"

_LOAD = '''"""Load the converted model in this folder."""

from pathlib import Path

import normfree as nf


def load(factory={factory}):
    """The model; `factory` returns its original, {kind}, as it was before the conversion."""
    return nf.load(Path(__file__).parent, factory)
'''


def save_converted(
    folder: str | Path,
    model: nn.Module,
    plan: ResidualPlan | None = None,
    *,
    example: Example | None = None,
    source: str | None = None,
) -> Path:
    """Save a converted model to a folder of its own, completely or not at all.

    Args:
        folder: The folder to write. A converted model in it is replaced.
        model: The converted model.
        plan: The plan that the conversion returned. Default: the one that the model remembers. For a model from
            `fold_batchnorm`, a plan with that record as `plan.changes`.
        example: The example of the conversion. Default: the one that the model remembers.
        source: The name of the original for `create_model`, such as 'torchvision:resnet50': loading needs no factory.

    Returns:
        The folder.

    Raises:
        ValueError: If the plan has no record of a conversion, the folder holds something else, or a tensor cannot be
            written.
        OSError: If the folder cannot be written.
    """
    folder = Path(folder)
    plan = remembered_plan(model) if plan is None else plan
    example = remembered_example(model) if example is None else small_copy(example)
    if plan is None or example is None:
        raise ValueError(
            f"expected a model that remembers its conversion, got {type(model).__name__}; pass plan= and example="
        )
    tensors, packed = pack_example(example)
    record = {**describe(plan, source=source), "model": type(model).__name__, "example": packed}
    weights = render_weights(model.state_dict())
    require_free(folder)
    with explain_os_errors("the converted model", folder, "an earlier model there is unchanged"):
        script = _LOAD.format(factory=repr(source), kind=f"a {type(model).__name__}")
        contents = {WEIGHTS: weights, EXAMPLE: render_weights(tensors), LOAD_SCRIPT: script.encode()}
        with atomic_folder(folder) as new:
            for name, content in contents.items():
                (new / name).write_bytes(content)
            write_sealed_json(new / PLAN, {**record, "files": list_checksums(contents)})
    return folder


def load_converted(
    folder: str | Path, factory: Factory | None = None, *, trust: bool = False
) -> tuple[nn.Module, ResidualPlan]:
    """Load a converted model from its folder.

    Args:
        folder: The folder that the model was saved to.
        factory: A function that returns the original, a model of the same architecture, or its name. Default: the
            stored name.
        trust: Whether a stored name may be imported that is not of torchvision or timm.

    Returns:
        The model in evaluation mode, and its plan.

    Raises:
        ValueError: If a file is missing or damaged, the stored name needs `trust`, or the original is not the one that
            was converted.
    """
    folder = Path(folder)
    record = read_record(folder)
    warn_without_checksum(folder / PLAN)
    plan = _plan(record)
    weights = folder / weights_name(record)
    tensors, example = _read_tensors(weights, record), _read_example(folder, record)
    limited = factory is None and not trust
    if factory is None and "transformers" in record:
        factory = partial(transformers_model, *record["transformers"])
    if factory is None and record["source"] is None:
        raise ValueError(
            f"expected a factory for the model in '{folder}', because the folder does not name the original; pass "
            f"a function that returns a {record['model']}, as in nf.load('{folder}', factory)"
        )
    if factory is None:
        require_trusted(record["source"], folder, trust)
        factory = record["source"]
    with SizeLimit(tensors, folder) if limited else nullcontext():
        model = original(factory)
    model = convert_again(model, plan, example, tensors)
    try:
        load_weights(weights, model)
    except ValueError as error:
        raise ValueError(_wrong_original(record["model"], model, str(error))) from error
    remember_plan_(model, plan, example)
    return model.eval(), plan


def original(factory: Factory, classes: int | None = None) -> nn.Module:
    """Build the original of a conversion; random draws do not change the global random state."""
    if isinstance(factory, nn.Module):
        return copy.deepcopy(factory)
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global generator
        torch.manual_seed(0)
        model = create_model(factory, classes=classes) if isinstance(factory, str) else factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected the factory to return a torch.nn.Module, got {type(model).__name__}")
    return model


@explained_plan_errors()
def convert_again(
    model: nn.Module, plan: ResidualPlan, example: Example, tensors: dict[str, Tensor] | None = None
) -> nn.Module:
    """Give a model the structure that the recorded conversion gave it; its weights do not matter.

    Args:
        model: The original, which may be changed in place.
        plan: The plan of the conversion.
        example: Its example.
        tensors: The stored tensors, which determine types and which layers have a bias.

    Returns:
        The converted model.

    Raises:
        ValueError: If the plan belongs to a different model, or has no record of a conversion.
    """
    modules = dict(model.named_modules())
    strange = [layer.name for layer in plan.layers() if layer.name not in modules]
    if strange:
        raise ValueError(_wrong_original("model that was converted", model, f"it has no '{strange[0]}'"))
    held = tensors or {}
    types = {held[name].dtype for name, _ in model.named_parameters() if name in held}
    if len(types) == 1:
        model.to(types.pop())  # the example has the same
    if isinstance(plan.changes, Changes):
        repeat_conversion_(model, replace(plan, changes=None), plan.changes, example)
    elif isinstance(plan.changes, Folding):
        model = _fold_again(model, example, held)
    else:
        raise ValueError(_NO_CHANGES)
    _match_types_(model, held)
    return model


def describe(plan: ResidualPlan, *, source: str | None = None) -> dict[str, Any]:
    """The content of plan.json.

    Raises:
        ValueError: If the plan has no record of a conversion.
    """
    if not isinstance(plan.changes, Changes | Folding):
        raise ValueError(_NO_CHANGES)
    method = plan.changes.method if isinstance(plan.changes, Changes) else FOLD
    origin = {"normfree": RELEASE, "source": source, "method": method, "commit": commit(), "versions": versions()}
    return {"format": _FORMAT, **origin, "plan": plan.to_json()}


def read_plan(folder: str | Path) -> ResidualPlan:
    """Read the plan from the folder of a converted model, or of a run that trained one.

    Raises:
        ValueError: If it is missing or damaged.
    """
    record = read_record(folder)
    warn_without_checksum(Path(folder) / PLAN)
    return _plan(record)


def read_example(folder: str | Path) -> Example:
    """Read the example from the folder of a converted model.

    Raises:
        ValueError: If it is missing or damaged.
    """
    return _read_example(Path(folder), read_record(folder))


def _read_example(folder: Path, record: dict[str, Any]) -> Example:
    stored = _read_tensors(folder / EXAMPLE, record)
    return unpack_example(stored, record.get("example"))  # type: ignore[no-any-return]


def is_converted(folder: str | Path) -> bool:
    """Whether a folder holds a converted model, by its files."""
    return (Path(folder) / PLAN).is_file() and not (Path(folder) / "config.toml").exists()


def require_free(folder: str | Path) -> None:
    """Raise `ValueError` if a folder holds anything but a converted model."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"expected a folder for the converted model, got the file '{folder}'; choose another name")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = PLAN in found and found <= {WEIGHTS, PLAN, EXAMPLE, LOAD_SCRIPT, REPORT}
    if found and not ours:
        other = sorted(found - {WEIGHTS, EXAMPLE, LOAD_SCRIPT, REPORT})[:1] or sorted(found)[:1]
        raise ValueError(
            f"expected a new folder for the converted model, but '{folder}' holds '{other[0]}'; choose another folder"
        )


def pack_example(example: Any) -> tuple[dict[str, Tensor], Any]:
    """Split an example into named tensors and plain data that tells where each tensor belongs.

    >>> import torch
    >>> pack_example({"ids": torch.zeros(1), "cached": False})[1]
    {'dict': {'ids': {'tensor': 'ids'}, 'cached': {'value': False}}}

    Raises:
        ValueError: If it holds anything but tensors, plain values, and tuples, lists and dicts of them.
    """
    tensors: dict[str, Tensor] = {}

    def pack(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": {str(key): pack(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()}}
        if isinstance(value, tuple | list):
            packed = [pack(item, f"{name}.{i}".lstrip(".")) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": packed}
        if isinstance(value, str | int | float | bool | None):
            return {"value": value}
        raise ValueError(
            f"expected an example of tensors and plain values, got {type(value).__name__}"
            f"{f' at {name!r}' if name else ''}; leave it out or turn it into tensors"
        )

    packed = pack(example, "")
    if "" in tensors:
        return {"input": tensors[""]}, {"tensor": "input"}
    return tensors, packed


def unpack_example(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """Put together an example that `pack_example` split.

    Raises:
        ValueError: If the tensors and the plain data do not belong together.
    """
    try:
        ((kind, value),) = packed.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "dict":
            return {key: unpack_example(tensors, item) for key, item in value.items()}
        if kind in ("tuple", "list"):
            items = [unpack_example(tensors, item) for item in value]
            return tuple(items) if kind == "tuple" else items
        if kind == "value":
            return value
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected the example that was stored, but it is damaged ({error})") from error
    raise ValueError(f"expected the example that was stored, got '{kind}' in it")


@torch.no_grad()
def _fold_again(model: nn.Module, example: Example, tensors: dict[str, Tensor]) -> nn.Module:
    """Fold the batch norms of a model, and leave a bias only where `tensors` have one."""
    twin, _ = fold_batchnorm(_with_running_means(model).eval(), example)
    twin.train(model.training)
    for name, module in twin.named_modules():
        has = isinstance(getattr(module, "bias", None), nn.Parameter)
        if tensors and has and f"{name}.bias" not in tensors:
            module.bias = None  # the stored statistics caused no shift
    return twin


def _with_running_means(model: nn.Module) -> nn.Module:
    """A copy with running means other than 0, so that folding each batch norm leaves a bias."""
    twin = copy.deepcopy(model)
    for name, buffer in twin.named_buffers():
        if name.rpartition(".")[2] == "running_mean":
            buffer.fill_(1.0)
    return twin


def _match_types_(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the tensors of a model the types of the stored ones."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].dtype != tensor.dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)


def read_record(folder: str | Path) -> dict[str, Any]:
    """Read the content of plan.json, and check it.

    Raises:
        ValueError: If it is missing or damaged.
    """
    path = Path(folder) / PLAN
    try:
        record = read_sealed_json(path, "the plan of a converted model", "save the model again")
    except FileNotFoundError:
        raise ValueError(
            f"expected a converted model in '{folder}', found no {PLAN} there; give the folder that it was saved in"
        ) from None
    kinds = {"format": int, "source": str | None, "method": str, "plan": dict}
    wrong = [key for key, kind in kinds.items() if key not in record or not isinstance(record[key], kind)]
    built = record.get("transformers", ["", {}])  # a class and its configuration
    wrong += [] if isinstance(built, list) and [*map(type, built)] == [str, dict] else ["transformers"]
    if wrong or record["format"] != _FORMAT or not isinstance(record.get("files", {}), dict):
        raise ValueError(f"expected the plan of a converted model, but '{path}' is damaged or of another version")
    return {"model": "model", **record}


def weights_name(record: dict[str, Any]) -> str:
    """Return the name of the weights' file in the folder of a record; transformers has a name of its own."""
    name = record.get("weights", WEIGHTS)
    if name not in (WEIGHTS, _TRANSFORMERS_WEIGHTS):
        raise ValueError(
            f"expected weights in {WEIGHTS} or {_TRANSFORMERS_WEIGHTS}, got {name!r}; save the model again"
        )
    return str(name)


@explained_plan_errors()
def _plan(record: dict[str, Any]) -> ResidualPlan:
    """The plan of a record, with the method in today's spelling if an earlier release wrote it."""
    plan = plan_from_json(record["plan"])
    if not isinstance(plan.changes, Changes):
        return plan
    method = as_of(plan.changes.method, record.get("normfree", FIRST_RELEASE))
    return replace(plan, changes=replace(plan.changes, method=method))


def _read_tensors(path: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """Read tensors, and compare their file with the record's checksum; the record of an earlier release has none."""
    try:
        if path.name in (files := record.get("files", {})):
            Checksum.from_json(files[path.name]).check(path, str(path), "save the model again")
        return read_tensors(path)
    except FileNotFoundError:
        raise ValueError(f"expected a complete converted model, but '{path}' is missing; save it again") from None


def _wrong_original(expected: str, model: nn.Module, why: str) -> str:
    return (
        f"expected the original of the {expected}, got a {type(model).__name__} that differs: {why}; "
        "pass a factory that returns the model as it was before the conversion"
    )
