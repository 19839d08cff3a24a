"""`Trainer`: the training loop with validation, logging, checkpoints, and the result at the end.

`Trainer.run` is the whole run, and `Trainer._train` its loop. `TrainStep` is one step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normfree.files import explain_os_errors, write_text
from normfree.train.config import MAY_CHANGE, TrainConfig
from normfree.train.data import require_same_data
from normfree.train.engine.environment import (
    LaunchQueue,
    Stop,
    StopRequestedError,
    Throughput,
)
from normfree.train.engine.inputs import EvalBatches, Score, UntilSignal
from normfree.train.engine.setup import TrainSetup
from normfree.train.run import checkpoint
from normfree.train.run.result import EventLog, RunResult, Snapshot, write_curves
from normfree.train.run.run_folder import RunFolder, RunStatus, require_same_settings

if TYPE_CHECKING:
    from normfree.train.text.generation import Bleu

_log = logging.getLogger("normfree.train")

TRANSLATIONS = "translations.txt"  # of the test sentences, one per line
_POLL_SECONDS = 0.5  # between two readings of the loss, each of which waits for the device
_DIVERGED = 255  # the number with which a process tells all others that the run diverged; above all signals
_SAVE_SHARE = 0.1  # the largest share of the time spent on large checkpoints after epochs
_SMALL_BYTES = 2**25  # a checkpoint of this size may be written after every epoch

State = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and the plain data of a checkpoint."""


