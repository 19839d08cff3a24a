"""The training loop: steps, validation, logging, checkpoints, and the result at the end.

`Trainer.run` is the whole run and `Trainer._train` its loop. `TrainStep` is one step, `TrainSetup` builds all that the
run trains with, and `checkpoint` writes the state that `Trainer` keeps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from normfree.conversion.saving import PLAN, describe
from normfree.files import explained, write_json, write_text
from normfree.train.config import FREE, TrainConfig
from normfree.train.data import require_same_data
from normfree.train.engine.environment import LaunchQueue, Stop
from normfree.train.engine.evaluation import Score, score
from normfree.train.engine.inputs import EvalBatches
from normfree.train.engine.setup import TrainSetup
from normfree.train.run import checkpoint
from normfree.train.run.logging import EventLog, write_curves
from normfree.train.run.result import RunResult, Snapshot
from normfree.train.run.run_folder import RunFolder, RunStatus, require_same
from normfree.train.text.translation import Bleu

TRANSLATIONS = "translations.txt"  # of the test sentences, one per line
_POLL_SECONDS = 0.5  # between two readings of the loss, each of which waits for the device
_DIVERGED = 255  # the number by which a process tells the others that the run diverged; above those of signals
_SAVE_SHARE = 0.1  # of the time, at most, for large checkpoints after epochs
_SMALL_BYTES = 2**25  # a checkpoint of this size may be written after every epoch

State = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and the plain data of a checkpoint."""


class _InterruptedError(Exception):
    """A signal came while the test sentences were translated."""


