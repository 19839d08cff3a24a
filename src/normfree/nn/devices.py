"""Choose a device by name, and compare sizes with its free memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # the limits of a container


def device_of(name: str) -> torch.device:
    """Return the device with this name; 'auto' is a GPU if there is one, else the CPU.

    Each process of a job on several GPUs takes the GPU of its local rank.

    Raises:
        ValueError: if the device does not exist or cannot hold a tensor.
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
            f"expected a device such as cpu or cuda, got '{name}'{reason}; auto takes the best there is"
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
