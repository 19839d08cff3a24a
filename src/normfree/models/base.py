"""Base classes of the models: `BaseModel`, and `Network` for image models and MLPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from normfree.methods import Form, Method, Skip
from normfree.models.builder import Padding
from normfree.nn.normalizers import ACTIVATION_TYPES
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.scalar_folding import Stream
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import Branch, Layer, ResidualPlan, ShortcutKind, positions


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
        return f"{self.name}, method={self.method.spec}, form={self.form}"


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

    def _outside(self, body: tuple[Layer, ...], *, stem_activated_out: bool, activated: bool) -> ResidualPlan:
        """Return a plan without branches; `activated` is whether the body ends with an activation."""
        stem, _ = sequence_layers("stem", self.stem, False, after=stem_activated_out)
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
            found.append(Layer(name, activated_in=activated))
            activated, open_end = False, True
        elif isinstance(leaf, ACTIVATION_TYPES):
            if open_end:
                found[-1] = Layer(found[-1].name, found[-1].activated_in, activated_out=True)
            activated, open_end = True, False
    if open_end and after:
        found[-1] = Layer(found[-1].name, found[-1].activated_in, activated_out=True)
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
