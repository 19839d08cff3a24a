"""The records of a run, without torch: its progress, its scores and its result, and the files that hold them.

Files may be damaged or forged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from normfree.report.tables import notebook_html
from normfree.report.terminal import duration, percent
from normfree.storage.reading import (
    check_sealed_text,
    from_json_values,
    has_kinds,
    parse_json,
    read_limited,
    read_sealed_json,
    require_regular,
)
from normfree.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from normfree.train.text.generation import Bleu

# The files in the folder of a run.
CONFIG, METRICS, RESULT, PROGRESS, LOCK = "config.toml", "metrics.jsonl", "result.json", "progress.json", "lock"
PAGE, SIGNAL = "page.html", "signal.jsonl"
_END = 1 << 16  # bytes at the end of the metrics in which the last record is looked for; a record has a few hundred
# The kinds of the values that are read from a result, which may be forged; a number may be "nan".
_KINDS: dict[str, Any] = {"status": str, "seconds": int | float | str, "config": dict, "files": dict}
_SCORE_KINDS: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "score"), int | float | str)
RunStatus = Literal["finished", "interrupted", "diverged"]
_GUESS = 0.995  # a loss above this share of a random guess's is a guess; a network that learns is soon below it


class Score(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: The mean cross-entropy.
        accuracy: The share of labels that have the highest score.
    """

    loss: float
    accuracy: float


def is_guess(loss: float, accuracy: float, classes: int, unit: str) -> bool:
    """Whether a score is no better than a guess: by its loss, and for images by its accuracy too.

    The accuracy on tokens says little: a model that always predicts the most frequent token is often right.
    """
    by_chance = min(2 / classes, 0.1 + 0.9 / classes)  # of two classes 55 %, of ten 19 %
    return loss > _GUESS * math.log(classes) and (unit == "tokens" or accuracy <= by_chance)


class Snapshot(NamedTuple):
    """The progress of a run.

    Attributes:
        done: The steps done.
        total: The steps of the whole run.
        epoch: The epochs done, with a fraction.
        loss: The mean training loss of this epoch.
        accuracy: The mean training accuracy of this epoch.
        throughput: Images or target tokens per second.
        unit: The unit of `throughput`, "images" or "tokens".
        validation: The last score on the validation data; None before the first, and without such data.
    """

    done: int
    total: int
    epoch: float
    loss: float
    accuracy: float
    throughput: float
    unit: str = "images"
    validation: Score | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes:
        status: How the run ended: 'finished', 'interrupted' or 'diverged'.
        config: The effective configuration.
        model: The model with the weights that were scored, in float32 and evaluation mode.
        steps: The steps done.
        epochs: The epochs done, with a fraction.
        train_loss: The mean training loss of the last epoch.
        train_accuracy: The mean training accuracy of the last epoch.
        validation: The last score on the validation data.
        test: The score on the test data.
        linear_accuracy: The test accuracy of a linear classifier on the same data, for comparison.
        parameters: The number of parameters.
        classes: The number of classes, or of tokens in the vocabulary.
        seconds: The time of the run, over all processes that resumed it.
        setup_seconds: The time before the first step of this process.
        throughput: Images or target tokens per second, in the steps.
        unit: The unit of `throughput`, "images" or "tokens".
        bleu: BLEU of the test sentences of a translation; None for other runs.
        inputs: The text files that the data was prepared from, with their sha256.
        peak_gib: The peak GPU memory in GiB; None on a CPU.
        signal: The number of the Unix signal that interrupted the run, such as 15 for SIGTERM; None if none did.
        command: The command line of the run.
    """

    status: RunStatus
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

    def __repr__(self) -> str:
        from normfree.methods.method_registry import short_spec  # imported here because it loads torch

        score = "" if self.judged is None else f", {self.judged[0]} accuracy {percent(self.judged[1].accuracy)}"
        run = f"{self.config.model!r}, {short_spec(self.config.method)!r}"
        epochs = f"{self.epochs:.3g} epoch{'s' * (self.epochs != 1)}"
        return f"RunResult({run}: {self.status} after {epochs}{score})"

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), [f"{self.parameters:,} parameters, {duration(self.seconds)}"])

    @property
    def guess_loss(self) -> float:
        """The cross-entropy of equal scores for all classes; it does not depend on the labels or their smoothing."""
        return math.log(self.classes)

    @property
    def judged(self) -> tuple[str, Score] | None:
        """The score that says most about the model, with its name: test, else validation, else training.

        The training score is a mean over an epoch; the loss at its start may be far above that at its end.
        """
        for name, found in (("test", self.test), ("validation", self.validation)):
            if found is not None:
                return name, found
        if self.train_loss is None or self.train_accuracy is None:
            return None
        return "training", Score(self.train_loss, self.train_accuracy)

    @property
    def guesses(self) -> bool:
        """Whether the model is no better than a guess; see `is_guess`."""
        if self.classes < 2 or self.judged is None:
            return False
        return is_guess(*self.judged[1], self.classes, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, without the model.

        Returns:
            The fields by name, the scores as dictionaries, and the throughput under 'images_per_second' or
            'tokens_per_second'.
        """
        elsewhere = ("model", "config", "throughput", "unit")
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in elsewhere}
        for name in ("validation", "test", "bleu"):
            plain[name] = plain[name] and plain[name]._asdict()
        for name in ("bleu", "inputs"):
            if plain[name] is None:
                del plain[name]
        plain[f"{self.unit}_per_second"] = self.throughput
        return {**plain, "seed": self.config.seed, "config": asdict(self.config)}


