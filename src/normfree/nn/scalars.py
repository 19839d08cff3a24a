"""Scalars of the residual equation, fixed or learnable: as modules, or around the forward pass of any module.

The parameter has one dimension and one element, because FSDP2 shards no parameter without dimensions. The forward pass
reads it as a tensor without dimensions, which never promotes the type of a bf16 activation. Blocks that differ only in
a scalar's value share one compiled program.

`ScalarBias` and `ScalarMultiplier` are modules of our own networks. `add_scalar_` gives a sum inside third-party code
its α, β and biases: the module's class becomes a subclass of its own class, so names, weights, hooks and `isinstance`
stay as they are. These scalars are parameters of the module itself, without a gradient if they are fixed. They are not
buffers, because Opacus rejects trainable layers with buffers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from normfree.nn.weight_layers import CONV_LAYERS, _ConvForward, add_as_image, convolve


def scalar_tensor(value: float, device: torch.device | None = None) -> Tensor:
    """Return a number as a tensor with one dimension, the shape of every scalar parameter."""
    return torch.tensor([float(value)], device=device)


def number_of(scalar: Tensor) -> Tensor:
    """View a scalar parameter as a tensor without dimensions, for use in a forward pass."""
    return scalar.reshape(())


def with_dimension(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give stored scalars the dimension of the model's: until release 0.1 they had none.

    Args:
        tensors: The stored tensors, by name.
        own: The model's tensors, by name.
    """
    return {
        name: tensor.reshape(1) if tensor.dim() == 0 and name in own and own[name].shape == (1,) else tensor
        for name, tensor in tensors.items()
    }


class OneElementScalars(nn.Module):
    """Mixin: `load_state_dict` accepts scalars without a dimension, as release 0.1 stored them."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        held: dict[str, Tensor | None] = {**self._parameters, **self._buffers}
        own = {f"{prefix}{name}": value for name, value in held.items() if value is not None}
        state_dict.update(with_dimension({name: state_dict[name] for name in own if name in state_dict}, own))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Scalar(OneElementScalars):
    """One number: a parameter if `learnable`, else a buffer; the state dict contains it in both cases."""

    value: Tensor

    def __init__(self, value: float, *, learnable: bool) -> None:
        super().__init__()
        self.learnable = learnable
        number = scalar_tensor(value)
        if learnable:
            self.value = nn.Parameter(number)
        else:
            self.register_buffer("value", number)

    @property
    def number(self) -> Tensor:
        """The number as a tensor without dimensions."""
        return number_of(self.value)

    def _beside(self, x: Tensor) -> Tensor:
        """The number for a sum or product with x; on a CPU, a view costs as much time as the sum itself."""
        return self.value if x.is_cpu and x.dim() > 0 and x.dtype == self.value.dtype else self.number

    @torch.no_grad()
    def set_(self, value: float) -> None:
        """Set the number."""
        self.value.fill_(value)

    def extra_repr(self) -> str:
        """Return the number ('meta' on the meta device) and whether it is learnable."""
        number = "meta" if self.value.is_meta else f"{self.value.item():.6g}"
        return f"{number}, learnable={self.learnable}"


class ScalarBias(_Scalar):
    """x + b with one number b for the whole tensor.

    Reference: fixup, section 3, rule 3.

    >>> ScalarBias(0.5)(torch.zeros(2))
    tensor([0.5000, 0.5000], grad_fn=<AddBackward0>)

    `normfree.nn.training_scalar_folding` sets `folded` and `moved`. A folded bias adds nothing, because
    the layers that read it contain it. `moved` is the sum of the δ moved into this bias; it is added too.
    """

    folded: bool = False
    moved: Tensor | None = None

    def __init__(self, value: float = 0.0, *, learnable: bool = True) -> None:
        super().__init__(value, learnable=learnable)

    def forward(self, x: Tensor) -> Tensor:
        """Add the number."""
        if self.folded:
            return x
        return x + (self._beside(x) if self.moved is None else self.number + self.moved)


class ScalarMultiplier(_Scalar):
    """s · x with one number s for the whole tensor.

    Reference: fixup, section 3, rule 3; robust, section 3.3; normdead, equation 5.

    >>> ScalarMultiplier(0.5, learnable=False)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, value: float = 1.0, *, learnable: bool = True) -> None:
        super().__init__(value, learnable=learnable)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the number."""
        return x * self._beside(x)


ScalarName = Literal["alpha", "shift", "beta", "delta", "skip"]
"""The scalars of a module, which are keys of stored weights and so keep their names.

