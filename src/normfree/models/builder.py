"""The parts that a method builds a network from: weight layers, normalizers, activations, scalars, residual blocks.

Block forms are one builder: a branch is always layer (activation, layer)…, and the form only says where the activation
around it stands.

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
from normfree.nn.normalizers import activation, normalizer
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import CONVOLUTIONS, LINEARS
from normfree.plan import Position

Named = list[tuple[str, nn.Module]]
Padding = Literal["zeros", "reflect", "replicate", "circular"]


def chain(parts: Named) -> nn.Sequential:
    """A sequence whose parts have names; a name that comes again is numbered."""
    out = nn.Sequential()
    totals, counts = Counter(name for name, _ in parts), Counter[str]()
    for name, module in parts:
        counts[name] += 1
        out.add_module(f"{name}{counts[name]}" if totals[name] > 1 else name, module)
    return out


@dataclass(frozen=True)
class BlockBuilder:
    """A method's parts, for images (`spatial`), vectors or sequences (`tokens`), in one block form."""

    method: Method
    form: Form
    spatial: bool = True
    padding_mode: Padding = "zeros"
    tokens: bool = False

    def layer(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
        """A weight layer of the method's kind; of vectors the kernel and stride do not matter."""
        kind, bias = self.method.weight, self.method.layer_bias
        if not self.spatial:
            return LINEARS[kind](inputs, outputs, bias=bias)
        padding = kernel // 2
        mode: Padding = self.padding_mode if padding else "zeros"
        return CONVOLUTIONS[kind](inputs, outputs, kernel, stride, padding, bias=bias, padding_mode=mode)

    def norm(self, channels: int) -> Named:
        """The method's normalizer, where it has one."""
        if self.method.norm is None:
            return []
        return [("norm", normalizer(self.method.norm, channels, spatial=self.spatial, tokens=self.tokens))]

    def bias(self) -> Named:
        """A learnable scalar bias, where the method has them."""
        return [("bias", ScalarBias())] if self.method.scalar_biases else []

    def activation(self) -> Named:
        """An activation, after a scalar bias where the method has them."""
        return [*self.bias(), ("act", activation(self.method.activation, dropout=self.method.dropout))]

    def scalar(self, law: Law, position: Position) -> ScalarMultiplier | None:
        """The multiplier that a law asks for at a position; None where it is absent, or neutral and stays so."""
        value = law.at(position)
        if value is None or (value == 1.0 and not law.learnable and not law.written):
            return None
        return ScalarMultiplier(value, learnable=law.learnable)

    def named_layer(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> Named:
        """A weight layer under its usual name."""
        return [("conv" if self.spatial else "linear", self.layer(inputs, outputs, kernel, stride))]

    def stem(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, activated: bool = True, pool: bool = False
    ) -> nn.Module:
        """The layer before the first block; its activation belongs to the first block in the pre-activation form."""
        parts: Named = [] if self.spatial else [("flatten", nn.Flatten())]
        parts += self.named_layer(inputs, outputs, kernel, stride)
        if activated and self.form != "pre":
            parts += [*self.norm(outputs), *self.activation()]
        if pool:
            parts.append(("pool", nn.MaxPool2d(3, 2, 1)))
        return chain(parts)

    def head(self, channels: int) -> nn.Module:
        """What stands between the last block and the classifier: the last activation, pooling, and a scalar bias."""
        parts: Named = [*self.norm(channels), *self.activation()] if self.form == "pre" else []
        if self.spatial:
            parts += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
        return chain([*parts, *self.bias()])

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
        """One residual block with the branch widths[0] → … → widths[-1], whose layer number `strided` has the stride.

        `option_a` is the model's own choice for changes of shape: subsampling and zero channels instead of a
        convolution.
        """
        method = self.method
        entry: Named = [*self.norm(widths[0]), *self.activation()] if self.form == "pre" else []
        entry += self.bias()
        parts: Named = []
        for i, ((inputs, outputs), kernel) in enumerate(zip(pairwise(widths), kernels, strict=True)):
            if i > 0:
                parts += [*self.activation(), *self.bias()]
            parts += self.named_layer(inputs, outputs, kernel, stride if i == strided else 1)
            if self.form != "pre" or i < len(kernels) - 1:
                parts += self.norm(outputs)
        shortcut = self._shortcut(widths[0], widths[-1], stride, position, option_a)
        reads_entry = shortcut is not None and method.shortcut_reads == "entry"
        if method.remove_branches and not reads_entry:
            entry = []  # nothing reads it, so its parameters would never learn
        return self.sum(
            None if method.remove_branches else chain(parts),
            position,
            shortcut,
            entry=entry,
            exit=self.activation()[-1:] if self.form == "post" else [],  # its bias is the sum's own δ
            shortcut_reads_entry=reads_entry,
        )

    def sum(
        self,
        branch: nn.Module | None,
        position: Position,
        shortcut: nn.Module | None = None,
        *,
        entry: Named,
        exit: Named,
        shortcut_reads_entry: bool = False,
    ) -> Residual:
        """A residual sum with the scalars that the method has at a position."""
        rule = self.method.rule
        return Residual(
            branch,
            shortcut,
            entry=chain(entry) if entry else None,
            exit=chain(exit) if exit else None,
            c=self.scalar(rule.c, position),
            a=self.scalar(rule.a, position),
            alpha=self.scalar(rule.alpha, position),
            beta=self.scalar(rule.beta, position),
            delta=None if rule.delta.at(position) is None else ScalarBias(learnable=rule.delta.learnable),
            shortcut_reads_entry=shortcut_reads_entry,
            transition=position.transition,
        )

    def _shortcut(self, inputs: int, outputs: int, stride: int, position: Position, option_a: bool) -> nn.Module | None:
        """None for the identity."""
        if not position.transition and self.method.shortcut != "conv everywhere":
            return None
        if position.transition and self.method.shortcut == "model" and option_a:
            return SubsamplePad(inputs, outputs, stride)
        parts = self.named_layer(inputs, outputs, 1, stride)
        return chain(parts if self.form == "pre" else [*parts, *self.norm(outputs)])
