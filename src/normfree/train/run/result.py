"""The progress of a run, its result, its curves and its TensorBoard log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from normfree.errors import missing_package
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import notebook_html
from normfree.report.terminal import duration, percent
from normfree.train.config import TrainConfig
from normfree.train.engine.inputs import Score
from normfree.train.run.run_folder import RunStatus

if TYPE_CHECKING:
    from normfree.train.text.generation import Bleu

# The keys of a record by the name of their curve. A record has an `epoch`; any other key may be missing.
_LOSSES = {"training": "train_loss", "validation": "validation_loss"}
_ACCURACIES = {"training": "train_accuracy", "validation": "validation_accuracy"}
_RATES = {"learning rate": "lr"}
_STEEP = 30.0  # a loss that changes by more than this factor gets a logarithmic axis
_POINTS = 2000  # of a curve; the plot has no more columns of pixels
_SMALL = 0.62  # the width of the learning rate relative to the others
_GUESS = 0.995  # a loss above this share of a random guess's is a guess; a network that learns is soon below it


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
    """

    done: int
    total: int
    epoch: float
    loss: float
    accuracy: float
    throughput: float
    unit: str = "images"


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
        signal: The signal that interrupted the run; None if none did.
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
        score = "" if self.judged is None else f", {self.judged[0]} accuracy {percent(self.judged[1].accuracy)}"
        run = f"{self.config.model!r}, {self.config.method!r}"
        return f"RunResult({run}: {self.status} after {self.epochs:.3g} epochs{score})"

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
        """Whether the model is no better than a guess: by its loss, and for images by its accuracy too.

        The accuracy on tokens says little: a model that always predicts the most frequent token is often right.
        """
        if self.classes < 2 or self.judged is None:
            return False
        _, (loss, accuracy) = self.judged
        by_chance = min(2 / self.classes, 0.1 + 0.9 / self.classes)  # of two classes 55 %, of ten 19 %
        return loss > _GUESS * self.guess_loss and (self.unit == "tokens" or accuracy <= by_chance)

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


def write_curves(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path | None:
    """Draw the metrics of a run into a file; return None if there are none yet, or matplotlib is not installed."""
    if not records:
        return None
    try:
        draw_training_curves(records, path, title)
    except ImportError:  # a run does not need a picture
        return None
    return path


def draw_training_curves(records: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the metrics of a run into a .png or .svg file; accuracies are fractions of 1, drawn in per cent.

    A record may hold only some of the numbers, such as the training loss every few steps and the validation loss at
    the end of an epoch. Records without an epoch are left out.

    Raises:
        ValueError: if there is nothing to draw, or the file has another suffix.
        ImportError: if matplotlib is not installed.
    """
    panels = training_panels(records)
    if not panels:
        raise ValueError(
            f"expected records with an 'epoch' and numbers, got none in {len(records)}; train at least once"
        )
    widths = [_SMALL if panel.title == "learning rate" else 1.0 for panel in panels]
    write_plot(panels, path, title=title, columns=3, widths=widths)


def training_panels(records: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """Make panels of loss, accuracy and learning rate over the epochs; a panel without numbers is left out."""
    losses, accuracies, rates = (_curves(records, keys) for keys in (_LOSSES, _ACCURACIES, _RATES))
    epochs = [epoch for curve in (*losses, *accuracies, *rates) for epoch in curve.x]
    span = (min(epochs), max(epochs)) if epochs else ()  # so that an epoch is at the same place in all panels
    panels = []
    if losses:
        values = [v for curve in losses for v in curve.values if math.isfinite(v)]
        steep = bool(values) and min(values) > 0 and max(values) > _STEEP * min(values)
        note = _best(losses, "lowest")
        panels.append(Panel("loss", losses, "cross-entropy", "epoch", log_y=steep, x=span, note=note))
    if accuracies:
        in_percent = tuple(Curve(curve.name, tuple(100 * v for v in curve.values), curve.x) for curve in accuracies)
        note = _best(in_percent, "best")
        panels.append(Panel("accuracy", in_percent, "top-1 accuracy in %", "epoch", log_y=False, x=span, note=note))
    if rates:
        panels.append(Panel("learning rate", rates, "", "epoch", log_y=False, x=span))
    return tuple(panels)


def _curves(records: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> tuple[Curve, ...]:
    curves = []
    for name, key in keys.items():
        pairs = [(r["epoch"], r[key]) for r in records if _is_number(r.get("epoch")) and _is_number(r.get(key))]
        points = sorted((pair for pair in pairs if math.isfinite(pair[0])), key=lambda pair: pair[0])
        if points := _thinned(points):
            curves.append(Curve(name, tuple(float(v) for _, v in points), tuple(float(x) for x, _ in points)))
    return tuple(curves)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep at most about `_POINTS` points, the last one and all that are not finite among them."""
    every = max(1, math.ceil(len(points) / _POINTS))
    last = len(points) - 1
    return [p for i, p in enumerate(points) if (last - i) % every == 0 or not math.isfinite(p[1])]


def _best(curves: Sequence[Curve], word: str) -> str:
    """The best value of the last curve, which is the validation if there is one, in words."""
    curve = curves[-1]
    finite = [(value, epoch) for value, epoch in zip(curve.values, curve.x, strict=True) if math.isfinite(value)]
    if not finite:
        return ""
    value, epoch = (min if word == "lowest" else max)(finite, key=lambda pair: pair[0])
    return f"{word} {curve.name} {value:.4g}{' %' if word == 'best' else ''} at epoch {epoch:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class EventLog:
    """A TensorBoard log in the folder of a run.

    TensorBoard hides records after step `done`, left by an interrupted run.

    Raises `ValueError` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(missing_package("tensorboard", "tensorboard=true")) from error
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record."""
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the writing thread."""
        self._writer.close()
