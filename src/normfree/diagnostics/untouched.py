"""Use a model and leave no trace: gradients, buffers, modes and random state come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from normfree.diagnostics.batched import copies
from normfree.diagnostics.parts import Parts, parts
from normfree.nn.model_state import same_draws


@contextmanager
def untouched(model: nn.Module, known: Parts | None = None) -> Iterator[None]:
    """Inside, run the model forward and backward at will; on the way out, also after an error, all is as before.

    Gradients are set aside, not copied. The model runs on copies of its buffers (running statistics), since a graph of
    the caller may still read the buffers themselves. The global random states are restored. What is to happen when a
    gradient has arrived (an optimizer that steps in the backward pass) does not happen inside. `known` are the model's
    parts where the caller has them at hand.
    """
    known = known or parts(model)
    parameters = known.parameters.values()
    gradients = [(p, p.grad) for p in parameters]
    held = [(m, dict(m._buffers)) for m in known.modules.values() if m._buffers]
    copied = copies({id(b): b for _, buffers in held for b in buffers.values() if b is not None})
    arrivals = [(h, dict(h)) for p in parameters if (h := p._post_accumulate_grad_hooks)]
    modes = [(m, m.training) for m in known.modules.values()]
    with same_draws(parameters):
        try:
            for p, gradient in gradients:
                if gradient is not None:
                    p.grad = None
            for hooks, _ in arrivals:
                hooks.clear()
            for m, buffers in held:
                m._buffers.update({name: copied[id(b)] for name, b in buffers.items() if b is not None})
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for hooks, before in arrivals:
                hooks.update(before)
            for m, buffers in held:
                m._buffers.clear()
                m._buffers.update(buffers)
            for m, training in modes:
                if m.training is not training:  # setting an attribute of a module is slow
                    m.training = training
