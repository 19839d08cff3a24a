"""`BlockBuilder`: makes the layers, normalizers, activations, scalars and residual blocks that a method asks for.

A branch is always layer (activation, layer)…; the block form only sets the position of the activation around it.

    post     x ↦ act(h(x) + f(x))       He 2016a; Fixup's CIFAR and ImageNet networks
    pre      x ↦ h(x) + f(act(x))       He 2016b; robust, normdead
    linear   x ↦ h(x) + f(x)            wninit: nothing between the blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

from normfree.methods import Form, Law, Method
from normfree.nn.normalizers import OmittedActivation, activation, normalizer
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import CONVOLUTIONS, LINEARS
from normfree.plan import Position

NamedModules = list[tuple[str, nn.Module]]
Padding = Literal["zeros", "reflect", "replicate", "circular"]


def named_sequential(parts: NamedModules) -> nn.Sequential:
    """Return a `Sequential` of named modules; repeated names are numbered, as in conv1, conv2."""
    out = nn.Sequential()
    totals, counts = Counter(name for name, _ in parts), Counter[str]()
    for name, module in parts:
        counts[name] += 1
        out.add_module(f"{name}{counts[name]}" if totals[name] > 1 else name, module)
    return out


@dataclass(frozen=True)
class BlockBuilder:
    """Makes modules by a method and a block form, for images (`spatial`), sequences (`tokens`) or vectors."""

    method: Method
    form: Form
    spatial: bool = True
    padding_mode: Padding = "zeros"
    tokens: bool = False

    def layer(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
        """Return a weight layer of the method's kind; vectors ignore kernel and stride."""
        kind, bias = self.method.weight, self.method.layer_bias
        if not self.spatial:
            return LINEARS[kind](inputs, outputs, bias=bias)
        padding = kernel // 2
        mode: Padding = self.padding_mode if padding else "zeros"
        return CONVOLUTIONS[kind](inputs, outputs, kernel, stride, padding, bias=bias, padding_mode=mode)

    def norm(self, channels: int) -> NamedModules:
        """Return the method's normalizer, or nothing."""
        if self.method.norm is None:
            return []
        return [("norm", normalizer(self.method.norm, channels, spatial=self.spatial, tokens=self.tokens))]

    def bias(self) -> NamedModules:
        """Return a learnable scalar bias, or nothing if the method has none."""
        return [("bias", ScalarBias())] if self.method.scalar_biases else []

    def activation(self) -> NamedModules:
        """Return an activation, after a scalar bias if the method has them."""
        return [*self.bias(), ("act", activation(self.method.activation, dropout=self.method.dropout))]

    def scalar(self, law: Law, position: Position) -> ScalarMultiplier | None:
        """Return the multiplier of a law at a position, or None if it is absent or always 1."""
        value = law.at(position)
        if value is None or (value == 1.0 and not law.learnable and not law.written):
            return None
        return ScalarMultiplier(value, learnable=law.learnable)

    def named_layer(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> NamedModules:
        """Return a weight layer with its usual name."""
        return [("conv" if self.spatial else "linear", self.layer(inputs, outputs, kernel, stride))]

    def stem(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, activated: bool = True, pool: bool = False
    ) -> nn.Module:
        """Return the layer before the first block.

        In the pre-activation form, its activation is in the first block; in the linear form, a method may omit it.
        """
        parts: NamedModules = [] if self.spatial else [("flatten", nn.Flatten())]
        parts += self.named_layer(inputs, outputs, kernel, stride)
        if activated and self.form != "pre":
            omitted = self.form == "linear" and not self.method.stem_relu
            parts += self.norm(outputs)
            parts += [("act", OmittedActivation())] if omitted else self.activation()
        if pool:
            parts.append(("pool", nn.MaxPool2d(3, 2, 1)))
        return named_sequential(parts)

    def head(self, channels: int) -> nn.Module:
        """Return the modules between the last block and the classifier: activation, pooling and scalar bias."""
        parts: NamedModules = [*self.norm(channels), *self.activation()] if self.form == "pre" else []
        if self.spatial:
            parts += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
        return named_sequential([*parts, *self.bias()])

    def block(
        self,
        widths: Sequence[int],
        kernels: Sequence[int],
        position: Position,
        *,
        stride: int = 1,
        strided: int = 0,
        option_a: bool = False,
    ) -> Residual:
        """Return a residual block.

        Args:
            widths: The channels of the branch, from its input to its output.
            kernels: The kernel size of each layer.
            position: The block's position in the network.
            stride: The stride of the block.
            strided: The number of the layer that has the stride, from 0.
            option_a: Whether a shortcut that changes the shape subsamples and adds zero channels instead of a
                convolution, if the method leaves the choice to the model.
        """
        method = self.method
        entry: NamedModules = [*self.norm(widths[0]), *self.activation()] if self.form == "pre" else []
        entry += self.bias()
        parts: NamedModules = []
        for i, ((inputs, outputs), kernel) in enumerate(zip(pairwise(widths), kernels, strict=True)):
            if i > 0:
                parts += [*self.activation(), *self.bias()]
            parts += self.named_layer(inputs, outputs, kernel, stride if i == strided else 1)
            if self.form != "pre" or i < len(kernels) - 1:
                parts += self.norm(outputs)
        shortcut = self._shortcut(widths[0], widths[-1], stride, position, option_a)
        reads_entry = shortcut is not None and method.shortcut_reads == "entry"
        if method.remove_branches and not reads_entry:
            entry = []  # no module reads it, so its parameters would never learn
        return self.sum(
            None if method.remove_branches else named_sequential(parts),
            position,
            shortcut,
            entry=entry,
            exit=self.activation()[-1:] if self.form == "post" else [],  # the sum's δ is its bias
            shortcut_reads_entry=reads_entry,
        )

    def sum(
        self,
        branch: nn.Module | None,
        position: Position,
        shortcut: nn.Module | None = None,
        *,
        entry: NamedModules,
        exit: NamedModules,
        shortcut_reads_entry: bool = False,
        with_delta: bool = True,
    ) -> Residual:
        """Return a residual sum with the method's scalars at a position."""
        rule = self.method.rule
        delta = rule.delta.at(position) if with_delta else None
        return Residual(
            branch,
            shortcut,
            entry=named_sequential(entry) if entry else None,
            exit=named_sequential(exit) if exit else None,
            c=self.scalar(rule.c, position),
            a=self.scalar(rule.a, position),
            alpha=self.scalar(rule.alpha, position),
            beta=self.scalar(rule.beta, position),
            delta=None if delta is None else ScalarBias(learnable=rule.delta.learnable),
            shortcut_reads_entry=shortcut_reads_entry,
            transition=position.transition,
        )

    def _shortcut(self, inputs: int, outputs: int, stride: int, position: Position, option_a: bool) -> nn.Module | None:
        """Return the shortcut, or None for the identity."""
        if not position.transition and self.method.shortcut != "conv everywhere":
            return None
        if position.transition and self.method.shortcut == "model" and option_a:
            return SubsamplePad(inputs, outputs, stride)
        parts = self.named_layer(inputs, outputs, 1, stride)
        return named_sequential(parts if self.form == "pre" else [*parts, *self.norm(outputs)])
