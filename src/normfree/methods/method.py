"""What a method is: one frozen record of its rule, its layers, its initializer and its parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from normfree.nn.normalizers import ActivationName, NormName
from normfree.nn.weight_layers import WeightKind
from normfree.plan import Position

if TYPE_CHECKING:
    from normfree.methods.init_context import InitContext

Form = Literal["post", "pre", "linear"]
"""Where the activation of a residual block stands: after the sum, before the branch, or only inside the branch."""
FORMS: tuple[Form, ...] = ("post", "pre", "linear")

Skip = Literal["residual", "none", "dense", "highway", "sequence"]
"""What a network adds to its layers: residual sums, nothing, concatenation, or gates; or residual sums around the
attention and feed-forward layers of a sequence."""
EVERY_SKIP: tuple[Skip, ...] = ("residual", "none", "dense", "highway")
WITH_SEQUENCES: tuple[Skip, ...] = (*EVERY_SKIP, "sequence")
RESIDUAL_SUMS: tuple[Skip, ...] = ("residual", "sequence")

Kind = Literal["initialization", "norm-free", "normalized"]


@dataclass(frozen=True)
class Law:
    """One scalar of the residual equation: a number, or a function of the branch's position.

    A function may answer None where the scalar is absent. `text` is how the table of methods prints it. `written` says
    that the method's initializer writes the number, which depends on the whole plan or on data.
    """

    value: float | Callable[[Position], float | None]
    text: str = ""
    learnable: bool = False
    written: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            if callable(self.value):
                raise ValueError("expected a text for a law that is a function, got none; pass text='…'")
            object.__setattr__(self, "text", f"learnable, {self.value:g}" if self.learnable else f"{self.value:g}")

    def at(self, position: Position) -> float | None:
        """The scalar's initial value at a position, or None where it is absent."""
        return self.value(position) if callable(self.value) else self.value


ONE = Law(1.0)
NONE = Law(lambda _: None, text="none")
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
        """The laws by the names that `Residual` gives its scalars."""
        return {"c": self.c, "a": self.a, "alpha": self.alpha, "beta": self.beta, "delta": self.delta}

    def at(self, position: Position) -> dict[str, float]:
        """The values of all scalars that are present at a position."""
        values = {name: law.at(position) for name, law in self.laws().items()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ScalarRate:
    """The learning rate of a method's scalars as a multiple of the weights': a number, or a number over L.

    >>> ScalarRate.parse("0.1").factor(500), ScalarRate.parse("1/L").factor(500)
    (0.1, 0.002)
    """

    numerator: float = 1.0
    over_branches: bool = False

    @classmethod
    def parse(cls, text: str) -> ScalarRate:
        """Read '0.1' or '1/L'."""
        number, slash, letter = text.partition("/")
        try:
            if slash and letter.strip() != "L":
                raise ValueError
            rate = cls(float(number), bool(slash))
        except ValueError:
            rate = cls(-1.0)
        if not 0 <= rate.numerator < math.inf:
            raise ValueError(f"expected a learning rate factor such as '0.1' or '1/L', got '{text}'")
        return rate

    def factor(self, branches: int) -> float:
        """The multiple for a network of `branches` residual branches."""
        return self.numerator / max(branches, 1) if self.over_branches else self.numerator


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of training without (or with) normalization.

    `form` is the block form it was made for (None: the model's own) and `forms` those it works with. `shortcut` says
    where shortcuts are 1×1 convolutions: as the model has it, at every change of shape, or in every block;
    `shortcut_reads` what such a shortcut sees, the branch's entry (pre-activation or first bias) or the raw input.
    `scalar_biases` puts a learnable scalar before every weight layer and activation. `remove_branches` leaves only the
    shortcuts.
    """

    name: str
    summary: str
    paper: str
    reference: str
    weights: str
    initializer: Callable[[InitContext], None]
    kind: Kind = "norm-free"
    h: str = "as built"
    rule: Rule = field(default_factory=Rule)
    form: Form | None = None
    forms: tuple[Form, ...] = FORMS
    skips: tuple[Skip, ...] = ("residual",)
    spatial_only: bool = False
    shortcut: Literal["model", "conv", "conv everywhere"] = "model"
    shortcut_reads: Literal["entry", "raw"] = "entry"
    weight: WeightKind = "plain"
    norm: NormName | None = None
    activation: ActivationName = "relu"
    dropout: float = 0.0
    layer_bias: bool = False
    scalar_biases: bool = False
    remove_branches: bool = False
    needs_example: bool = False
    scalar_rate: ScalarRate = field(default_factory=ScalarRate)
    decay: Literal["all", "weights"] = "all"
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def spec(self) -> str:
        """The string that `get` turns into this method again.

        >>> from normfree.methods import get
        >>> get("hanin:r=0.8").spec
        'hanin:r=0.8'
        """
        shown = self._options(",")
        return f"{self.name}:{shown}" if shown else self.name

    @property
    def restructures(self) -> bool:
        """Whether it takes branches away or puts layers into shortcuts, which is not done to a model that is there."""
        return self.remove_branches or self.shortcut == "conv everywhere"

    def _options(self, separator: str) -> str:
        """The options as they are written after the name."""
        texts = {key: str(v).lower() if isinstance(v, bool) else f"{v}" for key, v in self.options.items()}
        return separator.join(f"{key}={text}" for key, text in texts.items())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """A method of the registry is pickled as its spec, since the functions inside it cannot be.

        Any other, such as a changed one that the spec does not give, is left to what pickle makes of it.
        """
        from normfree.methods.registry import get

        try:
            named = get(self.spec)
        except ValueError:  # not registered
            return super().__reduce_ex__(protocol)
        # Functions made anew are never equal: those of the rule are known by their texts, the initializer by its code.
        alike = replace(named, initializer=self.initializer, rule=self.rule) == self
        code = [getattr(method.initializer, "__code__", None) for method in (named, self)]
        if alike and code[0] == code[1] and named.to_json() == self.to_json():
            return get, (self.spec,)
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        """Itself, since nothing in it changes: a copied model has an equal method, registered or not."""
        return self

    def row(self) -> dict[str, str]:
        """The method as a row of the table of methods."""
        return {
            "method": self.name,
            "c": self.rule.c.text,
            "h(s)": self.h,
            "α": self.rule.alpha.text,
            "β": self.rule.beta.text,
            "weights and initialization": self.weights,
            "paper": self.paper,
            "options": self._options(", "),
        }

    def to_json(self) -> dict[str, Any]:
        """The method as plain data."""
        return {
            "name": self.name,
            "summary": self.summary,
            "kind": self.kind,
            "rule": {name: law.text for name, law in self.rule.laws().items()},
            "shortcut": self.h,
            "weights": self.weights,
            "weight_layer": self.weight,
            "normalizer": self.norm,
            "activation": self.activation,
            "form": self.form,
            "skips": list(self.skips),
            "needs_example": self.needs_example,
            "options": dict(self.options),
            "paper": self.paper,
            "reference": self.reference,
        }
