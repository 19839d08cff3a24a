"""`fold_`: a norm-free network for inference, its scalars and reparametrizations gone into plain weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.folding.layer_arrays import Numbers, obstacle
from normfree.conversion.folding.marked_flow import Marked
from normfree.conversion.folding.steps import Step, absorb_, rest, steps_of
from normfree.conversion.folding.summary import Fold, Folding, Kept
from normfree.conversion.folding.units import solve_factors_, solve_shifts_
from normfree.nn.residual import Residual
from normfree.nn.scalar_wrapping import Scaled
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import weight_kind


def fold_(model: nn.Module, example: Any = None) -> Folding:
    """Fold the scalars and reparametrizations of a norm-free model into its weights, in place, for inference.

    The model computes the same function afterwards, with plain layers:

        W * x · s + b        a factor or bias after a layer goes into its weight and bias
        W * (s · x + b)      before it: W ← s · W and bias ← bias + b · ΣW; what was zero padding is padding with -b/s
        relu(s · x)          is s · relu(x) for s > 0, so a factor passes on to the next layer
        c · (a · x + β · f)  the residual stream is measured in other units from there on, which the layers that read
                             and write it undo; the same with a bias before an activation that reads the stream

    Weight norm, standardization and spectral norm become their effective weight. A factor that is not positive and has
    no layer in front, or that would take the stream's units beyond a range of 2^20, stays as a fixed multiplier: the
    record says which and why. Which layers get a bias or a pad depends on the values, so a folded model is saved whole
    (`torch.export`, ONNX), or its weights are saved before. A model of ours knows its input's shape; any other needs
    `example`, of which only the shape matters.

    >>> from normfree.models import build
    >>> model = build("resnet20", "fixup").eval()
    >>> print(fold_(model))
    47 of 47 folded

    Raises `ValueError`, with nothing changed, for a model in training mode and for one that does not run on the
    example.
    """
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(
            f"expected a model in evaluation mode, got '{training or type(model).__name__}' in training mode; folded "
            "weights no longer train as the method says, so call model.eval() first"
        )
    marked = Marked(model)
    steps = steps_of(marked.flow(_example(model) if example is None else example))
    left = absorb_(steps)
    solve_factors_(left)
    solve_shifts_(left)
    record = _write_(marked, steps)
    for module in model.modules():
        if isinstance(module, Residual) and module.beta_in_weight:
            module.beta, module.beta_in_weight = nn.Identity(), False
        elif isinstance(module, ScalarBias) and module.absorbed:
            module.set_(0.0)
            module.absorbed = False
    return record


def _example(model: nn.Module) -> Tensor:
    """A batch of the shape that a model of ours is built for."""
    shape = getattr(model, "input_shape", None)
    if shape is None:
        raise ValueError(f"expected an example, since {type(model).__name__} does not say what it reads; pass a batch")
    dtype = next(model.parameters()).dtype
    return torch.empty((2, *shape), device="meta", dtype=dtype)


def _write_(marked: Marked, steps: list[Step]) -> Folding:
    """Put what the steps have become into the model."""
    default = next((p for p in marked.parameters() if p.is_floating_point()), torch.zeros(()))
    sites: dict[nn.Module, list[Step]] = {}
    for step in steps:
        if step.module is not None:
            sites.setdefault(step.module, []).append(step)
    written = [_Site(module, held, default) for module, held in sites.items()]
    done = {site.module for site in written if site.affine}
    left = [
        Kept(name, type(module).__name__, "it is used more than once or never, or stands around no weight layer")
        for name, module in marked.model.named_modules()
        if isinstance(module, ScalarBias | ScalarMultiplier | Scaled) and module not in done
    ]
    marked.replace_({site.module: _together(site.parts) for site in written if site.replaced})
    return Folding(
        folded=tuple(fold for site in written for fold in site.folded),
        kept=(*(kept for site in written for kept in site.kept), *left),
        padded=tuple(site.name for site in written if site.padded),
        plain=tuple(site.name for site in written if site.replaced and weight_kind(site.module) != "plain"),
    )


class _Site:
    """One module of the model and the parts that take its place, if any."""

    def __init__(self, module: nn.Module, held: list[Step], default: Tensor) -> None:
        self.module = module
        self.name = held[0].name
        self.affine = self.replaced = any(step.kind == "affine" for step in held)
        self.padded = False
        self.folded: list[Fold] = []
        self.kept: list[Kept] = []
        self.parts: list[nn.Module] = []
        self._like = next((t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()), default)
        for step in held:
            if step.kind == "affine":
                self._add_affine(step)
            elif step.numbers is not None:
                self._add_layer(_in_units(step))
            elif step.kind == "rectify" and self.affine:
                self.parts.append(nn.ReLU())
        shared = held[0].kind == "barrier" and weight_kind(module) != "plain" and not isinstance(module, Scaled)
        if shared and obstacle(module) is None:
            self._add_layer(Numbers(module))

    def _add_affine(self, step: Step) -> None:
        remains = [] if step.into else rest(step, self._like)
        self.parts += remains
        kind = type(self.module).__name__
        if remains:
            reason = step.kept or "no layer in front can take it, and what reads it needs it"
            self.kept.append(Kept(step.name, kind, reason))
        else:
            self.folded.append(Fold(step.name, kind, (step.into,) if step.into else ()))

    def _add_layer(self, numbers: Numbers) -> None:
        self.parts.append(numbers.write_())
        self.padded = bool(numbers.pad)
        self.replaced |= self.parts[-1] is not self.module


def _in_units(step: Step) -> Numbers:
    """The numbers of a weight layer in the units around it."""
    numbers, source = step.numbers, step.inputs[0]
    assert numbers is not None
    if numbers.pads_zeros and source.t.any():
        numbers.pad = -(source.t / source.g).item()  # where x is 0
    unit = source.t.new_tensor
    numbers.scale_inputs_(unit(source.g), source.t)
    numbers.scale_outputs_(unit(1 / step.g), -step.t / step.g)
    return numbers


def _together(parts: list[nn.Module]) -> nn.Module:
    """The parts in a row; nothing, if there are none."""
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts) if parts else nn.Identity()
