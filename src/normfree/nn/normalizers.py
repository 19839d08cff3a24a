"""Normalizers by name, their replacements (dynamic tanh, affine), and activations with normalization built in.

A normalizer of another library is recognized by its class name, or by what it does: `probing` runs it on scaled inputs.

Reference: normdead, section 2.3 and Figure 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normfree.nn.model_state import hooked, preserve_model_state, substitute_tensors
from normfree.nn.scalars import OneElementScalars, number_of, scalar_tensor
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.theory import normprop_constants

NormName = Literal["batch", "layer", "rms", "group", "instance", "tanh"]
ActivationName = Literal["relu", "selu", "normprop"]

NORM_TYPES = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
FUSED = ("drop", "act")  # the children of timm's normalizers, in the order they run
_KNOWN_NAME = re.compile(r"(batch|layer|group|instance|rms|simple)_?norm", re.IGNORECASE)
_ANY_NAME = re.compile(r"(Norm(Act)?|LRN)(\d?d)?$")


def normalizer(name: NormName, channels: int, *, spatial: bool = True, tokens: bool = False) -> nn.Module:
    """Return a normalizer by name.

    Group norm has as many groups as possible, at most 32, with at least four channels per group. Layer norm of images
    is group norm with one group. `tanh` is dynamic tanh, which computes no statistics.

    Args:
        name: The normalizer.
        channels: The number of channels.
        spatial: Whether the inputs are images (N, channels, H, W) or vectors (N, channels).
        tokens: Whether the inputs are sequences (N, T, channels), whose positions are normalized separately.

    Raises:
        ValueError: If the name is unknown, or if the normalizer does not fit the inputs.
    """
    kind = "tokens (N, T, C)" if tokens else "images (N, C, H, W)" if spatial else "vectors (N, C)"
    makers: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d if spatial else nn.BatchNorm1d,
        "layer": lambda channels: nn.GroupNorm(1, channels),
        "group": _group_norm,
        "tanh": lambda channels: DynamicTanh(channels, dim=1),
    }
    if tokens:
        makers = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "tanh": DynamicTanh}
    elif spatial:
        makers["instance"] = lambda channels: nn.InstanceNorm2d(channels, affine=True)  # it would set vectors to zero
    if name not in makers:
        raise ValueError(f"expected a normalizer of {kind}, got '{name}'; use one of {', '.join(makers)}")
    return makers[name](channels)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(max(g for g in range(1, 33) if channels % g == 0 and (g == 1 or channels // g >= 4)), channels)


class DynamicTanh(OneElementScalars):
    """w · tanh(α · x) + b with a learnable scalar α, and learnable w and b per channel.

    `dim` is the dimension of the channels: 1 for images (N, C, H, W), -1 for tokens (N, T, C). `alpha` is the initial
    value of α, 0.5 in the paper.

    Reference: Zhu, Chen, He, LeCun & Liu 2025, "Transformers without Normalization", section 4.

    >>> DynamicTanh(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, channels: int, *, alpha: float = 0.5, dim: int = -1) -> None:
        super().__init__()
        self.start = alpha
        self.dim = dim
        self.alpha = nn.Parameter(scalar_tensor(alpha))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values."""
        self.alpha.fill_(self.start)
        self.weight.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return torch.tanh(number_of(self.alpha) * x) * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Return the number of channels, the initial α and the channels' dimension."""
        return f"{self.weight.numel()}, alpha={self.start:g}, dim={self.dim}"


