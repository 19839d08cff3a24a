"""What is trained: the model that a configuration names or was given, and what training asks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion import Changes, convert_
from normfree.data import ImageSet
from normfree.data.images.image_folder import ImageFolder
from normfree.data.images.image_set import Split
from normfree.data.text.prepared_folder import Prepared
from normfree.methods import get
from normfree.models import BaseModel, build
from normfree.models.foreign import create_model, is_foreign
from normfree.nn.model_state import evaluating
from normfree.optim import agc_parameters, param_groups
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.inputs import Data, example_of
from normfree.train.text.token_runs import PAIRS, TEXT, token_batches, token_model, translates, vouched

AS_BUILT = "as built"  # the method of a model that no method of ours made


def model_of(config: TrainConfig, data: Data) -> tuple[nn.Module, ResidualPlan | None]:
    """The model that a configuration names, initialized from its seed, and its plan where it was converted.

    A model of others is converted by the method, or left as it is where the method is 'as built'.
    """
    generator = torch.Generator().manual_seed(config.seed)
    if isinstance(data, Prepared):
        return token_model(config, data, generator), None
    if not is_foreign(config.model):
        network = build(
            config.model,
            config.method,
            num_classes=class_count(data),
            form=config.form,
            example=example_of(config, data),
            generator=generator,
        )
        return network, None
    model = create_model(config.model, classes=class_count(data))
    if config.method == AS_BUILT:
        return model, None
    few = example_of(config, data, 64 if get(config.method).needs_example else 16)
    require_scores(model, few[:2], class_count(data))
    try:
        return model, convert_(model, config.method, few, generator=generator)
    except ValueError as error:
        raise ValueError(f"{error}; or train it without a method, with method='{AS_BUILT}'") from error


def built_from(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What a checkpoint keeps, so that the model of a run can be built again, and other data is noticed."""
    if isinstance(data, Prepared):
        return vouched(data)
    parts = (data.train, data.test) if isinstance(data, ImageSet) else data
    return {
        "classes": list(classes_of(data)),
        "input_shape": list(example_of(config, data, 1).shape[1:]),
        "images": [len(part) for part in parts],
        "images_sha256": _digest(parts),
    }


