"""How far a run is, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import nn

from normfree.train.config import TrainConfig
from normfree.train.engine.evaluation import Score
from normfree.train.run.run_folder import Status
from normfree.train.text.translation import Bleu

_GUESS = 0.995  # of the loss of a guess: what a network that learns at all is below after some dozen steps


class Snapshot(NamedTuple):
    """How far a run is: steps done and in all, epochs done, mean training loss and accuracy of the epoch, speed.

    `throughput` counts a `unit` a second: images, or target tokens.
    """

    done: int
    total: int
    epoch: float
    loss: float
    accuracy: float
    throughput: float
    unit: str = "images"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, with its numbers; `model` has the weights that were scored, in float32 and evaluation mode.

    `throughput` counts a `unit` a second of the steps: images, or target tokens. `classes` counts what a score is given
    to, tokens of a vocabulary included. `bleu` is of the test sentences of a translation, and `inputs` are the text
    files that prepared data were made from, with their sha256.
    """

    status: Status
    config: TrainConfig
    model: nn.Module = field(repr=False)
    steps: int
    epochs: float
    train_loss: float | None
    train_accuracy: float | None
    validation: Score | None
    test: Score | None
    linear_accuracy: float | None
    parameters: int
    classes: int
    seconds: float
    setup_seconds: float
    throughput: float
    unit: str = "images"
    bleu: Bleu | None = None
    inputs: Mapping[str, Any] | None = None
    peak_gib: float | None = None
    signal: int | None = None
    command: str | None = None

    @property
    def guess_loss(self) -> float:
        """The cross-entropy of equal scores for all classes, whatever the labels and however they are smoothed."""
        return math.log(self.classes)

    @property
    def judged(self) -> tuple[str, Score] | None:
        """What the model is judged by: its score in test, or else in validation; where there is neither, in training.

        The mean over an epoch of training counts the start, too, which may be far above where the epoch ended.
        """
        for name, found in (("test", self.test), ("validation", self.validation)):
            if found is not None:
                return name, found
        if self.train_loss is None or self.train_accuracy is None:
            return None
        return "training", Score(self.train_loss, self.train_accuracy)

    @property
    def guesses(self) -> bool:
        """Whether the loss is hardly below that of a guess, or above it, and few images more are right than by chance.

        A token that is always guessed may be the most frequent one, so of tokens the loss alone tells.
        """
        if self.classes < 2 or self.judged is None:
            return False
        _, (loss, accuracy) = self.judged
        by_chance = min(2 / self.classes, 0.1 + 0.9 / self.classes)  # of two classes 55 %, of ten 19 %
        return loss > _GUESS * self.guess_loss and (self.unit == "tokens" or accuracy <= by_chance)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data, without the model."""
        told = ("model", "config", "throughput", "unit")
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in told}
        for name in ("validation", "test", "bleu"):
            plain[name] = plain[name] and plain[name]._asdict()
        for name in ("bleu", "inputs"):
            if plain[name] is None:
                del plain[name]
        plain[f"{self.unit}_per_second"] = self.throughput
        return {**plain, "seed": self.config.seed, "config": asdict(self.config)}
