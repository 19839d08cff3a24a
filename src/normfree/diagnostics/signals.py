"""The facts about a model that one forward and one backward pass give, as plain numbers.

`propagation.py` and `fault_localization.py` measure them, and `verdict.py` judges them. Numbers that
follow from others are computed once, when a record is made.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from normfree.plan import ResidualPlan

NUMBERS = re.compile(r"\d+")  # in the names of modules and sums; without them, the names of repeated blocks are equal


@dataclass(frozen=True)
class Stats:
    """Squared mean, variance and norm of one tensor; `power` is the second moment."""

    mean_square: float
    variance: float
    norm: float
    power: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", self.mean_square + self.variance)


@dataclass(frozen=True)
class SumSignal:
    """The signal at one residual sum: forward and backward, at the sum, the branch's end and the shortcut.

    In a network without sums, it is the signal at the output of a weight layer, without a branch and a shortcut.

    Attributes:
        learns: Whether a weight or multiplier of the branch got a gradient other than zero, or the branch has none.
        around: The sum whose branch contains this one.
        layer: Whether this is the output of a weight layer.
        reads: The layers whose outputs it reads.
        read_by_output: Whether the output of the network reads it directly.
        shape: The shape of the sum.
        normalized: Whether a layer was measured behind its normalizer.
        variation: The variance over the batch relative to the second moment, the mean over positions and channels: 0
            if all samples are alike.
        token_variation: The same over the second dimension of a tensor with three.
        level: The size of the forward signal: the variance of a sum, the second moment of a layer's output. In a deep
            ReLU network all samples become alike, so that the variance over them falls although the signal is
            preserved. Shortcuts prevent that.
        gradient_level: The size of the gradient: its variance at a sum, its squared norm per sample at a layer. The
            norm does not change with the resolution, which differs from layer to layer without blocks.
    """

    name: str
    stage: int
    transition: bool
    sum: Stats
    branch: Stats
    shortcut: Stats
    sum_gradient: Stats
    branch_gradient: Stats
    shortcut_gradient: Stats
    learns: bool = True
    around: str | None = None
    layer: bool = False
    reads: tuple[str, ...] = ()
    read_by_output: bool = False
    shape: tuple[int, ...] = ()
    normalized: bool = False
    variation: float = field(default=1.0, compare=False)
    token_variation: float = field(default=1.0, compare=False)
    level: float = field(init=False, repr=False, compare=False)
    gradient_level: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        forward = self.sum.power if self.layer else self.sum.variance
        object.__setattr__(self, "level", forward)
        backward = self.sum_gradient.norm**2 if self.layer else self.sum_gradient.variance
        object.__setattr__(self, "gradient_level", backward)


@dataclass(frozen=True)
class LayerSignal:
    """The norms of a layer's weight and of its gradient; a composed weight counts with all its parts.

    `units` is the number of outputs, `dead` the fraction of them whose weights get no gradient while others do, and
    `equal` the fraction of filters that equal another one. Both are 0 for composed weights, whose rows are not units.
    `frozen`: whether the weight requires no gradient. `ratio` is the gradient norm over the weight norm: the relative
    size of an SGD step with learning rate 1.
    """

    name: str
    weight_norm: float
    gradient_norm: float
    units: int = 0
    dead: float = 0.0
    equal: float = 0.0
    frozen: bool = field(default=False, compare=False)
    ratio: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.gradient_norm / self.weight_norm if self.weight_norm else math.inf)


INPUT_OFFSET = 5.0  # mean over standard deviation; images in [0, 1] have 0.4 to 2.5
# Root mean squares. Normalized images have 1, images in [0, 1] 0.3 to 0.7.
INPUT_SMALL = 0.01  # images that were divided by 255 twice have 0.002
INPUT_LARGE = 10.0  # bytes have 150


@dataclass(frozen=True)
class InputFacts:
    """The main input: the largest tensor of floating-point numbers among the arguments.

    Attributes:
        finite: Whether no argument holds NaN or infinity; a mask of 0 and -∞ is finite.
        mean: The mean of all numbers, NaN without such an input.
        deviation: Their standard deviation.
        alike: Whether all samples of the batch are the same.
        dtype: The name of the type, such as 'float32'; '' without such an input.
        variation: The variance over the batch relative to the second moment, as in `SumSignal`.
        lowest: The smallest number, of targets only.
        highest: The largest number.
        size: The root mean square.
    """

    finite: bool = True
    mean: float = math.nan
    deviation: float = math.nan
    alike: bool = False
    dtype: str = ""
    variation: float = 1.0
    lowest: float = math.nan
    highest: float = math.nan
    size: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.hypot(self.mean, self.deviation))

    @property
    def is_unusual(self) -> bool:
        """Whether the scale is far from 1, or the mean far from 0."""
        return self.size < INPUT_SMALL or self.size > INPUT_LARGE or abs(self.mean) > INPUT_OFFSET * self.deviation


CONSTANT = 1e-12  # variance over the batch relative to the second moment: no more than rounding
SURE = 0.9  # a mean of the largest probability, above which the gradient of a cross-entropy may be rounded to zero


@dataclass(frozen=True)
class OutputFacts:
    """The output, as logits of classes where its shape allows that.

    Attributes:
        classes: The number of classes: the second dimension, or the last of a sequence (N, T, C); 0 without classes.
        mean_square: The second moment.
        chance_loss: The mean cross-entropy over all classes as targets. It is log C if all logits are equal.
        confidence: The mean of the largest probability.
        variation: The variance over the batch relative to the second moment.
        favourite: The class that is the most likely one for every sample and position, -1 if there is none.
        probabilities: Whether the output is not negative and adds up to 1, so that it has been through a softmax.
    """

    classes: int = 0
    mean_square: float = math.nan
    chance_loss: float = math.nan
    confidence: float = math.nan
    variation: float = math.nan
    favourite: int = -1
    probabilities: bool = False


@dataclass(frozen=True)
class Fact:
    """Something about one place of a model.

    A fact whose kind is the word of a finding, in `rules/findings.toml`, is a fault: something that holds for every
    sound model does not hold for this one. The table also has the ranges in which the values of other kinds are faults.

    Attributes:
        kind: The word of a finding, or 'bias' and 'largest bias' of the classifier, 'dropout', 'embedding', 'gate',
            'noise', 'overflow', 'read', 'recurrence', 'running statistics', 'scale', 'openness' for a function that can
            be saturated, 'even attention' for one whose weights are equal, 'bounded logits', 'no softmax', 'wrong axis
            of classes' and 'targets out of range' for a loss that does not fit the output, 'targets unused' for a loss
            of the output alone, 'outputs without a loss' for their number, or 'variation ends' for the first module
            from which on all samples are the same.
        place: The module, 'before' the module that reads the result, 'the input' or 'the loss'.
        detail: A name or a few words, such as the function or the gate.
        value: The number: a root mean square (bias, embedding, read, scale), a probability (dropout), the mean of a
            gate at its biases (gate), the largest eigenvalue (recurrence), the difference of two passes over
            that of two samples (noise), or the mean square of the derivative relative to the largest one (openness).
        mean: The mean of the output of a function or of the gains of a normalizer, what is read over its deviation, or
            a second number.
    """

    kind: str
    place: str
    detail: str = ""
    value: float = math.nan
    mean: float = math.nan


@dataclass(frozen=True)
class GraphFacts:
    """The functions of a forward pass.

    Attributes:
        nonlinear: Whether a function is neither linear nor a normalizer.
        activation: The most frequent activation function.
        output: The function that made the output, such as 'Sigmoid'; '' if it is not known.
        output_place: The layer before it.
        loss: The functions between the loss and the output.
        custom: Whether a function has a derivative that the user wrote (`torch.autograd.Function`).
        reached: The parameters that any output depends on.
    """

    nonlinear: bool = False
    activation: str = ""
    output: str = ""
    output_place: str = ""
    loss: tuple[str, ...] = ()
    custom: bool = False
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ModuleFact:
    """One place of a module.

    Attributes:
        name: The module.
        kind: Its class.
        role: 'activation', 'normalizer', 'layer' for one with weights of its own, 'list' for the same module at another
            place of a list, 'shared' for a frozen module under another name, or ''.
        training: Whether it is in training mode.
        same_as: The earlier module that is the same one, or has the same weight.
    """

    name: str
    kind: str
    role: str
    training: bool
    same_as: str = ""


@dataclass(frozen=True)
class Gain:
    """One call of an innermost module.

    Attributes:
        name: The module.
        kind: Its class.
        factor: The second moment of its output over that of its input; over 1 for an embedding or a normalizer.
        normalized: Whether a normalizer comes next, which undoes the scale.
    """

    name: str
    kind: str
    factor: float
    normalized: bool = False


@dataclass(frozen=True, repr=False)
class Signal:
    """The signal of a model in one forward and one backward pass.

    Attributes:
        sums: The statistics at every residual sum, in the order of the plan; in a network without sums, at the output
            of every call of a hidden weight layer (`SumSignal.layer`).
        layers: The norms of weights and gradients of every weight layer, its dead units and equal filters.
        injected: The places where a random gradient was injected, '' if the gradient came from a loss. 'output' is
            the model's output, 'outputs' are several that feed no other output, 'features' is the input of a classifier
            whose weight is zero, and 'memory' the output of an encoder that all attentions of the decoder multiply by
            zero.
        loss: The loss, NaN if there was none.
        plan: The residual plan of the model.
        unmeasured: The first sum whose forward signal is not finite, or 'the output'; '' if all are finite. Gradients
            at such sums are NaN, and all gradients are if the output is not finite.
        output: The mean square of the model's output.
        missing_sums: The modules without a residual sum that return the shape they get, while most modules like them
            have a sum.
        constant_sums: Modules like these that add the same to every sample.
        inputs: The main input.
        head: The output, and the loss by chance.
        broken: The parameters and buffers that are not finite; empty if the signal is finite.
        origin: The innermost module that made non-finite numbers out of finite ones, or zeros out of others, or
            'the loss'; '' if there is none.
        origin_kind: The class of that module.
        origin_function: The function that made the numbers that are not finite, '' if it is not known.
        origin_reads: What that function read: a layer, or a function behind one.
        cut_layers: The last layers outside of branches that change the output although they get no gradient.
        half: Whether the network computes in float16.
        normalized: Whether there is a normalizer for at least every second weight layer.
        graph: The functions of the forward pass.
        broadcast: Whether output and targets differ in shape, so that the loss compares every sample with every other.
        targets: The targets, if they are a tensor.
        zero_loss: The loss of an output of zeros, NaN if it is not known.
        modules: The innermost modules, and those that stand in a list twice.
        steps: The length of the input's second dimension.
        only_frozen_used: Whether every parameter with a gradient is frozen.
        unreached: The modules with a parameter that requires a gradient, if only frozen ones get one.
        facts: The facts about single places, and the checks that failed.
        loss_cut: Whether the loss has no gradient at all, or one of zero at the output.
        unused: The modules that take no part in the output, although modules like them do.
        gains: The gains of the innermost modules; empty unless the signal was looked at again.
        gradient_origin: The module with a derivative that is not finite, and its function in `gradient_function`.
        outputs: The number of outputs with a gradient.
        plain: Whether the network has no residual sums, and was measured at its weight layers.
        by_kind: The facts of each kind.
        zero_layers: The layers whose weights are all zero.
        frozen_layers: The layers whose weights require no gradient.
    """

    sums: tuple[SumSignal, ...]
    layers: tuple[LayerSignal, ...]
    injected: str = ""
    loss: float = math.nan
    plan: ResidualPlan = field(default_factory=ResidualPlan)
    unmeasured: str = ""
    output: float = math.nan
    missing_sums: tuple[str, ...] = ()
    constant_sums: tuple[str, ...] = ()
    inputs: InputFacts = field(default_factory=InputFacts)
    head: OutputFacts = field(default_factory=OutputFacts)
    broken: tuple[str, ...] = ()
    origin: str = ""
    origin_kind: str = ""
    origin_function: str = ""
    origin_reads: str = ""
    cut_layers: tuple[str, ...] = ()
    half: bool = False
    normalized: bool = False
    graph: GraphFacts = field(default_factory=GraphFacts)
    broadcast: bool = False
    targets: InputFacts = field(default_factory=InputFacts)
    zero_loss: float = math.nan
    modules: tuple[ModuleFact, ...] = ()
    steps: int = 0
    only_frozen_used: bool = False
    unreached: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    loss_cut: bool = False
    unused: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    gradient_origin: str = ""
    gradient_function: str = ""
    outputs: int = 1
    plain: bool = field(init=False, compare=False)
    by_kind: Mapping[str, list[Fact]] = field(init=False, compare=False)
    zero_layers: tuple[str, ...] = field(init=False, compare=False)
    frozen_layers: tuple[str, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_kind: defaultdict[str, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            by_kind[fact.kind].append(fact)
        object.__setattr__(self, "by_kind", by_kind)
        object.__setattr__(self, "plain", bool(self.sums) and self.sums[0].layer)
        object.__setattr__(self, "zero_layers", tuple(s.name for s in self.layers if s.weight_norm == 0))
        object.__setattr__(self, "frozen_layers", tuple(s.name for s in self.layers if s.frozen))

    def series(self, part: str, statistic: str = "variance") -> list[float]:
        """List one statistic over all sums.

        Args:
            part: 'sum', 'branch' or 'shortcut', or one of them followed by '_gradient'.
            statistic: 'variance', 'mean_square' or 'norm'.

        Returns:
            One number for each residual sum, in the order of the plan.
        """
        return [getattr(getattr(s, part), statistic) for s in self.sums]

    def to_json(self) -> dict[str, Any]:
        """Return the signal as plain data; numbers may be NaN or infinite."""
        return {
            "injected": self.injected,
            "loss": self.loss,
            "unmeasured": self.unmeasured,
            "output": self.output,
            "unsummed": list(self.missing_sums),  # key kept for compatibility with 0.1
            "inputs": asdict(self.inputs),
            "head": asdict(self.head),
            "sums": [asdict(s) for s in self.sums],
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __repr__(self) -> str:
        loss = "" if math.isnan(self.loss) else f", loss {self.loss:.4g}"
        sums = "no residual sums" if self.plain else f"{len(self.sums)} residual sums"
        return f"Signal({sums}, {len(self.layers)} weight layers{loss})"