def _digest(parts: Iterable[Split | ImageFolder]) -> str:
    """What images are told by: their bytes and labels, or those of a folder by the names and sizes of their files."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Split):
            digest.update(part.images.cpu().contiguous().numpy().data)
        else:
            listed = ((file.parent.name, file.name, file.stat().st_size) for file in part.files)
            digest.update("".join(f"{name}/{file} {size}\n" for name, file, size in listed).encode())
        digest.update(part.labels.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def require_images(own: Mapping[str, Any], state: Mapping[str, Any], run: str | Path) -> None:
    """Raise `ValueError` for other images than those of a run; what one of the two does not say may differ."""
    for key, what in (
        ("classes", "classes"),
        ("input_shape", "shape of images"),
        ("images", "number of training and test images"),
        ("images_sha256", "images"),
    ):
        if key in own and state.get(key, own[key]) != own[key]:
            raise ValueError(
                f"expected the {what} that the run in '{run}' began with, got another; give it the same data, or start "
                "another run"
            )


def class_count(data: Data) -> int:
    """The number of classes of the data; of text, that of its tokens."""
    if isinstance(data, Prepared):
        return data.vocabulary_size
    return len(classes_of(data))


def classes_of(data: ImageSet | tuple[ImageFolder, ImageFolder]) -> tuple[str, ...]:
    """The names of the classes of images."""
    return data.classes if isinstance(data, ImageSet) else data[0].classes


def as_given(
    config: TrainConfig, model: nn.Module | None, data: ImageSet | Prepared | None, plan: ResidualPlan | None = None
) -> TrainConfig:
    """The configuration with the names of the model and the data that were given in the place of those in it.

    The method of a given model is the one that its plan says it was converted by, else the one that comes with a plan.
    """
    given: dict[str, Any] = {}
    if isinstance(model, BaseModel):
        given = {"model": model.name, "method": model.method.spec, "form": model.form}
    elif model is not None:
        given = {"model": f"{type(model).__module__}:{type(model).__qualname__}", "method": AS_BUILT}
        if plan is not None and isinstance(plan.changes, Changes):
            given["method"] = plan.changes.method
        elif plan is not None and plan.changes is None:
            given["method"] = config.method
    if data is not None:
        kind = PAIRS if isinstance(data, Prepared) and translates(data) else TEXT
        given["data"] = data.name if isinstance(data, ImageSet) else f"{kind}{data.folder}"
    return config.with_changes(**given)


@torch.no_grad()
def require_scores(model: nn.Module, images: Tensor, classes: int) -> None:
    """Refuse a model that does not give every image a score for each class, before anything is trained."""
    expected = f"expected a model that gives images of {tuple(images.shape[1:])} a score for each of {classes} classes"
    weight = next(model.parameters(), None)
    try:
        with evaluating(model):
            scores = model(images if weight is None else images.to(weight.device))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"{expected}, but {type(model).__name__} stopped: {str(error).splitlines()[0]}; adapt one to the other"
        ) from error
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < classes:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{expected}, got {got} from {len(images)} images; adapt {type(model).__name__}")


def require_precision(
    model: nn.Module, config: TrainConfig, data: Data, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse a model of others that cannot compute in the precision that it was given, before anything is trained."""
    if isinstance(model, BaseModel) or config.precision == "float32":
        return
    if isinstance(data, Prepared):
        *inputs, _, _ = next(token_batches(config, data, "train", device=device).once())
    else:
        inputs = [example_of(config, data, 2).to(device, dtype)]
    try:
        with evaluating(model):
            model(*(side[:2] for side in inputs))
    except RuntimeError as error:
        raise ValueError(
            f"expected a model that computes in precision '{config.precision}', but {type(model).__name__} stopped: "
            f"{str(error).splitlines()[0]}; use precision=float32"
        ) from error


def require_effect(config: TrainConfig, data: Data, *, given: bool) -> None:
    """Refuse settings that would change nothing of the run but its name; a `given` model stands for the one named."""
    if isinstance(data, Prepared):
        names, where = ["crop", "flip", "cutout", "mixup", "randaugment"], "text"
    else:
        names, where = ["dropout", "block", "beam", "length_penalty"], "images"
    if is_foreign(config.model) and not given:
        names, where = [*names, "form"], f"{where} and a model of others"
    for name in names:
        value, default = getattr(config, name), getattr(TrainConfig, name)
        if value != default:
            raise ValueError(
                f"expected {name}={default} for {where}, where it changes nothing, got {value}; leave it out"
            )


def branch_count(model: nn.Module) -> int:
    """The number of residual branches that a model states."""
    return len(model.plan.branches) if isinstance(model, BaseModel) else 0


def groups_of(model: nn.Module, config: TrainConfig, plan: ResidualPlan | None = None) -> list[dict[str, Any]]:
    """The groups that the model's method asks for; of a model without a method, one of all its parameters."""
    if isinstance(model, BaseModel):
        return param_groups(model, lr=config.lr, weight_decay=config.weight_decay)
    if plan is not None and config.method != AS_BUILT:
        rates = {"lr": config.lr, "weight_decay": config.weight_decay}
        return param_groups(model, method=config.method, plan=plan, **rates)
    everything = list(model.parameters())
    return [{"name": "weights", "params": everything, "lr": config.lr, "weight_decay": config.weight_decay}]


def classifier_of(model: nn.Module, plan: ResidualPlan | None = None) -> tuple[str, ...]:
    """The names of the parameters that adaptive clipping leaves alone. Raises `ValueError` without a classifier."""
    last = None if plan is None or not plan.classifier else [layer.name for layer in plan.classifier]
    try:
        clipped = {id(parameter) for parameter in agc_parameters(model, exclude=last)}
    except ValueError as error:
        raise ValueError(
            f"expected a model with a Linear classifier, which clip=agc leaves alone, got {type(model).__name__}; use "
            "clip=norm, or none"
        ) from error
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in clipped)
