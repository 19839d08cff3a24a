"""The `Method` record: its residual rule, layers, initializer and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from normfree.errors import unknown_name
from normfree.nn.normalizers import ActivationName, NormName
from normfree.nn.weight_layers import WeightKind
from normfree.plan import Position

if TYPE_CHECKING:
    from normfree.methods.initialize import InitContext

Form = Literal["post", "pre", "linear"]
"""The position of a residual block's activation: after the sum, before the branch, or only inside the branch."""
FORMS: tuple[Form, ...] = ("post", "pre", "linear")

Skip = Literal["residual", "none", "dense", "highway", "sequence"]
"""The skip connections of a network: residual sums, none, concatenation or gates; "sequence" is residual sums around
the attention and feed-forward layers of a Transformer."""
SKIPS_WITHOUT_SEQUENCES: tuple[Skip, ...] = ("residual", "none", "dense", "highway")
WITH_SEQUENCES: tuple[Skip, ...] = (*SKIPS_WITHOUT_SEQUENCES, "sequence")
RESIDUAL_SUMS: tuple[Skip, ...] = ("residual", "sequence")

Kind = Literal["initialization", "norm-free", "normalized"]


@dataclass(frozen=True)
class Law:
    """One scalar of the residual equation: a number, or a function of the branch's position.

    A function returns None at positions without the scalar. Use a named function, or a frozen dataclass with
    `__call__`, so that the method can be pickled and compared; a lambda works too if you need neither. `text` is the
    scalar's entry in the table of methods. If `set_by_initializer`, the initializer writes the value, because it
    depends on the whole plan or on data.
    """

    value: float | Callable[[Position], float | None]
    text: str = ""
    learnable: bool = False
    set_by_initializer: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            if callable(self.value):
                raise ValueError("expected a text for a law that is a function, got none; pass text='…'")
            object.__setattr__(self, "text", f"learnable, {self.value:g}" if self.learnable else f"{self.value:g}")

    def at(self, position: Position) -> float | None:
        """Return the scalar's initial value at a position, or None if the scalar is absent there."""
        return self.value(position) if callable(self.value) else self.value


def _absent(position: Position) -> None:
    return None