class Trainer:
    """A run in progress: its setup, its counters, and its folder if it has one.

    Args:
        setup: The model, the batches and the step.
        folder: The folder of the run; None for a run that is not saved, and in all processes but the first.
        stop: Tells whether a signal came.
        seed_generators: Seeds torch's generators before a step.
        started: When the run began, by `time.perf_counter`.
    """

    def __init__(
        self,
        setup: TrainSetup,
        folder: RunFolder | None,
        stop: Stop,
        seed_generators: Callable[..., None],
        started: float,
    ) -> None:
        self.setup, self.folder, self._stop = setup, folder, stop
        self._seed_generators, self._started = seed_generators, started
        self.config, self.model, self.data = setup.config, setup.model, setup.data
        self.step, self.inputs, self.processes = setup.step, setup.inputs, setup.processes
        self.total = setup.epoch_steps * setup.config.epochs
        self.signal: int | None = None
        self._log: EventLog | None = None
        # The state of the run
        self.done = 0  # steps
        self.validation: Score | None = None
        self._epoch_unlogged = False  # an earlier process saved the end of an epoch, and ended before it logged it
        self._earlier_seconds = 0.0  # that earlier processes trained
        self._saved: deque[State] = deque(maxlen=2)  # the last two states that were saved; at first the initial one
        self._saved_at = started
        self._save_seconds = 0.0  # that the last checkpoint took
        self._fingerprint = self.data.fingerprint(self.config) if folder is not None else {}

    def run(
        self,
        *,
        resume: bool,
        progress: Callable[[Snapshot], None] | None,
        command: str | None,
        picture: bool,
    ) -> RunResult:
        """Train until the end, a signal or a divergence; test the model, and write and return the result."""
        self._start(resume)
        status = self._train(progress)
        loss, accuracy, _ = self._poll() if self.done else (None, None, True)
        train_seconds = time.perf_counter() - self._train_start
        if status == "interrupted" or not self.config.epochs:
            self._save()
        test = bleu = None
        if status == "finished":
            test = self._score(self.inputs.test)
            if self.signal is not None:
                status = "interrupted"  # the trained model is saved, and resuming tests it
            elif test is not None and not math.isfinite(test.loss):
                status, test = "diverged", None  # in the last step, after which no loss was read
        if status == "diverged":
            self._go_back()
        with self.step.averaged():
            self.setup.release()
        if status == "finished":
            bleu = self._translate()
            if self.signal is not None:
                status = "interrupted"
        result = RunResult(
            status=status,
            config=self.config,
            model=self.model,
            steps=self.done,
            epochs=self.done / self.setup.epoch_steps,
            train_loss=loss,
            train_accuracy=accuracy,
            validation=self.validation,
            test=test,
            linear_accuracy=self.data.linear_accuracy,
            parameters=self.setup.parameters,
            classes=self.data.num_classes,
            seconds=self._seconds,
            setup_seconds=self._setup_seconds,
            throughput=(self.done - self._first_step) * self.inputs.per_step / max(train_seconds, 1e-9),
            unit=self.inputs.unit,
            bleu=bleu,
            inputs=self.data.source_files,
            peak_gib=self._peak_gib(),
            signal=self.signal,
            command=command,
        )
        self._write_result(result, picture)
        return result

    def _train(self, progress: Callable[[Snapshot], None] | None) -> RunStatus:
        """Train all steps that are left, epoch by epoch; return how that ended."""
        config, steps, queue = self.config, self.setup.epoch_steps, LaunchQueue(self.setup.device)
        if self._epoch_unlogged and (status := self._end_epoch(self.done // steps - 1)) is not None:
            return status
        while self.done < self.total:
            epoch, first = divmod(self.done, steps)
            self.step.start_epoch(epoch, self._lr_factors(epoch), first)
            if first == 0:
                self.step.clear_metrics()
            for _ in range(first, steps):
                self._seed_generators(config.seed, self.done, self.processes.rank)
                self.step()
                self.done += 1
                queue.push()
                now, alive = time.perf_counter(), True
                save = bool(config.checkpoint_minutes) and now - self._saved_at >= 60 * config.checkpoint_minutes
                if save or now - self._polled_at >= _POLL_SECONDS:
                    loss, accuracy, alive = self._poll()
                    if alive and progress is not None:
                        epochs = self.done / steps
                        speed = self._throughput()
                        progress(Snapshot(self.done, self.total, epochs, loss, accuracy, speed, self.inputs.unit))
                # Clocks and signals differ between processes, but all must end at the same step.
                ended = self.processes.agree((self._stop.requested or 0) if alive else _DIVERGED)
                if ended == _DIVERGED:
                    return "diverged"
                if ended:
                    self.signal = ended
                    return "interrupted" if self._poll()[2] else "diverged"
                if save:
                    with self._pausing_throughput():
                        self._save()
            if (status := self._end_epoch(epoch)) is not None:
                return status
        return "finished"

    def _end_epoch(self, epoch: int) -> RunStatus | None:
        """Validate, log and save; return how the run ended if it diverged or a signal came meanwhile."""
        loss, accuracy, alive = self._poll()
        if not alive:
            return "diverged"
        speed = self._throughput()
        with self._pausing_throughput():
            if self.inputs.validation is not None:
                found = self._score(self.inputs.validation)
                if self.signal is not None:
                    return "interrupted"  # the epoch is not logged: the next process validates it
                self.validation = found
            record: dict[str, Any] = {
                "step": self.done,
                "epoch": epoch + 1,
                "train_loss": loss,
                "train_accuracy": accuracy,
                "lr": self.config.lr * self._lr_factors(epoch)[-1],
                "seconds": round(self._seconds, 3),
                f"{self.inputs.unit}_per_second": round(speed, 1),
            }
            if self.validation is not None:
                record |= {"validation_loss": self.validation.loss, "validation_accuracy": self.validation.accuracy}
            if self.folder is not None:
                self.folder.append(record)
                if self._log is not None:
                    self._log(record)
            if self.done >= self.total or self._save_is_due(epoch):
                self._save()
        return None

    # Scores

    def _score(self, batches: EvalBatches | None) -> Score | None:
        """Score the moving average, or the weights if there is none; None without batches or if a signal came."""
        if batches is None:
            return None
        signal = 0

        def until_signal() -> Iterator[Any]:
            nonlocal signal
            for batch in batches():
                if self._stop.requested is not None:
                    signal = self._stop.requested
                    return  # not an error, because all processes meet at the end of the score
                yield batch

        with self.step.averaged():
            found = score(self.model, until_signal(), self.inputs.sums, reduce=self.processes.average_)
        self.signal = self.processes.agree(signal) or None
        return found if self.signal is None else None

    def _translate(self) -> Bleu | None:
        """Translate the test sentences, if there are any, and write the lines; None if a signal came."""
        if not self.data.translates_test:
            return None
        bleu, signal = None, 0

        def stop_on_signal(done: int, total: int) -> None:
            if self._stop.requested is not None and done < total:
                raise _InterruptedError

        if self.processes.first:
            try:
                lines, bleu = self.data.translate_test(self.model, self.config, stop_on_signal)
            except _InterruptedError:
                signal = self._stop.requested or 0
            else:
                if self.folder is not None:
                    path = self.folder.path / TRANSLATIONS
                    with explained("the translations", path):
                        write_text(path, "".join(f"{line}\n" for line in lines))
        self.signal = self.processes.agree(signal) or None
        return bleu

    # The state: saved, resumed, and restored after a divergence

    def _state(self) -> State:
        """Copy all tensors of the run, and the counters beside them."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.step.state().items()}
        validation = self.validation and list(self.validation)
        return tensors, {"step": self.done, "seconds": self._seconds, "validation": validation, **self._fingerprint}

    def _save(self) -> None:
        """Keep a copy of the state, and write it as a checkpoint if the run has a folder."""
        began = time.perf_counter()
        if self._saved[-1][1]["step"] == self.done:
            self._saved.pop()  # the same state again
        self._saved.append(self._state())
        if self.folder is not None:
            checkpoint.save(self.folder.path, *self._saved[-1])
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - began

    def _save_is_due(self, epoch: int) -> bool:
        """Return whether to save after this epoch; large checkpoints take at most a small share of the time."""
        every = self.config.checkpoint_epochs
        small = sum(tensor.nbytes for tensor in self._saved[-1][0].values()) <= _SMALL_BYTES
        worth = small or time.perf_counter() - self._saved_at >= self._save_seconds / _SAVE_SHARE
        return bool(every) and (epoch + 1) % every == 0 and self.processes.broadcast(worth)

    def _resume(self, folder: RunFolder) -> None:
        """Restore the last checkpoint of a folder. Raises `ValueError` if the run there is another one or diverged."""
        if folder.config_path.exists():
            free = FREE if self.processes.world == 1 else {*FREE, "graph"}  # which a single process may have used
            require_same(asdict(TrainConfig.from_toml(folder.config_path)), asdict(self.config), folder.path, free=free)
        if folder.status == "diverged":
            raise ValueError(
                f"expected a run that can go on, but the one in '{folder.path}' diverged; "
                "start another one with a lower learning rate, or another method"
            )
        found = folder.resume()
        if found is None:
            return
        tensors, state = found
        require_same_data(self.data, self._fingerprint, state, folder.path)
        self.step.restore_(tensors)
        self.done, self._earlier_seconds = state["step"], state["seconds"]
        self.validation = Score(*state["validation"]) if state["validation"] else None
        logged = next((record for record in folder.read_metrics() if record["step"] == self.done), None)
        self._epoch_unlogged = logged is None and self.done > 0 and self.done % self.setup.epoch_steps == 0
        if logged is not None and "validation_loss" in logged:  # which may be newer than the checkpoint
            self.validation = Score(logged["validation_loss"], logged["validation_accuracy"])

    def _share_state(self) -> None:
        """Give every process the state of the first: its weights, or the checkpoint that it read."""
        if self.processes.world == 1:
            return
        state = self.step.state()
        self.processes.broadcast_(state.values())
        self.step.restore_(state)
        counters = (self.done, self._earlier_seconds, self.validation, self._epoch_unlogged)
        self.done, self._earlier_seconds, self.validation, self._epoch_unlogged = self.processes.broadcast(counters)

    def _go_back(self) -> None:
        """Restore the last saved state that is known to be good, in the folder too.

        A state is known to be good if the step after it found its loss finite and below the limit. If there is none,
        the state is restored that this process began with. Clocks decide what is saved, so all processes take the
        first's.
        """
        self.done = int(self.step.count)  # where it diverged
        good = next((saved for saved in reversed(self._saved) if saved[1]["step"] < self.done), self._saved[0])
        tensors, state = good
        self.step.restore_(tensors)
        self.validation = Score(*state["validation"]) if state["validation"] else None
        self._share_state()
        if self.folder is not None and self.folder.saved_step != state["step"]:
            checkpoint.save(self.folder.path, tensors, state)

    # Start and end

    def _start(self, resume: bool) -> None:
        """Capture the step, write the configuration or resume, and give all processes the same state."""
        if self.config.graph:
            self.step.start_epoch(0, self._lr_factors(0))
            self.step.capture()
        with self.processes.shared_errors():
            if self.folder is not None:
                self._open(self.folder, resume)
        self._share_state()
        self._saved.append(self._state())
        self._train_start = self._polled_at = self._saved_at = time.perf_counter()
        self._setup_seconds = self._train_start - self._started
        self._first_step = self.done

    def _open(self, folder: RunFolder, resume: bool) -> None:
        if resume:
            self._resume(folder)
        if self.config.tensorboard:  # first, because a folder with a configuration counts as a run
            self._log = EventLog(folder.path, done=self.done)
            self.setup.cleanup.callback(self._log.close)
        with explained("the configuration", folder.config_path):
            write_text(folder.config_path, self.config.to_toml())
        plan = self.setup.plan
        if plan is not None and plan.changes is not None:
            with explained("the plan", folder.path / PLAN):
                write_json(folder.path / PLAN, describe(plan, source=self.config.model))
        self.data.write_files(folder.path)

    def _write_result(self, result: RunResult, picture: bool) -> None:
        """Write the result and the curves; a finished run that was resumed keeps those it has."""
        if self.folder is not None and self.folder.status != "finished":
            self.folder.write_result(result.to_json(), str(self.setup.device))
            if picture:
                write_curves(self.folder, f"{self.config.model}, {self.config.method}")
        self.processes.barrier()

    # Numbers

    def _poll(self) -> tuple[float, float, bool]:
        """Wait for the device; return the mean loss and accuracy of this epoch, and whether the run is alive."""
        self._polled_at = time.perf_counter()
        steps = self.done % self.setup.epoch_steps or self.setup.epoch_steps
        return float(self.step.loss_sum) / steps, float(self.step.correct) / steps, bool(self.step.alive)

    def _lr_factors(self, epoch: int) -> list[float]:
        """Return the factor of the learning rates in each step of an epoch."""
        schedule, steps = self.config.lr_schedule, self.setup.epoch_steps
        return [schedule.factor(epoch * steps + i, steps, self.config.epochs) for i in range(steps)]

    @property
    def _seconds(self) -> float:
        """How long the run has taken, over all processes that resumed it."""
        return self._earlier_seconds + time.perf_counter() - self._started

    def _throughput(self) -> float:
        """Return the images or tokens per second since this process began to train."""
        seconds = time.perf_counter() - self._train_start
        return (self.done - self._first_step) * self.inputs.per_step / max(seconds, 1e-9)

    @contextmanager
    def _pausing_throughput(self) -> Iterator[None]:
        """Leave the time of the block out of the throughput, which is that of the steps."""
        began = time.perf_counter()
        yield
        self._train_start += time.perf_counter() - began

    def _peak_gib(self) -> float | None:
        device = self.setup.device
        return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
