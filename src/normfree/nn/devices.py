"""Choose a device by name."""

from __future__ import annotations

import os

import torch


def device_of(name: str) -> torch.device:
    """Return the device with this name; 'auto' is a CUDA GPU if there is one, else the CPU.

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
            f"expected a device such as cpu or cuda, got '{name}'{reason}; auto takes a CUDA GPU if there is one, else "
            "the CPU"
        ) from error
    return device
