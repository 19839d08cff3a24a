"""Load the weights of a model from a safetensors file, a format that runs no code when read, and limit its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normfree.nn.scalars import with_dimension
from normfree.storage.reading import read_tensors

_MAKES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace}


class SizeLimit(TorchFunctionMode):
    """A context in which a stored name builds a model; one far larger than its stored tensors raises `ValueError`.

    Otherwise a small folder that names a huge model would fill the memory. Nothing is allocated for the tensor that
    exceeds the limit.

    Args:
        tensors: The stored tensors.
        folder: Their folder, for the message.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: str | Path) -> None:
        super().__init__()
        self._folder, self._tensors = folder, 8 * len(tensors) + 2**12
        # A model draws some temporary tensors, and may have buffers that are not stored.
        self._elements = 4 * sum(tensor.numel() for tensor in tensors.values()) + 2**26

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the tensors that a model makes, and their elements."""
        options = kwargs or {}
        if function in _MAKES:
            without = {name: value for name, value in options.items() if name not in ("generator", "out")}
            try:
                elements = function(*args, **without | {"device": "meta"}).numel()
            except RuntimeError:  # more than a number of 64 bits
                elements = self._elements + 1
            self._elements, self._tensors = self._elements - elements, self._tensors - 1
            if self._elements < 0 or self._tensors < 0:
                raise ValueError(
                    f"expected the model of the weights in '{self._folder}', but the folder names a far larger one; "
                    "pass the model or a factory"
                )
        return function(*args, **options)


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Load a safetensors file into a model, by `state_dict` names; a tied tensor needs to be stored once only.

    Raises:
        ValueError: If the file is missing or damaged, or if it is of another model. The model is then unchanged.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"expected a checkpoint at '{path}', found none; check the path, or write one with "
            "safetensors.torch.save_model"
        )
    if path.suffix != ".safetensors":
        raise ValueError(
            f"expected a checkpoint ending in .safetensors, got '{path.name}'; other formats can run code when read: "
            "save your weights with safetensors.torch.save_model"
        )
    tensors = read_tensors(path)
    own = model.state_dict()
    remedy = "name the model and method it was saved from"
    tied = {_identity(own[name]) for name in tensors if name in own}
    missing = [name for name, tensor in own.items() if name not in tensors and _identity(tensor) not in tied]
    extra = [name for name in tensors if name not in own]
    if missing or extra:
        shown = ", ".join([*missing, *extra][:3])
        raise ValueError(
            f"expected the checkpoint '{path}' to fit the model, got {len(missing)} missing and {len(extra)} unknown "
            f"tensors ({shown}); {remedy}"
        )
    tensors = with_dimension(tensors, own)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"expected the checkpoint '{path}' to fit the model, got shape {tuple(tensor.shape)} for '{name}' of "
                f"{tuple(own[name].shape)}; {remedy}"
            )
    model.load_state_dict(tensors, strict=False)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal only for names of the same tensor."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
