"""A flow as steps that say how they treat a change of units, x = g · u + t, of what they read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from normfree.conversion.folding.layer_arrays import Numbers, base_class, obstacle
from normfree.conversion.folding.marked_flow import Calls
from normfree.graph.functions import ADDITIONS, SPLITS, VIEWS
from normfree.nn.normalizers import ChannelAffine, NormPropReLU
from normfree.nn.residual import SubsamplePad
from normfree.nn.scalar_wrapping import Scaled
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

StepKind = Literal["weight", "affine", "rectify", "pass", "layout", "widen", "sum", "barrier"]

# An empty sequence is a leaf, too.
_PASS = (
    nn.Identity,
    nn.Sequential,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
)
_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool2d)
_KINDS: dict[type[nn.Module], StepKind] = {nn.ReLU: "rectify", nn.Flatten: "layout", SubsamplePad: "widen"}
# Functions that pick, order or average entries: one number for all of them passes, one a channel may not.
_LAYOUT = VIEWS - {"dropout"} | SPLITS | {"__getitem__", "select", "mean", "adaptive_avg_pool2d", "max_pool2d"}


@dataclass(eq=False)
class Step:
    """One step of the signal, and the units of what comes out: its value is g · u + t, u what the folded model has.

        weight   any units in, any out: they go into its numbers
        affine   scale · x + shift, which a change of units does alone
        rectify  relu(g · u) = g · relu(u) for g > 0: no shift
        pass     the units of its input (pooling, dropout, a maximum)
        layout   the units of its input, if the shift is one number for all
        widen    the units of its input, and channels of zeros
        sum      one g for all, shifts add
        barrier  plain units in and out

    A shift is a number, or has one entry a channel and a shape that broadcasts over the value. An affine step that
    is `kept` stays in the model with what is left of it.
    """

    kind: StepKind
    name: str
    module: nn.Module | None = None
    channels: int = 0
    inputs: list[Step] = field(default_factory=list)
    users: list[Step] = field(default_factory=list, repr=False)
    numbers: Numbers | None = None
    scale: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    shift: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    kept: str = ""
    into: str = ""
    g: float = 1.0
    t: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @property
    def only_user(self) -> bool:
        """Whether just one step reads this one."""
        return len(self.users) == 1


def steps_of(calls: Calls) -> list[Step]:
    """The steps of a flow, in the order they ran."""
    last: dict[object, Step] = {}
    out: list[Step] = []
    for node in calls.nodes:
        module = calls.module(node)
        sources = [last[source] for source in node.inputs]
        if module is None:
            kind: StepKind = "barrier"
            if node.name in ("relu", "relu_"):
                kind = "rectify"
            elif node.kind == "sum" and node.function in ADDITIONS and len(sources) == 2:
                kind = "sum"
            elif node.name in _LAYOUT and len(sources) == 1:
                kind = "layout"
            made = [Step(kind, node.name)]
        else:
            made = _of_module(calls.own_name(node), module)
            shared = calls.shared(node) and any(step.kind in ("weight", "affine") for step in made)
            if len(sources) != 1 or shared:
                made = [Step("barrier", calls.own_name(node), module)]
        for step in made:
            step.channels = node.shape[1] if len(node.shape) > 1 else 0
            step.inputs = sources
            for source in sources:
                source.users.append(step)
            sources = [step]
        out += made
        last[node] = made[-1]
    return out


def _of_module(name: str, module: nn.Module) -> list[Step]:
    """The steps of one module: the scalars around it are steps of their own."""
    if isinstance(module, Scaled):
        core = _core(name, module)
        if module.skip is not None or core.kind not in ("weight", "rectify"):
            return [Step("barrier", name, module)]
        enter = _affine(name, module, module.alpha, module.shift)
        return [*enter, core, *_affine(name, module, module.beta, module.delta)]
    if isinstance(module, ScalarMultiplier):
        return _affine(name, module, module.value, None)
    if isinstance(module, ScalarBias):
        return _affine(name, module, None, module.value)
    if isinstance(module, NormPropReLU):  # a ReLU and an affine map
        std = torch.tensor(module.std, dtype=torch.float64)
        return [Step("rectify", name, module), *_affine(name, module, 1 / std, -module.mean / std)]
    return [_core(name, module)]


def _core(name: str, module: nn.Module) -> Step:
    """The step of a module without the scalars around it."""
    base = base_class(module)
    if obstacle(module) is None and not isinstance(module, _ConvTransposeNd):
        return Step("weight", name, module, numbers=Numbers(module))
    kind: StepKind = "barrier"
    if base in _PASS or base in _MAXIMA or (base is nn.AvgPool2d and _averages_only(module)):
        kind = "pass"
    elif base in _KINDS:
        kind = _KINDS[base]
    return Step(kind, name, module)


def _averages_only(pool: Any) -> bool:
    """Whether a pooling counts no zeros from its padding."""
    return not any([pool.padding] if isinstance(pool.padding, int) else pool.padding) or not pool.count_include_pad


def _affine(name: str, module: nn.Module, scale: Tensor | None, shift: Tensor | None) -> list[Step]:
    """An affine step; none where both are absent."""
    if scale is None and shift is None:
        return []
    step = Step("affine", name, module)
    if scale is not None:
        step.scale = scale.detach().double().cpu()
    if shift is not None:
        step.shift = shift.detach().double().cpu()
    return [step]


def absorb_(steps: list[Step]) -> list[Step]:
    """Multiply every affine step right after a weight layer that nothing else reads into the layer's numbers.

    Such a factor may be negative or zero. The steps that remain are returned.
    """
    out: list[Step] = []
    for step in steps:
        source = step.inputs[0] if step.inputs else None
        if step.kind == "affine" and source is not None and source.numbers is not None and source.only_user:
            source.numbers.scale_outputs_(step.scale, step.shift)
            step.into = source.name
            source.users = step.users
            for user in step.users:
                user.inputs = [source if entry is step else entry for entry in user.inputs]
        else:
            out.append(step)
    return out


def rest(step: Step, like: Tensor) -> list[nn.Module]:
    """What an affine step still has to do in the units around it, u ← k · u + r, as fixed scalars of a type."""
    source = step.inputs[0]
    k = step.scale * source.g / step.g
    moved = step.scale * source.t
    r = (moved + step.shift - step.t) / step.g
    size = max(part.abs().max().item() for part in (moved, step.shift, step.t))
    if r.abs().max() * step.g <= 1e-13 * size:
        r = torch.zeros_like(step.shift)  # rounding
    if r.numel() > 1:
        affine = ChannelAffine(k.expand(r.numel()), r.flatten())
        return [affine.requires_grad_(False).to(like.device, like.dtype)]
    out: list[ScalarMultiplier | ScalarBias] = []
    if not math.isclose(k.item(), 1.0, rel_tol=1e-14):
        out.append(ScalarMultiplier(k.item(), learnable=False).to(like.device, like.dtype))
        out[-1].set_(k.item())  # the constructor rounds to single precision
    if r.item():
        out.append(ScalarBias(r.item(), learnable=False).to(like.device, like.dtype))
        out[-1].set_(r.item())
    return list(out)