In p(c · (a · h(s) + β · f(e(α · x)) + δ)), `alpha` is α, `shift` the bias at the entry e, `skip` is a and `delta` is δ.
`beta` is β if the module is a branch, and c if the module returns the sum.
"""
SCALARS: tuple[ScalarName, ...] = ("alpha", "shift", "beta", "delta", "skip")


class ScaledModule(OneElementScalars):
    """β · (f(α · x + b) + (a - 1) · x) + δ around the forward pass f of a module.

    `shift` is b and `skip` is a; see `ScalarName`. An absent scalar is None and costs nothing. With several inputs, the
    signals are scaled (query, key and value of an attention). With several outputs, only the first is. `skip`
    multiplies the shortcut x of a module that returns x plus its branch.
    """

    alpha: Tensor | None
    shift: Tensor | None
    beta: Tensor | None
    delta: Tensor | None
    skip: Tensor | None
    plain_class: type[nn.Module]
    signals: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the signals, run the module, scale its output."""
        if self.alpha is None and self.shift is None:
            out = super().forward(*args, **kwargs)
        else:
            out = super().forward(*self._entered(args), **self._entered_by_name(kwargs))
        if not isinstance(out, tuple):
            return self._leave(out, args, kwargs)
        scaled = (self._leave(out[0], args, kwargs), *out[1:])
        return type(out)(*scaled) if hasattr(out, "_fields") else scaled  # a named tuple stays one

    def _entered(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments with the signals scaled.

        A tensor passed twice is scaled once, because `MultiheadAttention` checks identity.
        """
        entered: list[Any] = []
        for position, value in enumerate(values):
            twins = [done for before, done in zip(values, entered, strict=False) if before is value]
            signal = position < len(self.signals) and isinstance(value, Tensor)
            entered.append(value if not signal else twins[0] if twins else self._enter(value))
        return entered

    def _entered_by_name(self, values: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in self.signals if name in values]
        return values | dict(zip(names, self._entered([values[name] for name in names]), strict=True))

    def _enter(self, x: Tensor) -> Tensor:
        y = x if self.alpha is None else x * number_of(self.alpha)
        return y if self.shift is None else y + number_of(self.shift)

    def _leave(self, y: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.skip is not None:
            y = y + (number_of(self.skip) - 1) * (args[0] if args else kwargs[self.signals[0]])
        if self.beta is not None:
            y = y * number_of(self.beta)
        return y if self.delta is None else y + number_of(self.delta)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain class, or the function that makes it; unpickling makes the scaled class again."""
        return _restore, (getattr(self.plain_class, "made_by", self.plain_class),), self.__dict__

    def extra_repr(self) -> str:
        """The module's own description and the scalars."""
        held = {name: getattr(self, name) for name in SCALARS}
        parts = [
            f"{name}={'meta' if t.is_meta else f'{t.item():.4g}'}{'' if t.requires_grad else ' fixed'}"
            for name, t in held.items()
            if t is not None
        ]
        return ", ".join(filter(None, [super().extra_repr(), *parts]))


class ScaledConvolution(ScaledModule):
    """The scalars around a convolution W * x + v, as part of its weight and bias.

        β · (W * (α · x + b) + v) + δ = (α · β · W) * x + β · (v + b · ΣW) + δ

    The left side stores α · x + b for the gradient of W, and the layer's output for the gradient of β. The right side
    stores only x, so it is the default. A layer that pads with zeros adds b to its input, because the zeros have no
    bias.

    Scaling the weight is cheap as long as the weight is smaller than the input. If it is larger, the left side is
    computed, unless the layer is compiled.
    """

    weight: Tensor
    bias: Tensor | None
    padding: tuple[int, ...] | str
    padding_mode: str
    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Run the convolution with the scaled weight and bias."""
        few = not torch.compiler.is_compiling() and self.weight.numel() > input.numel()
        if few or self.skip is not None:
            return cast(Tensor, super().forward(input))
        scalars = (self.alpha, self.shift, self.beta, self.delta)
        alpha, shift, beta, delta = (None if scalar is None else number_of(scalar) for scalar in scalars)
        weight, bias = self.effective_weight() if isinstance(self, _ConvForward) else self.weight, self.bias
        if shift is not None and self._pads_with_zeros():
            scaled = input if alpha is None else input * alpha
            input, alpha = add_as_image(scaled, shift), None
        elif shift is not None:
            moved = shift * weight.flatten(1).sum(1)
            bias = moved if bias is None else bias + moved
        if bias is not None and beta is not None:
            bias = bias * beta
        if delta is not None:
            bias = delta.expand(len(weight)) if bias is None else bias + delta
        for factor in (alpha, beta):
            weight = weight if factor is None else weight * factor
        if isinstance(self, _ConvForward):  # direction and gain may be in single precision where the input is not
            weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        return convolve(self, input, weight, bias)

    def _pads_with_zeros(self) -> bool:
        padded = self.padding == "same" if isinstance(self.padding, str) else any(self.padding)
        return padded and self.padding_mode == "zeros"


def _is_known_convolution(plain: Any) -> bool:
    """Whether a class is a convolution of torch's own, or a reparametrized one, without a forward pass of its own."""
    if not issubclass(plain, CONV_LAYERS):
        return False
    known = plain.forward in (_ConvForward.forward, *[kind.forward for kind in CONV_LAYERS])
    return known and plain._conv_forward in [kind._conv_forward for kind in CONV_LAYERS]


def signals_of(plain: Any) -> tuple[str, ...]:
    """The names of the arguments that are signals: the first, or query, key and value of an attention."""
    signals = 3 if issubclass(plain, nn.MultiheadAttention) else 1
    return tuple(inspect.signature(plain.forward).parameters)[1 : 1 + signals]


@functools.cache
def _scaled_class(plain: Any) -> Any:
    # Keep `__module__`: some libraries inspect it.
    body = {
        "plain_class": plain,
        "signals": signals_of(plain),
        "__module__": plain.__module__,
        "__doc__": ScaledModule.__doc__,
    }
    scaled = ScaledConvolution if _is_known_convolution(plain) else ScaledModule
    return type(f"Scaled{plain.__name__}", (scaled, plain), body)


def _restore(plain: Any) -> nn.Module:
    made = _scaled_class(plain if isinstance(plain, type) else plain())
    return cast(nn.Module, made.__new__(made))


def unscalable(module: nn.Module) -> str | None:
    """Why a module cannot be given scalars; None if it can."""
    if "forward" in module.__dict__:
        return "its forward pass was replaced on the object itself"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled to TorchScript"
    taken = [name for name in SCALARS if not isinstance(module, ScaledModule) and hasattr(module, name)]
    return f"it has an attribute '{taken[0]}' of its own" if taken else None


def add_scalar_(module: nn.Module, name: ScalarName, value: float, *, learnable: bool) -> None:
    """Give a module a scalar around its forward pass, in place.

    >>> layer = nn.Linear(1, 1)
    >>> add_scalar_(layer, "beta", 0.0, learnable=True)
    >>> abs(layer(torch.ones(1, 1)).item()), sorted(layer.state_dict())
    (0.0, ['beta', 'bias', 'weight'])

    Raises:
        ValueError: If the module cannot be given scalars, or has this one already.
    """
    reason = unscalable(module)
    if reason is not None:
        raise ValueError(f"expected a module that can be scaled, got {type(module).__name__}: {reason}")
    if not isinstance(module, ScaledModule):
        plain: Any = type(module)
        module.__class__ = _scaled_class(plain)
        for scalar in SCALARS:
            module.register_parameter(scalar, None)
    if getattr(module, name) is not None:
        raise ValueError(f"expected {type(module).__name__} without a scalar '{name}', got one that has it")
    like = next((t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()), None)
    number = scalar_tensor(value, None if like is None else like.device)
    if like is not None:
        number = number.to(like.dtype)
    setattr(module, name, nn.Parameter(number, requires_grad=learnable))


def scalars_of(module: nn.Module) -> dict[ScalarName, Tensor]:
    """The scalars of a module, by name."""
    if not isinstance(module, ScaledModule):
        return {}
    return {name: value for name in SCALARS if (value := getattr(module, name)) is not None}
