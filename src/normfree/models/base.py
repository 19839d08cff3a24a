"""What every model of ours has: a name, the method and block form it was built with, and a plan that it states."""

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
    """What a model is built from besides its own shape.

    `input_shape` is (C, H, W), (features,), or () where tokens come in, of which there are `vocabulary`.
    """

    name: str
    method: Method
    form: Form
    input_shape: tuple[int, ...]
    num_classes: int
    padding_mode: Padding = "zeros"
    vocabulary: int = 0
    dropout: float = 0.0


class BaseModel(nn.Module):
    """A model that states its plan: a function of the names, types and settings of its modules alone."""

    skip: Skip = "residual"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.name = config.name
        self.method = config.method
        self.form = config.form

    @property
    def plan(self) -> ResidualPlan:
        """The plan, stated by walking the model's own modules."""
        raise NotImplementedError

    def streams(self) -> list[Stream]:
        """Its residual streams through which a constant passes unchanged, where it has some."""
        return []

    def extra_repr(self) -> str:
        """Name, method and form."""
        return f"{self.name}, method={self.method.spec}, form={self.form}"


class Network(BaseModel):
    """stem → body → head → linear classifier of `width` features; the body is stages of residual blocks."""

    def __init__(self, stem: nn.Module, body: nn.Sequential, head: nn.Module, width: int, config: ModelConfig) -> None:
        super().__init__(config)
        self.stem = stem
        self.body = body
        self.head = head
        self.classifier = nn.Linear(width, config.num_classes)
        self.input_shape = config.input_shape

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of inputs."""
        return self.classifier(self.head(self.body(self.stem(x))))  # type: ignore[no-any-return]

    @property
    def plan(self) -> ResidualPlan:
        """The plan, stated by walking stem, residual blocks, head and classifier in the order the signal takes.

        Follows one bit along the way: whether the signal comes out of an activation.
        """
        blocks = [(f"body.{name}", m) for name, m in self.body.named_modules() if isinstance(m, Residual)]
        placed = positions(_stages(name for name, _ in blocks), [block.transition for _, block in blocks])
        first = blocks[0][1]
        read_through_entry = first.shortcut_reads_entry and has_activation(first.entry)
        stem, activated = walk("stem", self.stem, False, after=read_through_entry)
        branches = []
        for (name, block), position in zip(blocks, placed, strict=True):
            _, entered = walk(f"{name}.entry", block.entry, activated)
            shortcut, _ = walk(f"{name}.shortcut", block.shortcut, entered if block.shortcut_reads_entry else activated)
            layers: tuple[Layer, ...] = ()
            if block.branch is not None:
                layers, _ = walk(f"{name}.branch", block.branch, entered)
            branches.append(Branch(name, position, layers, _kind(block), shortcut, home=name))
            activated = has_activation(block.exit)
        _, activated = walk("head", self.head, activated)
        classifier, _ = walk("classifier", self.classifier, activated)
        return ResidualPlan(tuple(branches), stem=stem, classifier=classifier)

    def _outside(self, body: tuple[Layer, ...], *, stem_activated_out: bool, activated: bool) -> ResidualPlan:
        """A plan without branches around a body that ends (un)activated."""
        stem, _ = walk("stem", self.stem, False, after=stem_activated_out)
        _, activated = walk("head", self.head, activated)
        classifier, _ = walk("classifier", self.classifier, activated)
        return ResidualPlan(stem=stem, body=body, classifier=classifier)


def _leaves(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules without children, in the order of registration, which is the order of the signal in a sequence."""
    for name, child in module.named_modules(prefix=prefix):
        if next(child.children(), None) is None:
            yield name, child


def weight_layer_names(prefix: str, module: nn.Module) -> Iterator[str]:
    """The qualified names of the weight layers inside a module."""
    return (name for name, leaf in _leaves(prefix, module) if isinstance(leaf, WEIGHT_LAYERS))


def walk(prefix: str, module: nn.Module, activated: bool, *, after: bool = False) -> tuple[tuple[Layer, ...], bool]:
    """The weight layers of a sequence that starts with an (un)activated signal, and whether it ends activated.

    `after` says whether what follows the sequence begins with an activation.
    """
    found: list[Layer] = []
    open_end = False  # the last layer has met no activation yet
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
    """Whether there is an activation inside a module."""
    return any(isinstance(leaf, ACTIVATION_TYPES) for _, leaf in _leaves("", module))


def _kind(block: Residual) -> ShortcutKind:
    if isinstance(block.shortcut, SubsamplePad):
        return "subsample"
    return "identity" if isinstance(block.shortcut, nn.Identity) else "projection"


def _stages(blocks: Iterable[str]) -> list[int]:
    """The number of blocks of each stage, which is a child of the body, from their names in order."""
    return [*Counter(name.split(".")[1] for name in blocks).values()]
