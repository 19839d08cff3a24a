"""Example inputs of a model: random, from a file, or from a function of the user; and the models, by name.

The verbs `diagnose`, `convert` and `lr` of the command line use this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normfree.methods import Batch
from normfree.models import build, find_family
from normfree.models.builder import is_foreign
from normfree.models.third_party import call_factory, create_model, import_object
from normfree.models.weight_files import load_weights
from normfree.nn.attention import random_words
from normfree.nn.devices import require_memory
from normfree.storage.reading import read_tensors

FOREIGN_IMAGE = (3, 224, 224)
_FEW = 5  # names of tensors in a message


def build_by_name(
    model: str, method: str = "", *, inputs: Batch | None = None, checkpoint: Path | None = None, seed: int = 0
) -> nn.Module:
    """Build a model of this library or of another package, and load its weights if there is a checkpoint.

    Args:
        model: A name such as 'resnet20', 'torchvision:resnet50' or 'package.module:factory'.
        method: The method of a model of this library. Models of other packages are built as they are.
        inputs: Example inputs, which some methods need to initialize the weights.
        checkpoint: A .safetensors file with the model's weights.
        seed: Seed of the weights. The global random state stays as it is.

    Returns:
        The model, in training mode unless its constructor decides otherwise.

    Raises:
        ValueError: if the model, the method or the weights are not found or do not fit.
    """
    if is_foreign(model):
        with torch.random.fork_rng(devices=[]):  # constructors of other packages draw from the global generator
            torch.manual_seed(seed)
            built: nn.Module = create_model(model)
    else:
        built = build(model, method, example=inputs, generator=torch.Generator().manual_seed(seed))
    if checkpoint is not None:
        load_weights(checkpoint, built)
    return built


def random_inputs(model: str, shape: str = "", *, batch: int = 8, seed: int = 0) -> Batch:
    """Draw inputs for a model: N(0, 1) numbers, or random tokens of the default vocabulary for a sequence model.

    Args:
        model: The model's name, as for `build_by_name`.
        shape: The shape of one input, such as '3x32x32', or the length of a sequence. By default it is the one that a
            model of this library is made for, and 3x224x224 for models of other packages.
        batch: The number of inputs.
        seed: Seed of the numbers or tokens.

    Raises:
        ValueError: if the shape cannot be read, or the inputs do not fit into the memory.
    """
    generator = torch.Generator().manual_seed(seed)
    if reads_tokens(model):
        family = find_family(model)[0]
        length = sequence_length(shape) if shape else family.size
        _require_room(batch, (length,), 8 * family.inputs)
        return random_words(family.inputs, (batch, length), generator)
    if shape:
        sizes = _sizes(shape)
    elif is_foreign(model):
        sizes = FOREIGN_IMAGE
    else:
        family = find_family(model)[0]
        sizes = (3, family.size, family.size)
    _require_room(batch, sizes, 4)
    return torch.randn(batch, *sizes, generator=generator)


def _require_room(batch: int, sizes: tuple[int, ...], each: int) -> None:
    """Raise `ValueError` if a batch of inputs with `each` bytes per element does not fit into the memory."""
    shape = "x".join(map(str, sizes))
    require_memory(f"{batch:,} inputs of {shape}", batch * math.prod(sizes) * each, "pass a smaller --batch or --input")


def inputs_from_function(name: str, *, seed: int = 0) -> Any:
    """Call the function 'package.module:name' without arguments and return its inputs; a plain object is returned.

    Raises:
        ValueError: if there is no such function, or if it fails.
    """
    found = import_object(name, "example")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return call_factory(found, name) if callable(found) else found


def read_batch(path: Path, model: str = "") -> tuple[Batch, Tensor | None]:
    """Read inputs, and targets if there are any, from a .safetensors or .npy file.

    A .safetensors file holds 'inputs', 'decoder_inputs' if the model reads two sequences, and optionally 'targets'.
    The model's name decides between tokens and numbers. For models of other packages, integers are tokens and bytes
    are pixels.

    Raises:
        ValueError: if the file is missing, damaged, of another format, or lacks a tensor.
    """
    family = None if not model or is_foreign(model) else find_family(model)[0]
    tensors = _read_tensors(path)
    wanted = ["inputs", "decoder_inputs"] if family is not None and family.inputs == 2 else ["inputs"]
    for name in wanted:
        if name not in tensors:
            few = ", ".join([*list(tensors)[:_FEW], *["…"] * (len(tensors) > _FEW)]) or "nothing"
            raise ValueError(
                f"expected a batch with a tensor '{name}' in '{path}', got {len(tensors)} tensors: {few}; write one "
                "with 'inputs' and 'targets', and pass weights as --checkpoint"
            )
    found = [tensors[name] for name in wanted]
    if family is not None:
        found = [t.long() if family.reads_tokens else t.float() for t in found]
    return found[0] if len(found) == 1 else tuple(found), tensors.get("targets")


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move all tensors in a structure of tuples, lists and mappings to a device."""
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs  # torch looks into no `UserDict`
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


def reads_tokens(model: str) -> bool:
    """Whether a name is that of a sequence model of this library."""
    return not is_foreign(model) and find_family(model)[0].reads_tokens


def sequence_length(shape: str) -> int:
    """Read the length of a sequence.

    Raises:
        ValueError: if it is not a positive whole number.
    """
    if not (shape.isdigit() and int(shape) > 0):
        raise ValueError(f"expected --input to be the length of a sequence, such as 32, got '{shape}'")
    return int(shape)


def shape_options(inputs: Any) -> str:
    """Describe the shape of inputs by the options of the command line that would give it.

    >>> shape_options(torch.zeros(8, 3, 32, 32))
    '--batch 8 --input 3x32x32'
    """
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return f"--batch {first.shape[0]} --input {'x'.join(map(str, first.shape[1:]))}"


def _sizes(shape: str) -> tuple[int, ...]:
    parts = shape.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"expected --input such as 3x224x224, got '{shape}'; write whole numbers from 1 on with x between them"
        )
    return tuple(int(part) for part in parts)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"expected a batch at '{path}', found none")
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
            tokens = array.dtype.kind in "iu" and array.dtype != np.uint8
            return {"inputs": torch.from_numpy(array.astype(np.int64 if tokens else np.float32))}
        except (ValueError, TypeError, EOFError) as error:
            raise ValueError(f"expected numbers in '{path}': {error}") from error
    if path.suffix != ".safetensors":
        raise ValueError(f"expected --data to end in .safetensors or .npy, got '{path.name}'")
    return read_tensors(path)
