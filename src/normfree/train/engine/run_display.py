"""What a run shows while it trains: its progress, its page, the signal over depth, a TensorBoard log.

The signal is measured by `normfree.diagnostics.propagate`, and judged by `judge`.

None of it changes a number of the run. A display that fails is logged once and left out, and the run continues. Only
an error in a progress function of the caller ends the run.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normfree.errors import missing_package
from normfree.models import BaseModel
from normfree.report.page import render_page
from normfree.report.terminal import in_notebook, training_progress
from normfree.storage.reading import from_json_values
from normfree.storage.writing import to_json_values, write_text
from normfree.train.config import TrainConfig
from normfree.train.run.run_page import describe_run, run_page, with_state
from normfree.train.run.run_records import PAGE, PROGRESS, SIGNAL, Snapshot, read_lines

if TYPE_CHECKING:
    from normfree.train.engine.setup import TrainSetup
    from normfree.train.run.run_folder import RunFolder

_log = logging.getLogger("normfree.train")
ShowProgress = Callable[[Snapshot], None]
_FILE_SECONDS = 2.0  # between two writings of progress.json
_PAGE_SECONDS = 5.0  # between two writings of the page
_SHARE = 0.01  # the largest share of the time that is spent on the page; the same for the signal
_EXAMPLES = 16  # on which the signal is measured
_POINTS = 200  # of the curve of the first epoch while it runs


class RunDisplay:
    """Shows a run while it trains; `attach` sets the run.

        with RunDisplay("resnet20", True, page=True) as display: ...

    Args:
        model: The name of the model, with which the line of progress begins.
        progress: Whether to show a line of progress; None shows it in a notebook only. A function is called in its
            place.
        page: Whether to write the page, and to measure the signal for it.
        done: The steps that earlier processes of the run have done.

    Attributes:
        records: The metrics of the epochs so far.
    """

    def __init__(self, model: str, progress: ShowProgress | bool | None, *, page: bool, done: int = 0) -> None:
        self._page, self._stack, self._in_all = page, ExitStack(), callable(progress)
        shown = in_notebook() if progress is None else progress
        if not callable(shown):  # before the data and the model are there, which may take long
            shown = self._stack.enter_context(training_progress(model, done=done, show=shown))
        self._progress: ShowProgress = shown
        self.records: list[Mapping[str, Any]] = []
        self._signals: list[Mapping[str, Any]] = []
        self._now: Mapping[str, Any] = {}  # the content of progress.json
        self._result: Mapping[str, Any] = {}  # of a run that is resumed, or that has ended
        self._events: TensorBoardLog | None = None
        self._written_at = self._page_at = self._signal_at = -math.inf
        self._page_seconds = self._signal_seconds = 0.0  # of the last page, and of the last signal
        self._began, self._first = time.perf_counter(), 0
        self._failed: set[str] = set()
        self._curve: list[dict[str, Any]] = []  # of the first epoch

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, *error: Any) -> None:
        """End the line of progress, and close the TensorBoard log."""
        self._stack.__exit__(*error)

    def attach(self, setup: TrainSetup) -> None:
        """Set the run to show; only the process that has the folder of the run writes files."""
        self._setup, self._folder = setup, setup.folder

    def open_log(self, done: int) -> None:
        """Open the TensorBoard log, if the run has one, after `done` steps."""
        if self._setup.config.tensorboard and self._folder is not None:
            self._events = self._stack.enter_context(closing(TensorBoardLog(self._folder.write_path, done=done)))

    def start(self, done: int) -> None:
        """Begin after `done` steps: measure the signal of a new run, and write the first page."""
        self._first, self._page = done, self._page and self._folder is not None
        if done == 0:
            self._measure_signal(0, 0)
        elif self._folder is not None and self._page:
            with self._careful("page"):
                self._read_earlier(self._folder)
        self._began = time.perf_counter()
        self._write_page()
        self._page_seconds = 0.0  # of the imports of the first page, which no other page repeats

    def _read_earlier(self, folder: RunFolder) -> None:
        """Read what earlier processes of the run have written."""
        self.records += folder.read_metrics()
        if folder.result_path.exists():
            self._result = from_json_values(folder.read_result())
        if (path := folder.write_path / SIGNAL).exists():
            self._signals += [line for _, line in read_lines(path)]

    def report(self, now: Snapshot, seconds: float, *, line: bool) -> None:
        """Show the progress of the run, and write progress.json and the page if they are due.

        Args:
            now: How far the run is.
            seconds: How long it has taken, over all processes that resumed it.
            line: Whether to show it in the line of progress; an error of the caller's own function ends the run.
        """
        if line and (self._in_all or self._setup.processes.first):  # all processes call a function of the caller
            self._progress(now)
        moment = time.perf_counter()
        if self._folder is None or moment - self._written_at < _FILE_SECONDS:
            return
        self._written_at = moment
        taken = now.done - self._first
        record = {
            "step": now.done,
            "steps": now.total,
            "epoch": now.epoch,
            "train_loss": now.loss,
            "train_accuracy": now.accuracy,
            f"{now.unit}_per_second": now.throughput,
            "classes": self._setup.data.num_classes,
            "parameters": self._setup.parameters,
            "seconds": seconds,
            "seconds_left": (now.total - now.done) * (moment - self._began) / taken if taken else None,
        }
        if now.validation is not None:
            record |= {"validation_loss": now.validation.loss, "validation_accuracy": now.validation.accuracy}
        elif now.epoch < 1:
            self._curve.append({name: record[name] for name in ("epoch", "train_loss", "train_accuracy")})
            if len(self._curve) > _POINTS:
                del self._curve[1::2]
        self._now = record
        with self._careful(PROGRESS):
            self._write(PROGRESS, json.dumps(to_json_values(record), allow_nan=False))
        if moment - self._page_at >= max(_PAGE_SECONDS, self._page_seconds / _SHARE):
            self._write_page()

    def end_epoch(self, record: Mapping[str, Any], *, last: bool) -> None:
        """Log the metrics of an epoch, and measure the signal after 1, 2, 4, … epochs and the last one.

        The next report is written at once.
        """
        self._written_at = -math.inf
        self.records.append(record)
        if self._events is not None:
            self._events(record)
        epoch = record["epoch"]
        if last or (epoch & (epoch - 1) == 0 and self._signal_is_cheap()):
            self._measure_signal(epoch, record["step"])

    def end(self, result: Mapping[str, Any]) -> None:
        """Remove progress.json, and write the last page with the content of result.json."""
        if self._folder is None:
            return
        self._now, self._result = {}, from_json_values(result)
        with self._careful(PROGRESS):
            self._folder.require_held()
            (self._folder.write_path / PROGRESS).unlink(missing_ok=True)
        self._write_page(ended=True)

    def _signal_is_cheap(self) -> bool:
        return self._signal_seconds <= _SHARE * (time.perf_counter() - self._signal_at)

    def _measure_signal(self, epoch: int, step: int) -> None:
        """Measure the signal over depth, in a run that computes with the modules of its model."""
        setup, config = self._setup, self._setup.config
        residual = isinstance(setup.model, BaseModel) or setup.plan is not None
        usual = config.precision == "float32" and config.kernels != "stage" and not config.compile
        plain = usual and setup.processes.world == 1
        if not (self._page and config.measure_signal and plain and residual):
            return
        with self._careful("signal"):
            from normfree.diagnostics import judge, propagate  # imported here because a run without a page needs none

            began = time.perf_counter()
            inputs = tuple(x.to(setup.device) for x in setup.data.example(config, _EXAMPLES))
            signal = propagate(setup.model, inputs, plan=setup.plan)
            verdict = judge(signal)
            line = {
                "step": step,
                "epoch": epoch,
                "status": verdict.status,
                "sentence": verdict.sentence,
                "forward": signal.series("sum"),
                "backward": signal.series("sum_gradient"),
                "forward_in_all": verdict.forward.total,
                "backward_in_all": verdict.backward.total,
            }
            self._signals.append(line)
            self._append(SIGNAL, json.dumps(to_json_values(line), allow_nan=False) + "\n")
            self._signal_at = time.perf_counter()
            self._signal_seconds = self._signal_at - began

    def _write_page(self, *, ended: bool = False) -> None:
        if not self._page or self._folder is None:
            return
        with self._careful("page"):
            began, path, config = time.perf_counter(), self._folder.path, self._setup.config
            last = self.records[-1] if self.records else {}
            settings = self._result.get("config") or asdict(config)
            run = describe_run(path, settings, last, self._result, self._now, time.time())
            shown = self.records or self._curve
            run = with_state(run, held=not ended)
            page = run_page(run, path.resolve().name, shown, self._signals, _changed_settings(config))
            self._write(PAGE, render_page(page))
            self._page_at = time.perf_counter()
            self._page_seconds = self._page_at - began

    def _write(self, name: str, text: str) -> None:
        assert self._folder is not None
        self._folder.require_held()
        write_text(self._folder.write_path / name, text, durable=False)

    def _append(self, name: str, line: str) -> None:
        assert self._folder is not None
        self._folder.require_held()
        with (self._folder.write_path / name).open("a", encoding="utf-8") as file:
            file.write(line)

    @contextmanager
    def _careful(self, what: str) -> Iterator[None]:
        """Log the first error of a kind, and continue."""
        try:
            yield
        except ImportError as error:  # of jinja2
            self._page = False
            _log.info("no page: %s", error)
        except Exception as error:  # anything: a run does not end because of its page
            if what not in self._failed:
                self._failed.add(what)
                _log.warning("%s: not written, and the run continues: %s", what, " ".join(str(error).split()))


def _changed_settings(config: TrainConfig) -> Mapping[str, Any]:
    """Return the settings that differ from their defaults, without those that the machine decides."""
    decided, values = ("channels_last", "compile", "graph", "kernels"), asdict(config)
    return {f.name: values[f.name] for f in fields(config) if values[f.name] != f.default and f.name not in decided}


class TensorBoardLog:
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


class Throughput:
    """Counts the images or tokens per second of the steps since `start`; time inside `paused` does not count."""

    def __init__(self, items_per_step: float) -> None:
        self._items_per_step, self._first, self._began = items_per_step, 0, time.perf_counter()

    def start(self, done: int) -> None:
        """Begin to count, after `done` steps."""
        self._first, self._began = done, time.perf_counter()

    def rate(self, done: int) -> float:
        """Return the throughput after `done` steps."""
        return (done - self._first) * self._items_per_step / max(time.perf_counter() - self._began, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the `with` block."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began
