"""Use a model and leave no trace: gradients, buffers, modes and random state come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, run the model forward and backward at will; on the way out, also after an error, all is as before.

    Gradients are set aside, not copied. Buffers (running statistics) are copied and written back. The global random
    states of the CPU and of the model's GPUs are restored.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    modes = [(m, m.training) for m in model.modules()]
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for b, value in buffers:
                    b.copy_(value)
            for m, training in modes:
                m.training = training
