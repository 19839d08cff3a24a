"""The base classes of the models, and `BlockBuilder`, which makes the modules of a method.

A branch is always layer (activation, layer)…; the block form only sets the position of the activation around it.

    post     x ↦ act(h(x) + f(x))       He 2016a; Fixup's CIFAR and ImageNet networks
    pre      x ↦ h(x) + f(act(x))       He 2016b; robust, normdead
    linear   x ↦ h(x) + f(x)            wninit: nothing between the blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from normfree.methods import Form, Law, Method, Skip
from normfree.methods.method_registry import short_spec
from normfree.nn.normalizers import ACTIVATION_TYPES, OmittedActivation, activation, normalizer
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.training_scalar_folding import Stream
from normfree.nn.weight_layers import LINEARS, WEIGHT_LAYERS, convolution
from normfree.plan import Branch, Layer, Position, ResidualPlan, ShortcutKind, positions

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
        kind, bias = self.method.weight_kind, self.method.layer_bias
        if not self.spatial:
            return LINEARS[kind](inputs, outputs, bias=bias)
        padding = kernel // 2
        mode: Padding = self.padding_mode if padding else "zeros"
        return convolution(kind, inputs, outputs, kernel, stride, padding, bias=bias, padding_mode=mode)

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
        if value is None or (value == 1.0 and not law.learnable and not law.set_by_initializer):
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of a model besides its shape.

    `input_shape` is (C, H, W), (features,), or () for models of tokens. `vocabulary` is the number of tokens.
    `inner_dropout` is the dropout between the layers of a feed-forward branch; None takes `dropout`.
    """

    name: str
    method: Method
    form: Form
    input_shape: tuple[int, ...]
    num_classes: int
    padding_mode: Padding = "zeros"
    vocabulary: int = 0
    dropout: float = 0.0
    inner_dropout: float | None = None


class BaseModel(nn.Module):
    """A model that knows its name, method, block form and residual plan."""

    skip: Skip = "residual"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.name = config.name
        self.method = config.method
        self.form = config.form

    @property
    def plan(self) -> ResidualPlan:
        """The plan, a function of the names, types and settings of the model's modules."""
        raise NotImplementedError

    def streams(self) -> list[Stream]:
        """Return the residual streams that pass constants through unchanged, if any; see scalar folding."""
        return []

    def extra_repr(self) -> str:
        """Return name, method and form."""
        return f"{self.name}, method={short_spec(self.method.spec)}, form={self.form}"


class Network(BaseModel):
    """stem → body → head → linear classifier of `width` features; the body has stages of residual blocks."""

    def __init__(self, stem: nn.Module, body: nn.Sequential, head: nn.Module, width: int, config: ModelConfig) -> None:
        super().__init__(config)
        self.stem = stem
        self.body = body
        self.head = head
        self.classifier = nn.Linear(width, config.num_classes)
        self.input_shape = config.input_shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch."""
        return self.classifier(self.head(self.body(self.stem(x))))  # type: ignore[no-any-return]

    @property
    def plan(self) -> ResidualPlan:
        """The plan, from stem, residual blocks, head and classifier in the order of the signal.

        `activated` is whether the signal comes out of an activation.
        """
        blocks = [(f"body.{name}", m) for name, m in self.body.named_modules() if isinstance(m, Residual)]
        placed = positions(_stage_sizes(name for name, _ in blocks), [block.transition for _, block in blocks])
        first = blocks[0][1]
        read_through_entry = first.shortcut_reads_entry and has_activation(first.entry)
        stem, activated = sequence_layers("stem", self.stem, False, after=read_through_entry)
        branches = []
        for (name, block), position in zip(blocks, placed, strict=True):
            _, entered = sequence_layers(f"{name}.entry", block.entry, activated)
            source = entered if block.shortcut_reads_entry else activated
            shortcut, _ = sequence_layers(f"{name}.shortcut", block.shortcut, source)
            layers: tuple[Layer, ...] = ()
            if block.branch is not None:
                layers, _ = sequence_layers(f"{name}.branch", block.branch, entered)
            branches.append(Branch(name, position, layers, _shortcut_kind(block), shortcut, home=name))
            activated = has_activation(block.exit)
        _, activated = sequence_layers("head", self.head, activated)
        classifier, _ = sequence_layers("classifier", self.classifier, activated)
        return ResidualPlan(tuple(branches), stem=stem, classifier=classifier)

    def _outside(self, body: tuple[Layer, ...], *, stem_feeds_activation: bool, activated: bool) -> ResidualPlan:
        """Return a plan without branches; `activated` is whether the body ends with an activation."""
        stem, _ = sequence_layers("stem", self.stem, False, after=stem_feeds_activation)
        _, activated = sequence_layers("head", self.head, activated)
        classifier, _ = sequence_layers("classifier", self.classifier, activated)
        return ResidualPlan(stem=stem, body=body, classifier=classifier)


def _leaves(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules without children, in registration order (in a `Sequential`, execution order).

    `named_modules` takes four times as long, which is seconds for thousands of blocks.
    """
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not children:
        yield prefix, module
    for name, child in children:
        yield from _leaves(f"{prefix}.{name}" if prefix else name, child)


def every_module(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a module and all modules inside it; `modules()` is slow for thousands of blocks."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from every_module(child)


def weight_layer_names(prefix: str, module: nn.Module) -> Iterator[str]:
    """Return the qualified names of the weight layers inside a module."""
    return (name for name, leaf in _leaves(prefix, module) if isinstance(leaf, WEIGHT_LAYERS))


def sequence_layers(
    prefix: str, module: nn.Module, activated: bool, *, after: bool = False
) -> tuple[tuple[Layer, ...], bool]:
    """Return the weight layers of a sequence, and whether it ends with an activation.

    `activated` is whether the sequence's input comes out of an activation, `after` whether the module that follows the
    sequence begins with one.
    """
    found: list[Layer] = []
    open_end = False  # no activation has followed the last layer yet
    for name, leaf in _leaves(prefix, module):
        if isinstance(leaf, WEIGHT_LAYERS):
            found.append(Layer(name, reads_activation=activated))
            activated, open_end = False, True
        elif isinstance(leaf, ACTIVATION_TYPES):
            if open_end:
                found[-1] = Layer(found[-1].name, found[-1].reads_activation, feeds_activation=True)
            activated, open_end = True, False
    if open_end and after:
        found[-1] = Layer(found[-1].name, found[-1].reads_activation, feeds_activation=True)
    return tuple(found), activated


def has_activation(module: nn.Module) -> bool:
    """Whether a module contains an activation."""
    return any(isinstance(leaf, ACTIVATION_TYPES) for _, leaf in _leaves("", module))


def _shortcut_kind(block: Residual) -> ShortcutKind:
    if isinstance(block.shortcut, SubsamplePad):
        return "subsample"
    return "identity" if isinstance(block.shortcut, nn.Identity) else "projection"


def _stage_sizes(blocks: Iterable[str]) -> list[int]:
    """Return the number of blocks of each stage, a child of the body, given the blocks' names in order."""
    return [*Counter(name.split(".")[1] for name in blocks).values()]