# The files


def check_config(path: Path) -> None:
    """Raise `ValueError` if the configuration of a run is empty, or was altered after it was written."""
    if not path.stat().st_size:  # it would be read as all defaults, which nobody trained
        raise ValueError(f"expected the configuration of a run in '{path}', got an empty file; start the run again")
    remedy = "restore it, or start another run with the changed settings by --config"
    check_sealed_text(path, "the configuration of the run", remedy)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file and their records, without an incomplete end.

    Raises `ValueError` if a line before the last complete one is damaged.
    """
    complete = read_limited(path).split(b"\n")[:-1]
    parsed = [(raw, _record(raw)) for raw in complete]
    while parsed and parsed[-1][1] is None:
        parsed.pop()
    for number, (_, record) in enumerate(parsed, start=1):
        if record is None:
            raise ValueError(
                f"expected a JSON object with a 'step' in line {number} of '{path}', but it is damaged; delete the line"
            )
    return [(raw, record) for raw, record in parsed if record is not None]


def read_last_line(path: Path) -> dict[str, Any]:
    """Return the last complete record of a metrics file, without reading the others; {} if there is none.

    Raises `ValueError` if the end of the file holds none although lines are there.
    """
    require_regular(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        lines = file.read(_END).split(b"\n")[:-1]
    for raw in reversed(lines):
        if (record := _record(raw)) is not None:
            return record
    if lines:
        raise ValueError(f"expected JSON objects with a 'step' in '{path}', but its end is damaged; delete the lines")
    return {}


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    found: dict[str, Any] = from_json_values(record)
    return found


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a result.json.

    Raises:
        ValueError: If there is no result, or the file is damaged.
    """
    if not path.exists():
        raise ValueError(f"expected a result at '{path}', found none; finish the run with --resume")
    result = read_sealed_json(path, "the result of a run", "delete it")
    scores = [result[name] for name in ("validation", "test", "bleu") if result.get(name) is not None]
    whole = has_kinds(result, _KINDS) and all(has_kinds(score, _SCORE_KINDS) for score in scores)
    if result.get("status") not in get_args(RunStatus) or not whole:
        raise ValueError(f"expected a result with a status, but '{path}' is damaged; delete it")
    return result