class ChannelAffine(nn.Module):
    """w · x + b with learnable w and b per channel: a batch norm whose statistics no longer change.

    Shapes: (N, C, …) → the same.

    >>> ChannelAffine(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))(torch.ones(1, 2))
    tensor([[1., 3.]], grad_fn=<AddcmulBackward0>)
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        if weight.dim() != 1 or weight.shape != bias.shape:
            raise ValueError(
                f"expected one factor and one summand per channel, got shapes {tuple(weight.shape)} and "
                f"{tuple(bias.shape)}; pass two vectors of one length"
            )
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift every channel."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        return torch.addcmul(self.bias.to(x.dtype).view(shape), x, self.weight.to(x.dtype).view(shape))

    def extra_repr(self) -> str:
        """Return the number of channels."""
        return str(self.weight.numel())


class NormPropReLU(nn.Module):
    """ReLU shifted and scaled to zero mean and unit variance for N(0, 1) input: (ReLU(x) - √(1/2π)) / √(½(1 - 1/π)).

    Reference: normdead, section 2.3; Arpit 2016, section 3.3 (normalization propagation).
    """

    mean, std = normprop_constants()

    def forward(self, x: Tensor) -> Tensor:
        """Apply ReLU, then shift and scale."""
        return (F.relu(x) - self.mean) / self.std


class SELU(nn.Module):
    """SELU, followed by alpha dropout if `dropout` is positive; both keep mean 0 and variance 1.

    Reference: normdead, section 2.3; Klambauer 2017.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"expected a dropout probability in [0, 1), got {dropout}; 0 turns it off")
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply SELU, then dropout in training mode."""
        return F.alpha_dropout(torch.selu(x), self.dropout, self.training)

    def extra_repr(self) -> str:
        """Return the dropout probability."""
        return f"dropout={self.dropout}"


class OmittedActivation(nn.Identity):
    """The place of an activation that the model's design has and its method leaves out."""


ACTIVATION_TYPES = (nn.ReLU, NormPropReLU, SELU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.SELU)


def activation(name: ActivationName, *, dropout: float = 0.0) -> nn.Module:
    """Return an activation function by name; `dropout` is the probability of alpha dropout, for selu only."""
    if dropout and name != "selu":
        raise ValueError(f"alpha dropout goes with selu, got dropout={dropout} for '{name}'; use dropout=0")
    match name:
        case "relu":
            return nn.ReLU()
        case "selu":
            return SELU(dropout)
        case "normprop":
            return NormPropReLU()
    raise ValueError(f"expected an activation, got '{name}'; use one of relu, selu, normprop")


def untrained_norms(model: nn.Module) -> list[str]:
    """Return the batch norms in evaluation mode that never saw a batch: with mean 0 and variance 1 they do nothing."""

    def untrained(norm: nn.Module) -> bool:
        counted, mean = getattr(norm, "num_batches_tracked", None), getattr(norm, "running_mean", None)
        if norm.training or not isinstance(norm, _BatchNorm) or counted is None or mean is None or mean.is_meta:
            return False
        return not bool(counted) and not bool(mean.any()) and bool(torch.all(cast(Tensor, norm.running_var) == 1))

    return [name for name, module in model.named_modules() if untrained(module)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalizer.

    Torch's are recognized by type. Others are recognized by the class name (`LlamaRMSNorm`, `T5LayerNorm`,
    `FrozenBatchNorm2d`), if their parameters are one-dimensional and their children are activation and dropout only.
    """
    if isinstance(module, NORM_TYPES):
        return True
    if isinstance(module, WEIGHT_LAYERS) or not _KNOWN_NAME.search(type(module).__name__):
        return False
    inside = {name for name, _ in module.named_children()}
    return inside <= set(FUSED) and all(p.dim() <= 1 for p in module.parameters(recurse=False))


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm, also one with fixed statistics, which torchvision, timm and others have."""
    return isinstance(module, _BatchNorm) or "FrozenBatchNorm" in type(module).__name__


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The normalizers of a model by name, a shared one under its first name."""
    return {name: module for name, module in model.named_modules() if is_norm(module)}


def unknown_norms(model: nn.Module) -> dict[str, str]:
    """The modules whose class is named like a normalizer but is not one that can be removed, each with its class."""
    found = {}
    for name, module in _other_modules(model):
        leaf = next(module.children(), None) is None and not isinstance(module, WEIGHT_LAYERS)
        if leaf and not is_norm(module) and _ANY_NAME.search(type(module).__name__):
            found[name] = type(module).__name__
    return found


def _other_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model but for torch's parametrizations (`_WeightNorm`), which do not normalize the signal."""
    return ((name, m) for name, m in model.named_modules() if ".parametrizations." not in f".{name}")


@dataclass
class ProbedModules:
    """What the modules of other libraries do, as a pass through their model shows; by name.

    Attributes:
        norms: The modules that are normalizers by what they do, each with its class.
        norm_like: The modules that behave like a normalizer but cannot be removed safely, each with its class: they
            return signs, or vectors of unit length without a weight, as cosine similarities need them.
        affine: The modules that are named like a normalizer but only scale and shift, such as MobileBERT's `NoNorm`.
        standardized: The layers whose own forward pass standardizes their weight, each with the class of torch that it
            extends, or None if that class returns another shape.
    """

    norms: dict[str, str] = field(default_factory=dict)
    norm_like: dict[str, str] = field(default_factory=dict)
    affine: set[str] = field(default_factory=set)
    standardized: dict[str, type[nn.Module] | None] = field(default_factory=dict)


