"""Choose a device by name, and compare sizes with its free memory before it fills."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from normfree.nn.model_state import preserve_model_state

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # the limits of a container
LARGE = 512  # samples of a batch from which on its activations are counted


def device_of(name: str) -> torch.device:
    """Return the device with this name; 'auto' is a CUDA GPU if there is one, else the CPU.

    Each process of a job on several GPUs takes the GPU of its local rank.

    Raises:
        ValueError: If the device does not exist or cannot hold a tensor.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = f": {str(error).splitlines()[0]}" if name.partition(":")[0] in ("cuda", "mps", "xpu") else ""
        raise ValueError(
            f"expected a device such as cpu or cuda, got '{name}'{reason}; auto takes a CUDA GPU if there is one, else "
            "the CPU"
        ) from error
    return device


def require_memory(what: str, needed: int, remedy: str, device: torch.device | None = None) -> None:
    """Raise `ValueError` if something does not fit into the free memory of a device.

    Args:
        what: The thing that needs memory, for the message.
        needed: A lower bound of its bytes.
        remedy: What to do about it.
        device: The device; the CPU if None.

    Raises:
        ValueError: If fewer than `needed` bytes are free.
    """
    free = free_memory(device)
    if free is not None and needed > free:
        raise ValueError(
            f"expected {what} to fit into the memory, got {needed / 2**30:,.1f} GiB or more, where "
            f"{free / 2**30:,.1f} GiB are free; {remedy}"
        )


@contextmanager
def explained_shortage(what: str, remedy: str) -> Iterator[None]:
    """Turn an error of torch for lack of memory into one sentence.

    Args:
        what: The thing that needs memory, for the message.
        remedy: What to do about it.

    Raises:
        ValueError: In place of that error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has a class of its own for a GPU only
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not short and "allocate memory" not in str(error) and "enough memory" not in str(error):
            raise
        raise ValueError(f"expected {what} to fit into the memory, but it ran out; {remedy}") from error


def require_room_for_activations(
    model: nn.Module, few: Sequence[Tensor], count: int, remedy: str, device: torch.device, share: float = 1.0
) -> None:
    """Raise `ValueError` if a forward and backward pass of a large batch does not fit into the memory of a device.

    A forward pass of a few samples shows what is kept for the backward pass. The model stays as it was.

    Args:
        model: The model, on any device.
        few: Its arguments for a few samples.
        count: The samples of the batch. Below `LARGE`, nothing is measured.
        remedy: What to do about it.
        device: The device of the batch.
        share: The share of these activations that is kept.
    """
    if count < LARGE:
        return
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    place = next((parameter.device for parameter in model.parameters()), device)
    with (
        preserve_model_state(model, attributes=True),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        outputs = model(*(x.clone().to(place) for x in few))  # copies: a slice would count as its whole batch
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    each = sum(size for data, size in kept.items() if data not in weights) / len(few[0])
    del outputs  # which held the activations until here
    require_memory(f"the activations of {count:,} samples", int(share * count * each), remedy, device)


def free_memory(device: torch.device | None = None) -> int | None:
    """Return the free bytes of a device, or of the CPU if None; None if they are not known.

    A GPU's include what torch has reserved and does not use. In a container its limit counts; copies of files that the
    system can drop do not.
    """
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = _MEMORY.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # the limit is "max" if there is none, and the root has no such file
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (_GROUP / "memory.stat").read_text().splitlines()
        found.append(limit - used + sum(int(line.split()[1]) for line in lines if line.startswith("file ")))
    return min(found, default=None)
