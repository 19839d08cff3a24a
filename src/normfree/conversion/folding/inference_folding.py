"""`fold_`: scalars and reparametrizations of a norm-free network become part of plain weights, for inference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from normfree.arguments import check_arguments
from normfree.conversion.changes import FoldedModule, Folding, RemainingModule
from normfree.conversion.folding.module_flow import (
    LayerArrays,
    MarkedModel,
    ModuleFlow,
    base_class,
    cannot_fold_into,
    require_foldable,
)
from normfree.conversion.folding.scale_solver import FoldStep, StepKind, solve_factors_, solve_shifts_
from normfree.conversion.replacement import replace_modules_
from normfree.graph.observer import ADDITIONS, SPLITS, VIEWS
from normfree.nn.normalizers import ChannelAffine, NormPropReLU, is_batch_norm
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, ScaledModule, number_of
from normfree.nn.weight_layers import weight_kind
from normfree.plan import remembered_example

# An empty Sequential is a leaf, too.
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
_STEP_KINDS: dict[type[nn.Module], StepKind] = {nn.ReLU: "rectify", nn.Flatten: "layout", SubsamplePad: "widen"}
# Functions that pick, order or average entries: a shift that is one number passes, one per channel may not.
_LAYOUT = VIEWS - {"dropout"} | SPLITS | {"__getitem__", "select", "mean", "adaptive_avg_pool2d", "max_pool2d"}


def fold_(model: nn.Module, example: Any = None) -> Folding:
    """Fold the scalars and reparametrizations of a norm-free model into its weights, in place, for inference.

    The model computes the same function afterwards, with plain layers:

        W * x · s + b        a factor or bias after a layer goes into its weight and bias
        W * (s · x + b)      before a layer: W ← s · W and bias ← bias + b · ΣW; zero padding becomes padding with -b/s
        relu(s · x)          is s · relu(x) for s > 0, so a factor passes on to the next layer
        c · (a · x + β · f)  rescales the stream from here on; the layers that read and write it compensate

    A bias before an activation on the stream is treated in the same way as the last line.

    Weight norm, standardization and spectral norm become their effective weight. A factor stays as a fixed multiplier
    if it is not positive and has no layer before it, or if it would take the stream's units beyond a range of 2^20.
    Which layers get a bias or a pad depends on the values of the weights, so save a folded model as a whole
    (`torch.export`, ONNX), or save its weights before folding.

    Args:
        model: A norm-free model in evaluation mode.
        example: An input that the model accepts; only its shape matters. Default: the example that a converted model
            remembers, or a batch of the model's `input_shape`, which normfree's image and vector networks have.

    Returns:
        A record of the modules that were folded and that remain, with the reason. Batch norms remain: `fold_batchnorm`
        folds them.

    Raises:
        ValueError: If the model is in training mode or TorchScript, does not run on the example, or has no
            `input_shape` and no example is given; the model is then unchanged.

    >>> from normfree.models import build
    >>> model = build("resnet20", "fixup").eval()
    >>> print(fold_(model))
    47 of 47 folded
    """
    check_arguments(model=model)
    require_foldable(model)
    marked = MarkedModel(model)
    flow = marked.flow(_example(model) if example is None else example)
    steps = _steps_of(flow)
    remaining = _absorb_(steps)
    solve_factors_(remaining)
    solve_shifts_(remaining)
    record = _write_(marked, steps, flow)
    for module in model.modules():
        if isinstance(module, Residual) and module.beta_in_weight:
            module.beta, module.beta_in_weight = nn.Identity(), False
        elif isinstance(module, ScalarBias) and module.folded:
            module.set_(0.0)
            module.folded = False
    return record


def _example(model: nn.Module) -> Any:
    """Return the example of a converted model, or a batch in the input shape of a normfree network."""
    if (example := remembered_example(model)) is not None:
        return example
    shape = getattr(model, "input_shape", None)
    if shape is None:
        raise ValueError(
            f"expected an example, since {type(model).__name__} has no attribute input_shape; pass a batch"
        )
    dtype = next(model.parameters()).dtype
    return torch.empty((2, *shape), device="meta", dtype=dtype)


def _steps_of(flow: ModuleFlow) -> list[FoldStep]:
    """Turn a flow into steps, in the order they ran."""
    last: dict[object, FoldStep] = {}
    out: list[FoldStep] = []
    for node in flow.nodes:
        module = flow.module(node)
        sources = [last[source] for source in node.inputs]
        if module is None:
            kind: StepKind = "barrier"
            if node.name in ("relu", "relu_"):
                kind = "rectify"
            elif node.kind == "sum" and node.function in ADDITIONS and len(sources) == 2:
                kind = "sum"
            elif node.name in _LAYOUT and len(sources) == 1:
                kind = "layout"
            made = [FoldStep(kind, node.name)]
        else:
            made = _module_steps(flow.own_name(node), module)
            shared = flow.is_shared(node) and any(step.kind in ("weight", "affine") for step in made)
            if len(sources) != 1 or shared:
                made = [FoldStep("barrier", flow.own_name(node), module)]
        for step in made:
            step.channels = node.shape[1] if len(node.shape) > 1 else 0
            step.inputs = sources
            for source in sources:
                source.users.append(step)
            sources = [step]
        out += made
        last[node] = made[-1]
    return out


def _module_steps(name: str, module: nn.Module) -> list[FoldStep]:
    """The steps of one module: the scalars around it are steps of their own."""
    if isinstance(module, ScaledModule):
        core = _core_step(name, module)
        if module.skip is not None or core.kind not in ("weight", "rectify"):
            return [FoldStep("barrier", name, module)]
        enter = _affine(name, module, module.alpha, module.shift)
        return [*enter, core, *_affine(name, module, module.beta, module.delta)]
    if isinstance(module, ScalarMultiplier):
        return _affine(name, module, module.value, None)
    if isinstance(module, ScalarBias):
        return _affine(name, module, None, module.value)
    if isinstance(module, NormPropReLU):  # a ReLU and an affine map
        std = torch.tensor(module.std, dtype=torch.float64)
        return [FoldStep("rectify", name, module), *_affine(name, module, 1 / std, -module.mean / std)]
    return [_core_step(name, module)]


def _core_step(name: str, module: nn.Module) -> FoldStep:
    """The step of a module without the scalars around it."""
    base = base_class(module)
    if cannot_fold_into(module) is None and not isinstance(module, _ConvTransposeNd):
        return FoldStep("weight", name, module, arrays=LayerArrays(module))
    kind: StepKind = "barrier"
    if base in _PASS or base in _MAXIMA or (base is nn.AvgPool2d and _averages_only(module)):
        kind = "pass"
    elif base in _STEP_KINDS:
        kind = _STEP_KINDS[base]
    return FoldStep(kind, name, module)


def _averages_only(pool: Any) -> bool:
    """Whether a pooling counts no zeros from its padding."""
    return not any([pool.padding] if isinstance(pool.padding, int) else pool.padding) or not pool.count_include_pad


def _affine(name: str, module: nn.Module, scale: Tensor | None, shift: Tensor | None) -> list[FoldStep]:
    """An affine step, or none if both scalars are absent."""
    if scale is None and shift is None:
        return []
    step = FoldStep("affine", name, module)
    if scale is not None:
        step.scale = number_of(scale.detach().double().cpu())
    if shift is not None:
        step.shift = number_of(shift.detach().double().cpu())
    return [step]


def _absorb_(steps: list[FoldStep]) -> list[FoldStep]:
    """Multiply every affine step into the weight layer before it, if nothing else reads that layer.

    Such a factor may be negative or zero. Returns the steps that remain.
    """
    out: list[FoldStep] = []
    for step in steps:
        source = step.inputs[0] if step.inputs else None
        if step.kind == "affine" and source is not None and source.arrays is not None and source.has_one_user:
            source.arrays.scale_outputs_(step.scale, step.shift)
            step.into = source.name
            source.users = step.users
            for user in step.users:
                user.inputs = [source if entry is step else entry for entry in user.inputs]
        else:
            out.append(step)
    return out


def _remaining_modules(step: FoldStep, like: Tensor) -> list[nn.Module]:
    """The fixed scalars that an affine step leaves in the units around it, u ← k · u + r, in the type of `like`."""
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


def _write_(marked: MarkedModel, steps: list[FoldStep], flow: ModuleFlow) -> Folding:
    """Write the solved steps into the model."""
    default = next((p for p in marked.parameters() if p.is_floating_point()), torch.zeros(()))
    by_module: dict[nn.Module, list[FoldStep]] = {}
    for step in steps:
        if step.module is not None:
            by_module.setdefault(step.module, []).append(step)
    replacements = [_Replacement(module, own, default) for module, own in by_module.items()]
    done = {r.module for r in replacements if r.affine}
    others = [
        RemainingModule(name, type(module).__name__, flow.why_unfolded(name))
        for name, module in marked.model.named_modules()
        if isinstance(module, ScalarBias | ScalarMultiplier | ScaledModule) and module not in done
    ]
    others += [
        RemainingModule(name, type(module).__name__, "it is a batch norm, which fold_batchnorm(model, example) folds")
        for name, module in marked.model.named_modules()
        if is_batch_norm(module)
    ]
    replace_modules_(marked, {r.module: _together(r.parts) for r in replacements if r.replaced})
    return Folding(
        folded=tuple(module for r in replacements for module in r.folded),
        kept=(*(module for r in replacements for module in r.remaining), *others),
        padded=tuple(r.name for r in replacements if r.padded),
        plain=tuple(r.name for r in replacements if r.replaced and weight_kind(r.module) != "plain"),
    )


class _Replacement:
    """One module of the model, and the modules that take its place."""

    def __init__(self, module: nn.Module, own: list[FoldStep], default: Tensor) -> None:
        self.module = module
        self.name = own[0].name
        self.affine = self.replaced = any(step.kind == "affine" for step in own)
        self.padded = False
        self.folded: list[FoldedModule] = []
        self.remaining: list[RemainingModule] = []
        self.parts: list[nn.Module] = []
        self._like = next((t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()), default)
        for step in own:
            if step.kind == "affine":
                self._add_affine(step)
            elif step.arrays is not None:
                self._add_layer(_in_units(step))
            elif step.kind == "rectify" and self.affine:
                self.parts.append(nn.ReLU())
        shared = own[0].kind == "barrier" and weight_kind(module) != "plain" and not isinstance(module, ScaledModule)
        if shared and cannot_fold_into(module) is None:
            self._add_layer(LayerArrays(module))

    def _add_affine(self, step: FoldStep) -> None:
        remains = [] if step.into else _remaining_modules(step, self._like)
        self.parts += remains
        kind = type(self.module).__name__
        if remains:
            reason = step.stays or "no layer before it can take it, and its readers need it"
            self.remaining.append(RemainingModule(step.name, kind, reason))
        else:
            self.folded.append(FoldedModule(step.name, kind, (step.into,) if step.into else ()))

    def _add_layer(self, arrays: LayerArrays) -> None:
        self.parts.append(arrays.write_())
        self.padded = bool(arrays.pad)
        self.replaced |= self.parts[-1] is not self.module


def _in_units(step: FoldStep) -> LayerArrays:
    """The arrays of a weight layer in the units around it."""
    arrays, source = step.arrays, step.inputs[0]
    assert arrays is not None
    if arrays.pads_zeros and source.t.any():
        arrays.pad = -(source.t / source.g).item()  # where x is 0
    unit = source.t.new_tensor
    arrays.scale_inputs_(unit(source.g), source.t)
    arrays.scale_outputs_(unit(1 / step.g), -step.t / step.g)
    return arrays


def _together(parts: list[nn.Module]) -> nn.Module:
    """The parts in a row, or an identity if there are none."""
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts) if parts else nn.Identity()
