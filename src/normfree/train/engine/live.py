"""What a run shows of itself while it trains: a line of progress, progress.json, its page, and the signal over depth.

None of it changes a number of the run, and none of it can end the run: what fails is logged once and left out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from normfree.files import to_json_values, write_text
from normfree.models import BaseModel
from normfree.report.page import render_page
from normfree.report.terminal import in_notebook, metrics_text, progress
from normfree.train.config import TrainConfig
from normfree.train.run.metrics_file import read_lines
from normfree.train.run.result import EventLog, Snapshot
from normfree.train.run.run_list import METRICS, PROGRESS, read_run
from normfree.train.run.run_page import PAGE, SIGNAL, run_page

if TYPE_CHECKING:
    from normfree.train.engine.setup import TrainSetup

_log = logging.getLogger("normfree.train")
ShowProgress = Callable[[Snapshot], None]
_FILE_SECONDS = 2.0  # between two writings of progress.json
_PAGE_SECONDS = 5.0  # between two writings of the page
_SHARE = 0.01  # the largest share of the time that is spent on the page; the same for the signal
_EXAMPLES = 16  # on which the signal is measured
_POINTS = 200  # of the curve of the first epoch while it runs


@contextmanager
def progress_line(model: str, *, done: int = 0, show: bool = True) -> Iterator[ShowProgress]:
    """Show a line of progress until the end of the `with` block: on a terminal, in a log or in a notebook."""
    with progress(model, done=done, show=show) as update:

        def show_progress(s: Snapshot) -> None:
            validation = None if s.validation is None else s.validation.accuracy
            text = metrics_text(
                loss=s.loss, accuracy=s.accuracy, validation=validation, throughput=s.throughput, unit=s.unit
            )
            update(s.done, s.total, text)

        yield show_progress


@contextmanager
def chosen_progress(chosen: ShowProgress | bool | None, model: str, *, first: bool) -> Iterator[ShowProgress | None]:
    """Yield the progress that `fit` was asked for: a function, a line, or by default a line in a notebook only."""
    if callable(chosen) or not (in_notebook() if chosen is None else chosen):
        yield chosen if callable(chosen) else None
        return
    with progress_line(model, show=first) as show:
        yield show


class Live:
    """The files in the folder of a run that show how far it is; see the module's docstring.

    Args:
        setup: The run. Only the process that has its folder writes.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._setup, self._folder, self._page = setup, setup.folder, False
        self._events: EventLog | None = None
        self._written_at = self._page_at = self._signal_at = -math.inf
        self._page_seconds = self._signal_seconds = 0.0  # of the last page, and of the last signal
        self._began, self._first = time.perf_counter(), 0
        self._monitor: Any = None
        self._failed: set[str] = set()
        self._curve: list[dict[str, Any]] = []  # of the first epoch

    def open_log(self, done: int) -> None:
        """Open the TensorBoard log, if the run has one, after `done` steps."""
        if self._setup.config.tensorboard and self._folder is not None:
            self._events = EventLog(self._folder.place, done=done)

    def start(self, done: int, *, page: bool) -> None:
        """Begin after `done` steps: measure the signal of a new run, and write the first page.

        Args:
            done: The steps done.
            page: Whether to write the page, and to measure the signal for it.
        """
        self._first, self._page = done, page and self._folder is not None
        if done == 0:
            self._measure_signal(0, 0)
        self._began = time.perf_counter()
        with self._careful("page"):
            self._write_page()

    def report(self, now: Snapshot, seconds: float, show: ShowProgress | None = None) -> None:
        """Show how far the run is, and write progress.json and the page if they are due.

        Args:
            now: How far the run is.
            seconds: How long it has taken, over all processes that resumed it.
            show: The caller's own function; its errors end the run.
        """
        if show is not None:
            show(now)
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
        with self._careful(PROGRESS):
            self._write(PROGRESS, json.dumps(to_json_values(record), allow_nan=False))
        if moment - self._page_at >= max(_PAGE_SECONDS, self._page_seconds / _SHARE):
            with self._careful("page"):
                self._write_page()

    def end_epoch(self, record: Mapping[str, Any], *, last: bool) -> None:
        """Log the metrics of an epoch, and measure the signal after 1, 2, 4, … epochs and the last one.

        The next report is written at once.
        """
        self._written_at = -math.inf
        if self._events is not None:
            self._events(record)
        epoch = record["epoch"]
        if last or (epoch & (epoch - 1) == 0 and self._signal_is_cheap()):
            self._measure_signal(epoch, record["step"])

    def end(self) -> None:
        """Remove progress.json and write the last page; result.json says how the run ended."""
        if self._folder is None:
            return
        with self._careful(PROGRESS):
            self._folder.require_held()
            (self._folder.place / PROGRESS).unlink(missing_ok=True)
        with self._careful("page"):
            self._write_page(ended=True)

    def close(self) -> None:
        """Close the TensorBoard log."""
        if self._events is not None:
            self._events.close()

    def _signal_is_cheap(self) -> bool:
        return self._signal_seconds <= _SHARE * (time.perf_counter() - self._signal_at)

    def _measure_signal(self, epoch: int, step: int) -> None:
        """Measure the signal over depth, in a run that computes with the modules of its model."""
        setup = self._setup
        plan = setup.model.plan if isinstance(setup.model, BaseModel) else setup.plan
        config = setup.config
        usual = config.precision == "float32" and config.kernels != "stage" and not config.compile
        plain = usual and setup.processes.world == 1
        if not (self._page and config.measure_signal and plain and plan is not None):
            return
        with self._careful("signal"):
            if self._monitor is None:
                from normfree.diagnostics import Monitor  # imported here because a run without a page needs none

                self._monitor = Monitor(setup.model, plan=plan)
            began = time.perf_counter()
            inputs = setup.data.example(setup.config, _EXAMPLES)
            found = self._monitor.measure(tuple(x.to(setup.device) for x in inputs))
            self._monitor.moments.clear()
            both = {"forward": found.verdict.forward, "backward": found.verdict.backward}
            totals = {f"{name}_in_all": direction.total for name, direction in both.items()}
            line = {**found.to_json(), **totals, "step": step, "epoch": epoch}
            self._append(SIGNAL, json.dumps(to_json_values(line), allow_nan=False) + "\n")
            self._signal_at = time.perf_counter()
            self._signal_seconds = self._signal_at - began

    def _write_page(self, *, ended: bool = False) -> None:
        if not self._page or self._folder is None:
            return
        began = time.perf_counter()
        place, path = self._folder.place, self._folder.path
        records = [record for _, record in read_lines(place / METRICS)] if (place / METRICS).exists() else []
        signals = [line for _, line in read_lines(place / SIGNAL)] if (place / SIGNAL).exists() else []
        settings = _changed_settings(self._setup.config)
        page = run_page(read_run(place, held=not ended), path.resolve().name, records or self._curve, signals, settings)
        self._write(PAGE, render_page(page))
        self._page_at = time.perf_counter()
        self._page_seconds = self._page_at - began

    def _write(self, name: str, text: str) -> None:
        assert self._folder is not None
        self._folder.require_held()
        write_text(self._folder.place / name, text, durable=False)

    def _append(self, name: str, line: str) -> None:
        assert self._folder is not None
        self._folder.require_held()
        with (self._folder.place / name).open("a", encoding="utf-8") as file:
            file.write(line)

    @contextmanager
    def _careful(self, what: str) -> Iterator[None]:
        """Log the first error of a kind, and go on."""
        try:
            yield
        except ImportError as error:  # of jinja2
            self._page = False
            _log.info("no page: %s", error)
        except Exception as error:  # anything: a run does not end because of its page
            if what not in self._failed:
                self._failed.add(what)
                _log.warning("%s: not written, and the run goes on: %s", what, " ".join(str(error).split()))


def _changed_settings(config: TrainConfig) -> Mapping[str, Any]:
    """Return the settings that differ from their defaults, without those that the machine decides."""
    defaults, decided = asdict(TrainConfig()), ("channels_last", "compile", "graph", "kernels")
    return {k: value for k, value in asdict(config).items() if value != defaults[k] and k not in decided}