@contextmanager
def probing(model: nn.Module) -> Iterator[ProbedModules]:
    """Find the modules that normalize, and the layers that standardize their weight, from a pass of the model inside.

    Inputs of modules of other libraries are kept on the way. At the end these modules run on scaled copies of them,
    which fills the record.
    """
    inputs: dict[str, Tensor] = {}
    layers: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
                return
            if isinstance(module, WEIGHT_LAYERS):
                layers.setdefault(name, (args[0].detach().clone(), out.detach().clone()))
            elif args[0].is_floating_point():
                inputs.setdefault(name, args[0].detach().clone())

        return hook

    foreign = {
        name: module
        for name, module in _other_modules(model)
        if not type(module).__module__.startswith(("torch.", "normfree."))
        and (isinstance(module, WEIGHT_LAYERS) or _may_normalize(module))
    }
    found = ProbedModules()
    with hooked({module: keep(name) for name, module in foreign.items()}):
        yield found
    if not foreign:
        return
    with preserve_model_state(model, attributes=True), torch.no_grad():
        model.eval()
        unknown = unknown_norms(model)
        for name, x in inputs.items():
            if _normalizes(foreign[name], x):
                to = found.norms if name not in unknown and _is_removable(foreign[name], x) else found.norm_like
                to[name] = type(foreign[name]).__name__
        named = inputs.keys() & unknown.keys() - found.norm_like.keys()
        found.affine = {name for name in named if _scales_and_shifts(foreign[name], inputs[name])}
        kinds = {type(foreign[name]) for name, xy in layers.items() if _ignores_scale(foreign[name], *xy)}
        for name, (x, out) in layers.items():
            if type(foreign[name]) in kinds:
                base = plain_base(foreign[name])
                same = base.forward(foreign[name], x).shape == out.shape
                found.standardized[name] = base if same else None


def _may_normalize(module: nn.Module) -> bool:
    """Whether a module has no matrices or children, and is not a known normalizer."""
    leaf = next(module.children(), None) is None and all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return leaf and not is_norm(module)


def plain_base(layer: nn.Module) -> Any:
    """The class of torch that a weight layer extends."""
    return next(kind for kind in type(layer).__mro__ if kind in WEIGHT_LAYERS)


def _normalizes(module: nn.Module, x: Tensor) -> bool:
    """Whether a module returns the same for an input four times as large, but not for one of opposite sign.

    The second test excludes a module whose output does not depend on its input.
    """
    module.train()  # to use the statistics of the batch
    try:
        out, large, turned = (module(factor * x) for factor in (1.0, 4.0, -1.0))
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.isfinite().all():
        return False
    near = 0.02 * out.std(unbiased=False)
    return bool((large - out).abs().mean() <= near < (turned - out).abs().mean())


def _is_removable(module: nn.Module, x: Tensor) -> bool:
    """Whether a module that normalizes has a weight per channel or returns unit variance, and follows small changes."""
    module.train()
    out = module(x)
    moved = module(x + 0.01 * x.std(unbiased=False) * x.roll(1, -1).sign())
    weighted = any(p.numel() > 1 for p in module.parameters())
    return bool((moved != out).double().mean() > 0.5) and (weighted or 0.5 < float(out.square().mean().sqrt()) < 2)


def _scales_and_shifts(module: nn.Module, x: Tensor) -> bool:
    """Whether a module in evaluation mode returns k · f(x) + b for k · x."""
    module.eval()
    try:
        shift, out, large = (module(factor * x) for factor in (0.0, 1.0, 4.0))
        return bool((large - shift - 4 * (out - shift)).abs().max() <= 1e-3 * (large - shift).abs().max())
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False


def _ignores_scale(layer: nn.Module, x: Tensor, out: Tensor) -> bool:
    """Whether a layer returns the same with a weight four times as large: it standardizes its weight."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.any():
        return False
    with substitute_tensors(layer, {id(weight): 4 * weight}):
        large = layer(x)
    return bool((large - out).abs().mean() < 0.25 * out.std(unbiased=False))  # it would be 3 times for a plain one