ONE = Law(1.0)
NONE = Law(_absent, text="none")
SQRT_HALF = Law(0.5**0.5, text="√½")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The scalars of p(c · (a · h(s) + β · f(e(α · x)) + δ)) at every position."""

    c: Law = ONE
    a: Law = ONE
    alpha: Law = ONE
    beta: Law = ONE
    delta: Law = NONE

    def laws(self) -> dict[str, Law]:
        """Return the laws by the names of the scalars in `Residual`."""
        return {"c": self.c, "a": self.a, "alpha": self.alpha, "beta": self.beta, "delta": self.delta}

    def at(self, position: Position) -> dict[str, float]:
        """Return the initial values of the scalars that are present at a position."""
        values = {name: law.at(position) for name, law in self.laws().items()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ScalarRate:
    """The learning rate of a method's scalars, relative to that of the weights: a number, or a number over L.

    `in_transformers` replaces it in a Transformer, if it is not None.

    >>> ScalarRate.parse("0.1").factor(500), ScalarRate.parse("1/L").factor(500)
    (0.1, 0.002)
    """

    numerator: float = 1.0
    over_branches: bool = False
    in_transformers: float | None = None

    @classmethod
    def parse(cls, text: str) -> ScalarRate:
        """Parse the text of the option `scalar_lr`, such as '0.1' or '1/L'."""
        number, slash, letter = text.partition("/")
        try:
            if slash and letter.strip() != "L":
                raise ValueError
            rate = cls(float(number), bool(slash))
        except ValueError:
            rate = cls(-1.0)
        if not 0 <= rate.numerator < math.inf:
            raise ValueError(
                "expected option 'scalar_lr', the learning rate of the scalars relative to that of the weights, to be "
                f"a number such as '0.1', or one over the number of branches such as '1/L', got '{text}'"
            )
        return rate

    def factor(self, branches: int, *, transformer: bool = False) -> float:
        """Return the factor for a network of `branches` residual branches."""
        if transformer and self.in_transformers is not None:
            return self.in_transformers
        return self.numerator / max(branches, 1) if self.over_branches else self.numerator


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of training without normalization, or with it for comparison.

    Attributes:
        name: The name in the registry.
        summary: One line about the method.
        reference: Section and equation of the source.
        weights_text: The weight layers and their initialization, for the table of methods; `weight_kind` and
            `initializer` set the behaviour.
        initializer: The function that writes the weights of a model, given an `InitContext`.
        paper: The papers of this project that use it.
        kind: Whether it is a plain initialization, a norm-free method, or a normalized network for comparison.
        shortcut_text: The shortcut, for the table of methods; `shortcut` and `shortcut_reads` set the behaviour.
        rule: The scalars of the residual equation.
        form: The block form that the method was designed for; None takes the model's.
        forms: The block forms that it works with.
        skips: The skip connections that it works with.
        spatial_only: Whether it needs images.
        shortcut: Which shortcuts are 1×1 convolutions: the model's own choice, those that change the shape, or all.
        shortcut_reads: The input of such a shortcut: the branch's entry (pre-activation or first bias) or the raw x.
        weight_kind: The kind of weight layer: plain, or how its weight is reparametrized.
        norm: The normalizer, if any.
        activation: The activation function.
        dropout: The probability of alpha dropout, with SELU only.
        layer_bias: Whether weight layers have biases.
        stem_relu: Whether a ReLU follows the stem in blocks of the form "linear", where the model has one there.
        scalar_biases: Whether a learnable scalar bias precedes every weight layer and activation.
        transformer_biases: The biases of a Transformer's linear layers: a vector in each layer; scalars at the entry of
            a branch and around its activation; or a vector and a scalar in each layer, and a scalar after each sum.
        remove_branches: Whether blocks consist of their shortcuts alone.
        needs_example: Whether the initializer needs a batch of data.
        scalar_rate: The learning rate of the scalars, relative to that of the weights.
        slow_biases: Whether the biases of weight layers learn at the scalars' rate.
        decay: Whether weight decay applies to all parameters or to weights only.
        options: The options that the method was made with.
    """

    name: str
    summary: str
    reference: str
    weights_text: str
    initializer: Callable[[InitContext], None]
    paper: str = "none"
    kind: Kind = "norm-free"
    shortcut_text: str = "identity"
    rule: Rule = field(default_factory=Rule)
    form: Form | None = None
    forms: tuple[Form, ...] = FORMS
    skips: tuple[Skip, ...] = ("residual",)
    spatial_only: bool = False
    shortcut: Literal["model", "conv", "conv everywhere"] = "model"
    shortcut_reads: Literal["entry", "raw"] = "entry"
    weight_kind: WeightKind = "plain"
    norm: NormName | None = None
    activation: ActivationName = "relu"
    dropout: float = 0.0
    layer_bias: bool = False
    stem_relu: bool = True
    scalar_biases: bool = False
    transformer_biases: Literal["vectors", "scalars", "both"] = "vectors"
    remove_branches: bool = False
    needs_example: bool = False
    scalar_rate: ScalarRate = field(default_factory=ScalarRate)
    slow_biases: bool = False
    decay: Literal["all", "weights"] = "all"
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def spec(self) -> str:
        """The string from which `get` makes this method.

        >>> from normfree.methods import get
        >>> get("hanin:r=0.8").spec
        'hanin:r=0.8'
        """
        shown = options_text(self.options, ",")
        return f"{self.name}:{shown}" if shown else self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        """Return the method itself, because it is immutable."""
        return self

    def row(self) -> dict[str, str]:
        """Return the method as a row of the table of methods."""
        return {
            "method": self.name,
            "c": self.rule.c.text,
            "h(s)": self.shortcut_text,
            "α": self.rule.alpha.text,
            "β": self.rule.beta.text,
            "weights and initialization": self.weights_text,
            "paper": self.paper,
            "options": options_text(self.options, ", "),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the method as plain data."""
        return {
            "name": self.name,
            "summary": self.summary,
            "kind": self.kind,
            "rule": {name: law.text for name, law in self.rule.laws().items()},
            "shortcut": self.shortcut_text,
            "weights": self.weights_text,
            "weight_layer": self.weight_kind,
            "normalizer": self.norm,
            "activation": self.activation,
            "form": self.form,
            "skips": list(self.skips),
            "needs_example": self.needs_example,
            "options": dict(self.options),
            "paper": self.paper,
            "reference": self.reference,
        }


def require_positive(method: str, **options: float) -> None:
    """Raise `ValueError` if an option of a method is 0 or less."""
    for option, value in options.items():
        if not value > 0:
            raise ValueError(f"expected option '{option}' of method '{method}' to be positive, got {value:g}")


def require_choice(method: str, option: str, value: str, known: Iterable[str]) -> None:
    """Raise `ValueError` if the value of a method's option is not one of the known ones."""
    if value not in known:
        raise unknown_name(f"value of option '{option}' of method '{method}'", value, known)


def options_text(options: Mapping[str, object], separator: str) -> str:
    """Return options as they are written after the name of a method."""
    texts = {key: str(v).lower() if isinstance(v, bool) else f"{v}" for key, v in options.items()}
    return separator.join(f"{key}={text}" for key, text in texts.items())
