"""`fit` and `Trainer`: the training loop with validation, logging, checkpoints, and the result at the end.

`Trainer.run` is the whole run, `Trainer._train_step` one turn of its loop, and `TrainStep._step` what a step computes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normfree.arguments import check_arguments
from normfree.data import ImageSet
from normfree.plan import ResidualPlan
from normfree.train.config import MAY_CHANGE, TrainConfig
from normfree.train.engine.data_interface import EvalBatches
from normfree.train.engine.process_state import LaunchQueue, UntilSignal
from normfree.train.engine.run_display import RunDisplay, ShowProgress, Throughput
from normfree.train.engine.setup import TrainSetup, open_run
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder
from normfree.train.run.run_page import write_curves
from normfree.train.run.run_records import RunResult, RunStatus, Score, Snapshot

if TYPE_CHECKING:
    from normfree.data.text.prepared_folder import Prepared
    from normfree.train.text.generation import Bleu

_POLL_SECONDS = 0.5  # between two readings of the loss, each of which waits for the device
_DIVERGED = 255  # a process sends this number to all others if the run diverged; above all signals
_SAVE_SHARE = 0.1  # the largest share of the time spent on large checkpoints after epochs
_SMALL_BYTES = 2**25  # a checkpoint of this size may be written after every epoch

OnEpoch = Callable[[dict[str, Any]], None]
CheckpointState = tuple[dict[str, Tensor], dict[str, Any]]  # the tensors and the plain data of a checkpoint


def fit(
    config: TrainConfig,
    *,
    model: nn.Module | None = None,
    data: ImageSet | Prepared | None = None,
    plan: ResidualPlan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: ShowProgress | bool | None = None,
    on_epoch: OnEpoch | None = None,
    command: str | None = None,
    picture: bool = True,
) -> RunResult:
    """Train a model, and test it at the end.

    SIGINT and SIGTERM let the run finish its step or batch and save. A run that diverges ends with its last good
    checkpoint or the initial model. A third-party model is converted, unless the method is 'as built'.

        result = nf.fit(nf.recipe("fashion", epochs=2), out="runs/fashion")
        print(result.test.accuracy)

    Args:
        config: All settings of the run.
        model: A model to train, instead of the configured model.
        data: Data to train on, instead of the configured data.
        plan: The plan of a given model, by which its parameters learn and decay. Default: the one that it remembers.
        out: The folder of the run, which can be resumed bit for bit after a signal or a kill. None keeps nothing.
        resume: Whether to resume the run in `out`. Settings that change no number may differ, and `epochs`.
        overwrite: Whether to replace a run in `out`. It is removed when the new one is ready to train.
        progress: True shows a line of progress, False none; None shows it in a notebook only. A function is called
            about twice a second with the state of the run.
        on_epoch: Called with the metrics of every epoch. If it raises an error, the run ends and can be resumed.
        command: The command line to store in the result.
        picture: Whether to write page.html while the run trains, and the picture curves.png at the end.

    Returns:
        The scores, the trained model, and how the run ended.

    Raises:
        ValueError: If the configuration, the model and the data do not fit together, or the folder cannot be used.
        OSError: If the folder cannot be written.
    """
    check_arguments(config=config, plan=plan, **{} if model is None else {"model": model})
    done = (RunFolder(out).saved_step or 0) if resume and out is not None else 0
    with (
        RunDisplay(config.model, progress, page=picture, done=done) as display,
        open_run(config, model, data, plan, out, resume=resume, overwrite=overwrite) as setup,
    ):
        return Trainer(setup, display, on_epoch).run(resume=resume, command=command, picture=picture)


class Trainer:
    """A run in progress. Its folder is None if the run is not saved, and in all processes but the first."""

    def __init__(self, setup: TrainSetup, display: RunDisplay, on_epoch: OnEpoch | None = None) -> None:
        self.setup, self.folder, self.config, self.data = setup, setup.folder, setup.config, setup.data
        self.step, self.inputs, self.processes = setup.step, setup.inputs, setup.processes
        self.done, self.total = 0, setup.steps_per_epoch * setup.config.epochs  # steps
        self.validation: Score | None = None
        self.stop_signal: int | None = None  # the number of the Unix signal that stopped the run
        self._display, self._on_epoch = display, on_epoch
        self._throughput = Throughput(setup.inputs.items_per_step)
        self._launched = LaunchQueue(setup.device)
        self._epoch_unlogged = False  # whether the last epoch is saved but not yet in metrics.jsonl
        self._earlier_seconds = 0.0  # training time of earlier processes
        self._saved: deque[CheckpointState] = deque(maxlen=2)  # the last two saved ones, at first the initial one
        self._scored_at = -1  # the step of the last validation
        self._fingerprint = {} if self.folder is None else self.data.fingerprint(self.config)
        kept = {"keep": self.config.keep_last, "keep_best": self.config.keep_best}
        self._writer: checkpoint.Writer | None = None if self.folder is None else self.folder.open_writer(**kept)

    def run(self, *, resume: bool, command: str | None, picture: bool) -> RunResult:
        """Train until the end, a signal or a divergence; test the model, and write and return the result."""
        try:
            self._start(resume)
            status = self._train()
            self.processes.watching = False  # the others wait while the first one translates
            loss, accuracy, _ = self._poll() if self.done else (None, None, True)
            throughput = self._throughput.rate(self.done)
            if status == "interrupted" or not self.config.epochs:
                self._save()
            if self._writer is not None:
                self._writer.wait()
            device, test, bleu = self.setup.device, None, None
            if status == "finished":
                test = self._score(self.inputs.test)
                if self.stop_signal is not None:
                    status = "interrupted"  # the trained model is saved, and resuming tests it
                elif test is not None and not math.isfinite(test.loss):
                    status, test = "diverged", None  # in the last step, after which no loss was read
            if status == "diverged":
                self._go_back()
            with self.step.averaged():
                self.setup.release()
            if status == "finished":
                bleu = self._translate()
                if self.stop_signal is not None:
                    status = "interrupted"
            result = RunResult(
                status=status,
                config=self.config,
                model=self.setup.model,
                steps=self.done,
                epochs=self.done / self.setup.steps_per_epoch,
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
                unit=self.data.unit,
                bleu=bleu,
                inputs=self.data.source_files,
                peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
                signal=self.stop_signal,
                command=command,
            )
            self._write_result(result, picture)
            return result
        finally:
            if self._writer is not None:
                self._writer.close()

    def _train(self) -> RunStatus:
        """Train all steps that are left, epoch by epoch; return how that ended."""
        steps = self.setup.steps_per_epoch
        if self._epoch_unlogged and (status := self._end_epoch(self.done // steps - 1)) is not None:
            return status
        self.setup.stop.at_once = bool(self.config.compile)  # compiling the first step may take minutes
        while self.done < self.total:
            epoch, first = divmod(self.done, steps)
            self.step.start_epoch(epoch, self.setup.lr_factors(epoch), first)
            if first == 0:
                self.step.clear_metrics()
            for _ in range(first, steps):
                if (status := self._train_step()) is not None:
                    return status
            if (status := self._end_epoch(epoch)) is not None:
                return status
        return "finished"

    def _train_step(self) -> RunStatus | None:
        """Train on a batch; report and save if it is time; return how the run ended if it diverged or a signal came."""
        setup, processes = self.setup, self.processes
        setup.seed_generators(self.config.seed, self.done, processes.rank)
        self.step()
        self.done += 1
        setup.stop.at_once = False
        self._launched.push()
        processes.barrier()  # notices a process that hangs, before anything waits for the device
        now, minutes, alive = time.perf_counter(), self.config.checkpoint_minutes, True
        save = bool(minutes) and now - self._saved_at >= 60 * minutes
        if save and processes.world > 1 and self._writer is not None and self._writer.busy:
            save = False  # the other processes would wait
        if save or now - self._polled_at >= _POLL_SECONDS:
            loss, accuracy, alive = self._poll()
            if alive:
                self._report(loss, accuracy, line=True)
        # Clocks and signals differ between processes, but all must end at the same step.
        ended = processes.maximum((setup.stop.requested or 0) if alive else _DIVERGED)
        processes.watching = True  # the first step is done, which may take one process longer to compile
        if ended == _DIVERGED:
            return "diverged"
        if ended:
            self.stop_signal = ended
            return "interrupted" if self._poll()[2] else "diverged"
        if save:
            with self._throughput.paused():
                self._save()
        return None

    def _end_epoch(self, epoch: int) -> RunStatus | None:
        """Validate, log and save; return how the run ended if it diverged or a signal came."""
        loss, accuracy, alive = self._poll()
        if not alive:
            return "diverged"
        speed = self._throughput.rate(self.done)
        with self._throughput.paused():
            if self.inputs.validation is not None:
                found = self._score(self.inputs.validation)
                if self.stop_signal is not None:
                    return "interrupted"  # the epoch is not logged: the next process validates it
                self.validation, self._scored_at = found, self.done
            record: dict[str, Any] = {
                "step": self.done,
                "epoch": epoch + 1,
                "train_loss": loss,
                "train_accuracy": accuracy,
                "lr": self.config.lr * self.setup.lr_factors(epoch)[-1],
                "seconds": round(self._seconds, 3),
                f"{self.data.unit}_per_second": round(speed, 1),
            }
            if self.validation is not None:
                record |= {"validation_loss": self.validation.loss, "validation_accuracy": self.validation.accuracy}
            if self.folder is not None:
                self.folder.append(record)
            if self.done >= self.total or self._save_is_due(epoch):
                self._save()
            self._display.end_epoch(record, last=self.done >= self.total)
            self._report(loss, accuracy, line=False)
            if self._on_epoch is not None:
                self._on_epoch(record)
        return None

    def _report(self, loss: float, accuracy: float, *, line: bool) -> None:
        """Show the progress of the run, in its folder and in the line of progress."""
        epochs, speed = self.done / self.setup.steps_per_epoch, self._throughput.rate(self.done)
        now = Snapshot(self.done, self.total, epochs, loss, accuracy, speed, self.data.unit, self.validation)
        self._display.report(now, self._seconds, line=line)

    def _score(self, batches: EvalBatches | None) -> Score | None:
        """Score the moving average, or the weights if there is none; None without batches or if a signal came."""
        if batches is None:
            return None
        read = UntilSignal(batches(), self.setup.stop)
        with self.step.averaged():
            found = self.setup.score(read)
        self.stop_signal = self.processes.maximum(read.stop_signal) or None
        return found if self.stop_signal is None else None

    def _translate(self) -> Bleu | None:
        """Translate the test sentences, if there are any, and write the lines; None if a signal came."""
        lines, bleu, stop_signal = self.setup.translate_test()
        if bleu is not None and self.folder is not None:
            self.folder.write_translations(lines)
        self.stop_signal = self.processes.maximum(stop_signal) or None
        return bleu

    # The state: saved, resumed, and restored after a divergence

    def _state(self) -> CheckpointState:
        """Copy all tensors of the run, and the counters beside them."""
        tensors, validation = self.step.copy_of_state(), self.validation and list(self.validation)
        # The score of this very state, by which the best checkpoint is found.
        score = self.validation.accuracy if self.validation and self._scored_at == self.done else None
        plain = {"step": self.done, "seconds": self._seconds, "validation": validation, "score": score}
        return tensors, {**plain, "config": self.setup.config_text, **self._fingerprint}

    def _save(self) -> None:
        """Keep a copy of the state, and begin to write it as a checkpoint if the run has a folder."""
        if self._saved[-1][1]["step"] == self.done:
            self._saved.pop()  # the same state again
        self._saved.append(self._state())
        if self._writer is not None:
            self._writer.start(*self._saved[-1])
        self._saved_at = time.perf_counter()

    def _save_is_due(self, epoch: int) -> bool:
        """Return whether to save after this epoch; large checkpoints take at most a small share of the time."""
        small = sum(tensor.nbytes for tensor in self._saved[-1][0].values()) <= _SMALL_BYTES
        every, writer, passed = self.config.checkpoint_epochs, self._writer, time.perf_counter() - self._saved_at
        worth = small or writer is None or (not writer.busy and passed >= writer.seconds / _SAVE_SHARE)
        return bool(every) and (epoch + 1) % every == 0 and self.processes.broadcast(worth)

    def _resume(self, folder: RunFolder) -> None:
        """Restore the last checkpoint of a folder. Raises `ValueError` if the run there is different or diverged."""
        begun_alone = {"graph"} if self.processes.world > 1 else set()  # a single process may have used a CUDA graph
        accept = partial(self.data.require_same, self._fingerprint, folder.path)
        if (found := folder.resume(self.config, MAY_CHANGE | begun_alone, self.setup.steps_per_epoch, accept)) is None:
            return
        tensors, state = found
        self.step.restore_(tensors)
        self.done, self._earlier_seconds = state["step"], state["seconds"]
        if self.done < self.total and folder.status == "finished":
            folder.remove_result()  # more epochs, or an earlier checkpoint in place of a damaged one
        if state.get("score") is not None:
            self._scored_at = self.done
        self.validation = Score(*state["validation"]) if state["validation"] else None
        logged = next((record for record in folder.read_metrics() if record["step"] == self.done), None)
        if logged is not None and "validation_loss" in logged:
            self.validation = Score(logged["validation_loss"], logged["validation_accuracy"])
            if state.get("score", 0.0) is None:  # a kill came between the metrics and the checkpoint with the score
                folder.cut_metrics(self.done - 1)
                logged = None
        self._epoch_unlogged = logged is None and self.done > 0 and self.done % self.setup.steps_per_epoch == 0

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

        A state is good if the step after it found its loss finite and below the limit. Without one, it is the state
        that this process began with. Clocks decide when states are saved, so all processes take the first one's.
        """
        self.done = int(self.step.good_steps)  # where it diverged
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
        self._display.attach(self.setup)
        if self.config.graph:
            self.step.start_epoch(0, self.setup.lr_factors(0))
            self.step.capture()
        with self.processes.shared_errors():
            if self.folder is not None:
                if resume:
                    self._resume(self.folder)
                else:
                    self.folder.clear()  # of a run that never took a step, or that is to be overwritten
                self._display.open_log(self.done)  # first, because a folder with a configuration counts as a run
                self.folder.write_config(self.setup.config_text, self.setup.plan, source=self.config.model)
                self.data.write_files(self.folder.write_path)
        self._share_state()
        self._saved.append(self._state())
        self._display.start(self.done)
        self._throughput.start(self.done)
        self._polled_at = self._saved_at = time.perf_counter()
        self._setup_seconds = self._saved_at - self.setup.started

    def _write_result(self, result: RunResult, picture: bool) -> None:
        """Write the result and the curves; a finished run that is resumed keeps its files."""
        if self.folder is not None and self.folder.status == "finished":
            self._display.end(self.folder.read_result())
        elif self.folder is not None:
            written = self.folder.write_result(result.to_json(), str(self.setup.device))
            if picture:
                title = f"{self.config.model}, {self.config.method}"
                self.folder.write_picture(partial(write_curves, self._display.records, title))
            self._display.end(written)
        self.processes.barrier()

    def _poll(self) -> tuple[float, float, bool]:
        """Wait for the device; return the mean loss and accuracy of this epoch, and whether the run is alive."""
        self._polled_at = time.perf_counter()
        if self._writer is not None:
            self._writer.raise_error()
        steps = self.done % self.setup.steps_per_epoch or self.setup.steps_per_epoch
        return float(self.step.loss_sum) / steps, float(self.step.accuracy_sum) / steps, bool(self.step.alive)

    @property
    def _seconds(self) -> float:
        """How long the run has taken, over all processes that resumed it."""
        return self._earlier_seconds + time.perf_counter() - self.setup.started
