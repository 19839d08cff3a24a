"""Models that FSDP2 (`fully_shard`) spread over several processes: their parameters are DTensors.

Every function here is a collective: all processes must call it together. torch's distributed tensors take seconds to
import, so they are looked up only if the caller's program has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes."""
    library: Any = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values, gathered from the processes if it is sharded."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def reshard_(modules: Iterable[nn.Module]) -> bool:
    """Free the gathered parameters that a forward pass without a backward pass left behind.

    Returns:
        Whether one of the modules is sharded by FSDP2.
    """
    library: Any = sys.modules.get("torch.distributed.fsdp")
    found = [] if library is None else [module for module in modules if isinstance(module, library.FSDPModule)]
    for module in found:
        module.reshard()
    return bool(found)
