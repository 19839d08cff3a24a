"""`fit`: a configuration becomes a trained model and a folder that holds everything about it.

The loop below only counts steps, looks at the run now and then, and saves. What it trains with is put together in
`rig`, what a step does is in `step`, what is fed to it in `inputs`, how it is scored in `judging`, where things are
kept in `runs` and `checkpoint`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.saving import PLAN, describe
from normfree.data import ImageSet
from normfree.data.embedded import LINEAR_ACCURACY
from normfree.data.prepared import VOCABULARY, Prepared
from normfree.files import explained, replacing, write_json
from normfree.models.foreign import is_foreign
from normfree.plan import ResidualPlan
from normfree.train.config import FREE, TrainConfig
from normfree.train.curves import EventLog, write_curves
from normfree.train.distributed import joined
from normfree.train.evaluation import Score
from normfree.train.hardware import InFlight, device_of, fast
from normfree.train.inputs import example_of, open_data, require_whole
from normfree.train.judging import Judge
from normfree.train.randomness import seeded_draws
from normfree.train.result import RunResult, Snapshot
from normfree.train.rig import Rig
from normfree.train.runs import RunFolder, Status, require_same
from normfree.train.signals import Stop
from normfree.train.subject import (
    as_given,
    branch_count,
    built_from,
    class_count,
    model_of,
    require_effect,
    require_images,
    require_scores,
)
from normfree.train.tokens import require_data, require_token_scores
from normfree.train.translating import Bleu

Kept = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and the plain state of a checkpoint."""
_LOOK = 0.5  # seconds between two looks at the loss, each of which waits for the device
_SHARE, _SMALL = 0.1, 2**25  # of the time, for large checkpoints after epochs; bytes of one that may come after each
_DEAD = 255  # what a process says that found the run dead; above the numbers of signals


def fit(
    config: TrainConfig,
    *,
    model: nn.Module | None = None,
    data: ImageSet | Prepared | None = None,
    plan: ResidualPlan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Snapshot], None] | None = None,
    command: str | None = None,
    picture: bool = True,
) -> RunResult:
    """Train a model, and test it at the end.

    A model of others that the configuration names is converted by its method, or left as it is by 'as built'. `model`
    and `data` stand in for those that the configuration names, and are named in the run's own. A model that was
    converted comes with its `plan`, so that its parameters learn and decay as the method asks. With `out` the
    run is kept in that folder and can be resumed bit for bit after a signal, a kill or a power failure. SIGINT and
    SIGTERM let it finish its step or batch and save. One that diverges ends with the model of its last checkpoint
    before that, or of the start. `progress` is told how far it is about twice a second. `command` is kept in the
    result. `picture` draws curves.png at the end.

    Raises `ValueError` for what cannot be trained, and `OSError` where the folder cannot be written.
    """
    began = time.perf_counter()
    device = device_of(config.device)
    with ExitStack() as stack:
        processes = stack.enter_context(joined(device))
        folder = RunFolder(out) if out is not None else None
        stop = stack.enter_context(Stop())
        seed_draws = stack.enter_context(seeded_draws(device))
        with processes.together():
            if folder is not None and processes.first:
                stack.enter_context(folder.hold(resume=resume))
            opened = data if data is not None else open_data(config)
            require_whole(opened)
            seed_draws(config.seed)
            if plan is not None and model is None:
                raise ValueError("expected a plan beside the model that was converted, got one alone; pass model=, too")
            trained, plan = model_of(config, opened) if model is None else (model, plan)
            if not resume:  # a run that was begun may go on
                require_effect(config, opened, given=model is not None)
            if isinstance(opened, Prepared):
                if model is not None:
                    require_token_scores(trained, config, opened)
            elif model is not None or is_foreign(config.model):
                require_scores(trained, example_of(config, opened, 2), class_count(opened))
            config = as_given(config, model, data, plan)
            config = config.resolved(cuda=device.type == "cuda", branches=branch_count(trained), world=processes.world)
            if config.graph and device.type != "cuda":
                remedy = "resume the run where there is one" if resume else "use graph=false"
                raise ValueError(f"expected a GPU for graph=true, got device '{device}'; {remedy}")
            stack.enter_context(fast(device, config))
            rig = Rig(config, trained, plan, opened, device, processes)
            stack.callback(rig.release)
            run = _Run(rig, folder if processes.first else None, began)
        return run.train(stop, seed_draws, resume=resume, progress=progress, command=command, picture=picture)


