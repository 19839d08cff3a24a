"""What our models of images and vectors share: stem, body, head and classifier, and how their plan is stated."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from normfree.models.stated import Request as Request
from normfree.models.stated import Stated
from normfree.nn.normalizers import ACTIVATION_TYPES
from normfree.nn.residual import Residual, SubsamplePad
from normfree.nn.weight import WEIGHT_LAYERS
from normfree.plan import Branch, Layer, ResidualPlan, ShortcutKind, positions


class Network(Stated):
    """stem → body → head → linear classifier of `width` features."""

    def __init__(self, stem: nn.Module, body: nn.Sequential, head: nn.Module, width: int, request: Request) -> None:
        super().__init__(request)
        self.stem = stem
        self.body = body
        self.head = head
        self.classifier = nn.Linear(width, request.num_classes)
        self.input_shape = request.input_shape

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of inputs."""
        return self.classifier(self.head(self.body(self.stem(x))))  # type: ignore[no-any-return]

    @property
    def plan(self) -> ResidualPlan:
        """The plan, stated by walking the model's own modules."""
        return state_plan(self)

    def _outside(self, body: tuple[Layer, ...], *, stem_activated_out: bool, activated: bool) -> ResidualPlan:
        """A plan without branches around a body that ends (un)activated."""
        stem, _ = walk("stem", self.stem, False, after=stem_activated_out)
        _, activated = walk("head", self.head, activated)
        classifier, _ = walk("classifier", self.classifier, activated)
        return ResidualPlan(stem=stem, body=body, classifier=classifier)


def state_plan(model: Network) -> ResidualPlan:
    """Walk stem, residual blocks, head and classifier in the order the signal takes, and note every weight layer.

    Follows one bit along the way: whether the signal comes out of an activation.
    """
    residuals = [(f"body.{name}", m) for name, m in model.body.named_modules() if isinstance(m, Residual)]
    if not residuals:
        return _plain_plan(model)
    first_entry_only = residuals[0][1].shortcut_reads_entry and _has_activation(residuals[0][1].entry)
    stem, activated = walk("stem", model.stem, False, after=first_entry_only)
    stages = _stages(residuals)
    branches = []
    for (name, block), position in zip(
        residuals, positions(stages, [block.transition for _, block in residuals]), strict=True
    ):
        _, entered = walk(f"{name}.entry", block.entry, activated)
        source = entered if block.shortcut_reads_entry else activated
        shortcut, _ = walk(f"{name}.shortcut", block.shortcut, source)
        layers: tuple[Layer, ...] = ()
        if block.branch is not None:
            layers, _ = walk(f"{name}.branch", block.branch, entered)
        branches.append(Branch(name, position, layers, _kind(block), shortcut, home=name))
        activated = _has_activation(block.exit)
    _, activated = walk("head", model.head, activated)
    classifier, _ = walk("classifier", model.classifier, activated)
    return ResidualPlan(tuple(branches), stem=stem, classifier=classifier)


def _plain_plan(model: Network) -> ResidualPlan:
    """The plan of a network whose layers follow one another."""
    _, activated = walk("stem", model.stem, False)
    body, activated = walk("body", model.body, activated, after=_has_activation(model.head))
    return model._outside(body, stem_activated_out=False, activated=activated)


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


def _has_activation(module: nn.Module) -> bool:
    return any(isinstance(leaf, ACTIVATION_TYPES) for _, leaf in _leaves("", module))


def _kind(block: Residual) -> ShortcutKind:
    if isinstance(block.shortcut, SubsamplePad):
        return "subsample"
    return "identity" if isinstance(block.shortcut, nn.Identity) else "projection"


def _stages(residuals: list[tuple[str, Residual]]) -> list[int]:
    """The number of blocks of each stage; a stage is a child of the body."""
    sizes: dict[str, int] = {}
    for name, _ in residuals:
        stage = name.split(".")[1]
        sizes[stage] = sizes.get(stage, 0) + 1
    return list(sizes.values())