class Trainer:
    """A run in progress: its setup, its counters, and its folder.

    The folder is None for a run that is not saved, and in all processes but the first. `started` is the time by
    `time.perf_counter` at which the run began.
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
        self._throughput = Throughput(setup.inputs.per_step)
        self.done = 0  # steps
        self.validation: Score | None = None
        self._epoch_unlogged = False  # whether the last epoch is saved but not yet in metrics.jsonl
        self._earlier_seconds = 0.0  # training time of earlier processes
        self._saved: deque[State] = deque(maxlen=2)  # the last two states that were saved; at first the initial one
        self._saved_at = started
        self._scored_at = -1  # the step of the last validation
        self._writer: checkpoint.Writer | None = None
        if folder is not None:
            options = {"keep": self.config.keep_last, "keep_best": self.config.keep_best}
            self._writer = checkpoint.Writer(folder.path, folder.require_held, **options)
            setup.cleanup.callback(self._writer.close)
        self._fingerprint = self.data.fingerprint(self.config) if folder is not None else {}

    def run(
        self, *, resume: bool, progress: Callable[[Snapshot], None] | None, command: str | None, picture: bool
    ) -> RunResult:
        """Train until the end, a signal or a divergence; test the model, and write and return the result."""
        self._start(resume)
        status = self._train(progress)
        self.processes.watching = False  # the first one translates alone
        loss, accuracy, _ = self._poll() if self.done else (None, None, True)
        throughput = self._throughput.rate(self.done)
        if status == "interrupted" or not self.config.epochs:
            self._save()
        self._wait_for_checkpoint()
        device, test, bleu = self.setup.device, None, None
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
            throughput=throughput,
            unit=self.inputs.unit,
            bleu=bleu,
            inputs=self.data.source_files,
            peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
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
            self.step.start_epoch(epoch, config.lr_factors(epoch, steps), first)
            if first == 0:
                self.step.clear_metrics()
            for _ in range(first, steps):
                self._seed_generators(config.seed, self.done, self.processes.rank)
                self.step()
                self.done += 1
                self._stop.at_once = False
                queue.push()
                self.processes.barrier()  # notices a process that hangs, before anything waits for the device
                now, alive = time.perf_counter(), True
                save = bool(config.checkpoint_minutes) and now - self._saved_at >= 60 * config.checkpoint_minutes
                if save and self.processes.world > 1 and self._writer is not None and self._writer.busy:
                    save = False  # the other processes would wait
                if save or now - self._polled_at >= _POLL_SECONDS:
                    loss, accuracy, alive = self._poll()
                    if alive and progress is not None:
                        epochs, speed = self.done / steps, self._throughput.rate(self.done)
                        progress(Snapshot(self.done, self.total, epochs, loss, accuracy, speed, self.inputs.unit))
                # Clocks and signals differ between processes, but all must end at the same step.
                ended = self.processes.agree((self._stop.requested or 0) if alive else _DIVERGED)
                self.processes.watching = True  # the first step is done, which may take one process longer to compile
                if ended == _DIVERGED:
                    return "diverged"
                if ended:
                    self.signal = ended
                    return "interrupted" if self._poll()[2] else "diverged"
                if save:
                    with self._throughput.paused():
                        self._save()
            if (status := self._end_epoch(epoch)) is not None:
                return status
        return "finished"

    def _end_epoch(self, epoch: int) -> RunStatus | None:
        """Validate, log and save; return how the run ended if it diverged or a signal came meanwhile."""
        loss, accuracy, alive = self._poll()
        if not alive:
            return "diverged"
        speed = self._throughput.rate(self.done)
        with self._throughput.paused():
            if self.inputs.validation is not None:
                found = self._score(self.inputs.validation)
                if self.signal is not None:
                    return "interrupted"  # the epoch is not logged: the next process validates it
                self.validation, self._scored_at = found, self.done
            record: dict[str, Any] = {
                "step": self.done,
                "epoch": epoch + 1,
                "train_loss": loss,
                "train_accuracy": accuracy,
                "lr": self.config.lr * self.config.lr_factors(epoch, self.setup.epoch_steps)[-1],
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

    def _score(self, batches: EvalBatches | None) -> Score | None:
        """Score the moving average, or the weights if there is none; None without batches or if a signal came."""
        if batches is None:
            return None
        read = UntilSignal(batches(), self._stop)
        with self.step.averaged():
            found = self.setup.score(read)
        self.signal = self.processes.agree(read.signal) or None
        return found if self.signal is None else None

    def _translate(self) -> Bleu | None:
        """Translate the test sentences, if there are any, and write the lines; None if a signal came."""
        if not self.data.translates_test:
            return None
        bleu, signal = None, 0
        if self.processes.first:
            try:
                lines, bleu = self.data.translate_test(self.model, self.config, self._stop.raise_if_requested)
            except StopRequestedError:
                signal = self._stop.requested or 0
            else:
                if self.folder is not None:
                    self.folder.require_held()
                    path = self.folder.path / TRANSLATIONS
                    with explain_os_errors("the translations", path):
                        write_text(path, "".join(f"{line}\n" for line in lines))
        self.signal = self.processes.agree(signal) or None
        return bleu

    # The state: saved, resumed, and restored after a divergence

    def _state(self) -> State:
        """Copy all tensors of the run, and the counters beside them."""
        tensors, validation = self.step.copy_of_state(), self.validation and list(self.validation)
        # The score of this very state, by which the best checkpoint is found.
        score = self.validation.accuracy if self.validation and self._scored_at == self.done else None
        plain = {"step": self.done, "seconds": self._seconds, "validation": validation, "score": score}
        return tensors, {**plain, "config": self.config.to_toml(), **self._fingerprint}

    def _save(self) -> None:
        """Keep a copy of the state, and begin to write it as a checkpoint if the run has a folder."""
        if self._saved[-1][1]["step"] == self.done:
            self._saved.pop()  # the same state again
        self._saved.append(self._state())
        if self._writer is not None:
            self._writer.start(*self._saved[-1])
        self._saved_at = time.perf_counter()

    def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on the disk; raise its error if it could not be written."""
        if self._writer is not None:
            self._writer.wait()

    def _save_is_due(self, epoch: int) -> bool:
        """Return whether to save after this epoch; large checkpoints take at most a small share of the time."""
        every = self.config.checkpoint_epochs
        small = sum(tensor.nbytes for tensor in self._saved[-1][0].values()) <= _SMALL_BYTES
        writer, passed = self._writer, time.perf_counter() - self._saved_at
        worth = small or writer is None or (not writer.busy and passed >= writer.seconds / _SAVE_SHARE)
        return bool(every) and (epoch + 1) % every == 0 and self.processes.broadcast(worth)

    def _resume(self, folder: RunFolder) -> None:
        """Restore the last checkpoint of a folder. Raises `ValueError` if the run there is different or diverged."""
        begun_alone = {"graph"} if self.processes.world > 1 else set()  # a single process may have used a CUDA graph
        folder.require_resumable(self.config, MAY_CHANGE | begun_alone)
        found = folder.resume()
        if found is None:
            return
        tensors, state = found
        if "config" in state:  # config.toml may have been edited since
            before = TrainConfig.from_toml_text(state["config"], str(folder.path))
            require_same_settings(before, self.config, MAY_CHANGE | begun_alone, f"the checkpoint in '{folder.path}'")
            self._require_epochs(before, state["step"])
        require_same_data(self.data, self._fingerprint, state, folder.path)
        self.step.restore_(tensors)
        self.done, self._earlier_seconds = state["step"], state["seconds"]
        if self.done < self.total and folder.status == "finished":
            folder.remove_result()  # more epochs, or an earlier checkpoint in place of a damaged one
        if state.get("score") is not None:
            self._scored_at = self.done
        self.validation = Score(*state["validation"]) if state["validation"] else None
        logged = next((record for record in folder.read_metrics() if record["step"] == self.done), None)
        self._epoch_unlogged = logged is None and self.done > 0 and self.done % self.setup.epoch_steps == 0
        if logged is not None and "validation_loss" in logged:  # which may be newer than the checkpoint
            self.validation = Score(logged["validation_loss"], logged["validation_accuracy"])

    def _require_epochs(self, before: TrainConfig, step: int) -> None:
        """Raise `ValueError` for fewer epochs than the run has trained; the log says that a schedule has changed."""
        done, asked = -(-step // self.setup.epoch_steps), self.config.epochs
        if asked < done:
            raise ValueError(f"expected at least the {done} epochs that the run has trained, got {asked}; ask for more")
        if asked != before.epochs:
            _log.warning(
                "epochs: the run began with epochs=%d and continues with epochs=%d; its rates follow the "
                "new schedule from step %d on",
                before.epochs,
                asked,
                step,
            )

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
        it restores the state that this process began with. Clocks decide when states are saved, so all processes take
        the first one's.
        """
        self.done = int(self.step.count)  # where it diverged
        good = (saved for saved in reversed(self._saved) if saved[1]["step"] < self.done)
        tensors, state = next(good, self._saved[0])
        self.step.restore_(tensors)
        self.validation = Score(*state["validation"]) if state["validation"] else None
        self._share_state()
        if self._writer is not None and self.folder is not None and self.folder.saved_step != state["step"]:
            self._writer.start(tensors, state)
            self._writer.wait()

    # Start and end

    def _start(self, resume: bool) -> None:
        """Capture the step, write the configuration or resume, and give all processes the same state."""
        if self.config.graph:
            self.step.start_epoch(0, self.config.lr_factors(0, self.setup.epoch_steps))
            self.step.capture()
        with self.processes.shared_errors():
            if self.folder is not None:
                if resume:
                    self._resume(self.folder)
                else:
                    self.folder.clear()  # of a run that never took a step, or that is to be overwritten
                if self.config.tensorboard:  # first, because a folder with a configuration counts as a run
                    self._log = EventLog(self.folder.path, done=self.done)
                    self.setup.cleanup.callback(self._log.close)
                self.setup.write_files(self.folder)
        self._share_state()
        self._saved.append(self._state())
        self._throughput.start(self.done)
        self._polled_at = self._saved_at = time.perf_counter()
        self._setup_seconds = self._saved_at - self._started

    def _write_result(self, result: RunResult, picture: bool) -> None:
        """Write the result and the curves; a finished run that is resumed keeps its files."""
        if self.folder is not None and self.folder.status != "finished":
            self.folder.write_result(result.to_json(), str(self.setup.device))
            if picture:
                self.folder.require_held()
                write_curves(self.folder, f"{self.config.model}, {self.config.method}")
        self.processes.barrier()

    def _poll(self) -> tuple[float, float, bool]:
        """Wait for the device; return the mean loss and accuracy of this epoch, and whether the run is alive."""
        self._polled_at = time.perf_counter()
        if self._writer is not None:
            self._writer.raise_error()
        steps = self.done % self.setup.epoch_steps or self.setup.epoch_steps
        return float(self.step.loss_sum) / steps, float(self.step.correct) / steps, bool(self.step.alive)

    @property
    def _seconds(self) -> float:
        """How long the run has taken, over all processes that resumed it."""
        return self._earlier_seconds + time.perf_counter() - self._started
