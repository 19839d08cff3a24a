"""Load the model of a run or of a conversion from its folder, and evaluate it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.arguments import check_arguments
from normfree.conversion.saving import (
    PLAN,
    Factory,
    convert_again,
    is_converted,
    load_converted,
    original,
    read_example,
    read_plan,
)
from normfree.data.text.prepared_folder import VOCABULARY
from normfree.data.text.vocabulary import Vocabulary
from normfree.models import build, find_family
from normfree.models.builder import is_foreign
from normfree.models.third_party import require_trusted
from normfree.models.weight_files import SizeLimit
from normfree.nn.attention import random_words
from normfree.nn.devices import device_of
from normfree.nn.scalars import with_dimension
from normfree.storage.reading import warn_without_checksum
from normfree.train.config import MAY_CHANGE, TrainConfig
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder

_MOST_NUMBERS = 1 << 26  # of an image, so that an example fits into the memory


def read_config(run: str | Path) -> TrainConfig:
    """Read the configuration of a run, with the method in today's spelling if an earlier release trained it.

    Args:
        run: The folder of the run.

    Returns:
        The configuration.

    Raises:
        ValueError: If the folder holds no run.
    """
    folder = RunFolder(run)
    path = folder.config_path
    if not path.exists():
        raise ValueError(f"expected a run in '{run}', found no {path.name} there; give the folder that --out named")
    warn_without_checksum(path)
    return folder.read_config()


def load(
    folder: str | Path,
    factory: Factory | None = None,
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    best: bool = False,
    trust: bool = False,
) -> nn.Module:
    """Load the model of a run or of a conversion from its folder.

        model = nf.load("runs/fashion", device="cuda")

    Args:
        folder: The folder of a run or of a conversion.
        factory: How to build the original of a converted model, as it was before the conversion: a function, a model of
            the same architecture, or a name. Default: the stored name.
        model: A model to fill with the weights of a run. It is needed if the run was trained on a model that was
            passed to `fit` and cannot be made from its name, and for the checkpoints of `save_sharded`.
        device: The torch device of the model.
        best: Whether to load the checkpoint with the best validation accuracy among those that a run keeps, instead of
            the last.
        trust: Whether you trust the folder: a stored name that is not one of normfree, torchvision or timm, such as
            'package.module:factory', is imported and called. Otherwise nothing in a folder runs code.

    Returns:
        The model in evaluation mode. The model of a run is in float32, with the weights of the last checkpoint or their
        moving average; a converted model has its stored types.

    Raises:
        ValueError: If the folder holds neither a run nor a converted model, a file is missing or damaged, the stored
            name needs `trust`, or the model does not fit.
    """
    check_arguments(folder=folder, **{} if model is None else {"model": model})
    place = device_of(device)
    if is_converted(folder):
        if model is not None:
            raise ValueError(
                f"expected a factory for the converted model in '{folder}', got model=; pass a factory "
                "of the original model as the second argument"
            )
        return load_converted(folder, factory, trust=trust)[0].to(place)
    configured = RunFolder(folder).config_path.exists()
    if not configured and (model is None or checkpoint.latest(folder) is None):
        found = f"no config.toml and no {PLAN} there" if Path(folder).is_dir() else "no such folder"
        raise ValueError(
            f"expected a run in '{folder}' or a converted model, found {found}; give the folder that --out named, or "
            "pass model= for sharded checkpoints"
        )
    config = read_config(folder) if configured else TrainConfig()
    tensors, state = checkpoint.load(folder, best=best)
    if configured and "config" in state:  # config.toml may have been edited since
        before = TrainConfig.from_toml_text(state["config"], str(folder))
        config.require_same(before, MAY_CHANGE | {"graph"}, f"the checkpoint in '{folder}'")
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    weights |= {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
    if model is None:
        with SizeLimit(tensors, folder):
            model = _build(Path(folder), config, state, factory, trust)
    _fill_(model, weights, folder)
    return model.to(place).eval()


def holds_model(folder: str | Path) -> bool:
    """Return whether a folder is that of a run or of a conversion."""
    return RunFolder(folder).config_path.exists() or is_converted(folder)


def noise_for(folder: str | Path, *, batch: int = 8, length: int | None = None, seed: int = 0) -> Any:
    """Draw random inputs for the model of a run or of a conversion, without its data.

    They are N(0, 1) numbers in the shape of the images, or sequences of random words. For a converted model with other
    inputs, the example of its conversion is returned.

    Args:
        folder: The folder of a run or of a conversion.
        batch: The number of images or sequences.
        length: The number of words in a sequence; the model's default if None.
        seed: The seed.

    Raises:
        ValueError: If the folder holds neither, or a file is missing or damaged.
    """
    generator = torch.Generator().manual_seed(seed)
    if is_converted(folder):
        example = read_example(folder)
        if not isinstance(example, Tensor) or not example.is_floating_point():
            return example
        return torch.randn(batch, *example.shape[1:], generator=generator).to(example.dtype)
    config, state = read_config(folder), checkpoint.load_state(folder)
    if "vocabulary" not in state:
        return torch.randn(batch, *_image_shape(state, folder), generator=generator)
    family = find_family(config.model)[0]
    return random_words(family.inputs, (batch, length or family.size), generator, state["vocabulary"])


def _build(folder: Path, config: TrainConfig, state: dict[str, Any], factory: Factory | None, trust: bool) -> nn.Module:
    """Build the model of a run; its weights are not initialized."""
    if "vocabulary" in state:
        settings = {name: getattr(config, name) for name in ("dropout", "inner_dropout", "form")}
        words = state["vocabulary"]
        made: nn.Module = build(config.model, config.method, num_classes=words, **settings, device="meta")
        return made.to_empty(device="cpu")
    shape = _image_shape(state, folder)
    if factory is None and not is_foreign(config.model):
        with torch.device("cpu"):
            return build(
                config.model,
                config.method,
                num_classes=len(state["classes"]),
                form=config.form,
                example=torch.zeros(2, *shape),
                device="meta",
            ).to_empty(device="cpu")
    if factory is None:
        require_trusted(config.model, folder, trust)
        factory = config.model
    made = original(factory, len(state["classes"]))
    if not (folder / PLAN).exists():
        return made
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return convert_again(made, read_plan(folder), noise)


def _image_shape(state: Mapping[str, Any], folder: str | Path) -> list[int]:
    """Return the shape of the images that a run was trained on.

    Raises:
        ValueError: If the state has no classes or no shape, or images of that shape would fill the memory.
    """
    shape: list[int] = state.get("input_shape", [])
    plain = bool(shape) and all(isinstance(side, int) and side > 0 for side in shape)
    if "classes" not in state or not plain or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(
            f"expected classes and a shape of images in the checkpoint in '{folder}', got "
            f"{'no classes' if 'classes' not in state else shape}; start the run again"
        )
    return shape


@torch.no_grad()
def _fill_(model: nn.Module, weights: dict[str, Tensor], run: str | Path) -> None:
    """Write all parameters and buffers, including those that are in no `state_dict`."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = with_dimension(weights, own)
    wrong = [n for n in {**own, **weights} if n not in own or n not in weights or own[n].shape != weights[n].shape]
    if wrong:
        raise ValueError(
            f"expected the model of the run in '{run}', got {type(model).__name__}, which differs in '{wrong[0]}' and "
            f"{len(wrong) - 1} more; pass model= with the architecture that was trained"
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def load_vocabulary(run: str | Path) -> Vocabulary:
    """Load the vocabulary of a run on text, as it was when the run began.

    Raises:
        ValueError: If it is missing or damaged.
    """
    path = Path(run) / VOCABULARY
    found = Vocabulary.load(path)
    known = checkpoint.load_state(run).get("vocabulary_sha256")
    if known not in (None, hashlib.sha256(found.model).hexdigest()):
        raise ValueError(f"expected '{path}' as it was written, got one that was altered; copy it from the data again")
    return found