class _Run:
    """A run on its way: what it trains with, the counters, and the folder it is kept in."""

    def __init__(self, rig: Rig, folder: RunFolder | None, began: float) -> None:
        self.rig, self.folder, self._begun = rig, folder, began
        self.config, self.model, self.step, self.processes = rig.config, rig.model, rig.step, rig.processes
        self._shapes = built_from(rig.config, rig.data) if folder is not None else {}
        self.total = rig.steps * rig.config.epochs
        self.done = 0
        self.before = 0.0  # seconds that earlier processes trained
        self.validation: Score | None = None
        self._owed = False  # whether an earlier process saved the last step of an epoch, and ended before its metrics
        self.signal: int | None = None
        self._log: EventLog | None = None
        self._cost = 0.0  # seconds that the last checkpoint took
        self._kept: deque[Kept] = deque(maxlen=2)  # the last two states that were saved, or the one that it began with

    # The loop

    def train(
        self,
        stop: Stop,
        seed_draws: Callable[..., None],
        *,
        resume: bool,
        progress: Callable[[Snapshot], None] | None,
        command: str | None,
        picture: bool,
    ) -> RunResult:
        """Go on until the end, a signal or a divergence, and say how it ended."""
        self._stop, self._seed_draws, self.command = stop, seed_draws, command
        self._judge = Judge(self.rig, stop, self.folder)
        if self.config.graph:
            self.step.start_epoch(0, self._factors(0))
            self.step.capture()
        with self.processes.together():
            self._open(resume)
        self._share()
        self._kept.append(self._state())
        self.setup_seconds = time.perf_counter() - self._begun
        self._train_start, self._done_at_start = time.perf_counter(), self.done
        self._saved = self._looked = time.perf_counter()
        status = self._loop(progress)
        train_loss, train_accuracy, _ = self._look() if self.done else (None, None, True)
        self.train_seconds = time.perf_counter() - self._train_start
        if status == "interrupted" or not self.config.epochs:
            self._save()
        test = None
        if status == "finished":
            with self.step.averaged():
                test = self._judge.score(self.rig.inputs.test)
            if self._judge.signal is not None:
                status = "interrupted"  # what is trained is saved, and resuming does the rest
            if test is not None and not math.isfinite(test.loss):
                status, test = "diverged", None  # by its last step, after which no loss was seen any more
        if status == "diverged":
            self._go_back()
        with self.step.averaged():
            self.rig.release()
        translated = None
        if status == "finished":
            translated = self._judge.translate()
            if self._judge.signal is not None:
                status = "interrupted"
        result = self._result(status, train_loss, train_accuracy, test, translated)
        self._close(result, picture)
        return result

    def _loop(self, progress: Callable[[Snapshot], None] | None) -> Status:
        config, flying = self.config, InFlight(self.rig.device)
        if self._owed and (status := self._end_epoch(self.done // self.rig.steps - 1)) is not None:
            return status
        while self.done < self.total:
            epoch, first = divmod(self.done, self.rig.steps)
            self.step.start_epoch(epoch, self._factors(epoch), first)
            if first == 0:
                self.step.clear_metrics()
            for _ in range(first, self.rig.steps):
                self._seed_draws(config.seed, self.done, self.processes.rank)
                self.step()
                self.done += 1
                flying.launched()
                now = time.perf_counter()
                due = bool(config.checkpoint_minutes) and now - self._saved >= 60 * config.checkpoint_minutes
                alive = True
                if due or now - self._looked >= _LOOK:
                    loss, accuracy, alive = self._look()
                    if alive and progress is not None:
                        seen = self.done, self.total, self.done / self.rig.steps
                        progress(Snapshot(*seen, loss, accuracy, self._speed(), self.rig.inputs.unit))
                # Clocks and signals differ between processes, but all must end at the same step.
                ended = self.processes.agree((self._stop.requested or 0) if alive else _DEAD)
                if ended == _DEAD:
                    return "diverged"
                if ended:
                    self.signal = ended
                    return "interrupted" if self._look()[2] else "diverged"
                if due:
                    with self._aside():
                        self._save()
            if (status := self._end_epoch(epoch)) is not None:
                return status
        return "finished"

    def _end_epoch(self, epoch: int) -> Status | None:
        """Score, log and save; how the run ended where it is no longer alive, or a signal cut the scoring short."""
        loss, accuracy, alive = self._look()
        if not alive:
            return "diverged"
        speed = self._speed()
        with self._aside():
            return self._log_epoch(epoch, loss, accuracy, speed)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is done here takes no time from the steps: `throughput` is theirs."""
        began = time.perf_counter()
        yield
        self._train_start += time.perf_counter() - began

    def _log_epoch(self, epoch: int, loss: float, accuracy: float, speed: float) -> Status | None:
        if self.rig.inputs.validation is not None:
            with self.step.averaged():
                found = self._judge.score(self.rig.inputs.validation)
            if self._judge.signal is not None:
                return "interrupted"  # the epoch is owed: the next process scores it
            self.validation = found
        record: dict[str, Any] = {
            "step": self.done,
            "epoch": epoch + 1,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "lr": self.config.lr * self._factors(epoch)[-1],
            "seconds": round(self.before + time.perf_counter() - self._begun, 3),
            f"{self.rig.inputs.unit}_per_second": round(speed, 1),
        }
        if self.validation is not None:
            record |= {"validation_loss": self.validation.loss, "validation_accuracy": self.validation.accuracy}
        if self.folder is not None:
            self.folder.append(record)
            if self._log is not None:
                self._log(record)
        if self.done >= self.total or self._is_due(epoch):
            self._save()
        return None

    def _is_due(self, epoch: int) -> bool:
        """Whether there is to be a checkpoint after this epoch; large ones take a small share of the time at most."""
        every = self.config.checkpoint_epochs
        small = sum(tensor.nbytes for tensor in self._kept[-1][0].values()) <= _SMALL
        worth = small or time.perf_counter() - self._saved >= self._cost / _SHARE
        return bool(every) and (epoch + 1) % every == 0 and self.processes.tell(worth)

    def _look(self) -> tuple[float, float, bool]:
        """Mean loss and accuracy of this epoch so far, and whether the run is alive; waits for the device."""
        self._looked = time.perf_counter()
        steps = self.done % self.rig.steps or self.rig.steps
        return float(self.step.loss_sum) / steps, float(self.step.correct) / steps, bool(self.step.alive)

    def _factors(self, epoch: int) -> list[float]:
        """What the learning rates are multiplied by in each step of an epoch."""
        schedule, config = self.config.lr_schedule, self.config
        first = epoch * self.rig.steps
        return [schedule.factor(first + i, self.rig.steps, config.epochs) for i in range(self.rig.steps)]

    def _speed(self) -> float:
        """Images or tokens a second since this process began to train."""
        seconds = time.perf_counter() - self._train_start
        return (self.done - self._done_at_start) * self.rig.inputs.per_step / max(seconds, 1e-9)

    # The folder

    def _open(self, resume: bool) -> None:
        """Write the configuration, or go on from the last checkpoint."""
        if self.folder is None:
            return
        if resume:
            self._resume(self.folder)
        if self.config.tensorboard:  # first, because a folder with a configuration counts as a run
            self._log = EventLog(self.folder.path, done=self.done)
            self.rig.undo.callback(self._log.close)
        path = self.folder.config_path
        with explained("the configuration", path), replacing(path) as temporary:
            temporary.write_text(self.config.to_toml(), encoding="utf-8")
        if self.rig.plan is not None and self.rig.plan.changes is not None:
            path = self.folder.path / PLAN
            with explained("the plan", path):
                write_json(path, describe(self.rig.plan, source=self.config.model))
        if isinstance(self.rig.data, Prepared):
            path = self.folder.path / VOCABULARY
            with explained("the vocabulary", path), replacing(path) as temporary:
                temporary.write_bytes(self.rig.data.vocabulary().model)

    def _resume(self, folder: RunFolder) -> None:
        if folder.config_path.exists():
            free = FREE if self.processes.world == 1 else {*FREE, "graph"}  # which one process may have had
            require_same(asdict(TrainConfig.from_toml(folder.config_path)), asdict(self.config), folder.path, free=free)
        if folder.status == "diverged":
            raise ValueError(
                f"expected a run that can go on, but the one in '{folder.path}' diverged; "
                "start another one with a lower learning rate, or another method"
            )
        found = folder.resume()
        if found is not None:
            tensors, state = found
            if isinstance(self.rig.data, Prepared):
                require_data(self.rig.data, state, folder.path)
            else:
                require_images(self._shapes, state, folder.path)
            self.step.restore_(tensors)
            self.done, self.before = state["step"], state["seconds"]
            self.validation = Score(*state["validation"]) if state["validation"] else None
            ended = self.done > 0 and self.done % self.rig.steps == 0
            self._owed = ended and all(record["step"] != self.done for record in folder.read_metrics())

    def _share(self) -> None:
        """Let every process start from where the first is: from its weights, or the checkpoint that it read."""
        if self.processes.world > 1:
            state = self.step.state()
            self.processes.share_(state.values())
            self.step.restore_(state)
            told = self.processes.tell((self.done, self.before, self.validation, self._owed))
            self.done, self.before, self.validation, self._owed = told

    def _save(self) -> None:
        began = time.perf_counter()
        if self._kept[-1][1]["step"] == self.done:
            self._kept.pop()  # the same state again
        self._kept.append(self._state())
        if self.folder is not None:
            self.folder.save(*self._kept[-1])
        self._saved = time.perf_counter()
        self._cost = self._saved - began

    def _state(self) -> Kept:
        """A copy of all that a run consists of, and where it is."""
        state = {
            "step": self.done,
            "seconds": self.before + time.perf_counter() - self._begun,
            "validation": self.validation and list(self.validation),
            **self._shapes,
        }
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.step.state().items()}, state

    def _go_back(self) -> None:
        """Leave a diverged run, and its folder, in the last saved state that is known to be good.

        A state is known to be good when the step after it found its loss finite and below the limit. Where none is, the
        one is left that this process began with.
        """
        self.done = int(self.step.count)  # where it diverged
        good = next((kept for kept in reversed(self._kept) if kept[1]["step"] < self.done), self._kept[0])
        tensors, state = good
        self.step.restore_(tensors)
        self.validation = Score(*state["validation"]) if state["validation"] else None
        if self.folder is not None and self.folder.saved_step != state["step"]:
            self.folder.save(tensors, state)

    def _close(self, result: RunResult, picture: bool) -> None:
        again = self.folder is not None and self.folder.status == "finished"  # resumed, and there was nothing to do
        if self.folder is not None and not again:
            self.folder.write_result(result.to_json(), str(self.rig.device))
            if picture:
                write_curves(self.folder, f"{self.config.model}, {self.config.method}")
        self.processes.wait()

    def _result(
        self, status: Status, loss: float | None, accuracy: float | None, test: Score | None, bleu: Bleu | None
    ) -> RunResult:
        cuda = self.rig.device.type == "cuda"
        steps = self.done - self._done_at_start
        return RunResult(
            status=status,
            config=self.config,
            model=self.model,
            steps=self.done,
            epochs=self.done / self.rig.steps,
            train_loss=loss,
            train_accuracy=accuracy,
            validation=self.validation,
            test=test,
            linear_accuracy=LINEAR_ACCURACY if getattr(self.rig.data, "name", None) == "fashion14" else None,
            parameters=self.rig.parameters,
            classes=class_count(self.rig.data),
            seconds=self.before + time.perf_counter() - self._begun,
            setup_seconds=self.setup_seconds,
            throughput=steps * self.rig.inputs.per_step / max(self.train_seconds, 1e-9),
            unit=self.rig.inputs.unit,
            bleu=bleu,
            peak_gib=torch.cuda.max_memory_allocated(self.rig.device) / 2**30 if cuda else None,
            signal=self.signal or self._judge.signal,
            command=self.command,
        )
