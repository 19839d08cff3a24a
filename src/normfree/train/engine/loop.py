"""`fit`: a configuration becomes a trained model and a folder that holds everything about it.

The loop below only counts steps, looks at the run now and then, and saves. What it trains with is put together in
`rig`, what a step does is in `step`, what is fed to it in `inputs`, how it is scored in `judging`, where it stands in
`standing`, where things are kept in `runs` and `checkpoint`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normfree.conversion.saving import PLAN, describe
from normfree.data import ImageSet
from normfree.data.images.fashion14 import LINEAR_ACCURACY
from normfree.data.text.prepared_folder import VOCABULARY, Prepared
from normfree.files import explained, replacing, write_json
from normfree.models.foreign import is_foreign
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import joined
from normfree.train.engine.evaluation import Score
from normfree.train.engine.hardware import InFlight, device_of, fast
from normfree.train.engine.inputs import example_of, open_data, require_whole
from normfree.train.engine.judging import Judge
from normfree.train.engine.model_setup import (
    as_given,
    branch_count,
    class_count,
    model_of,
    require_effect,
    require_scores,
)
from normfree.train.engine.randomness import seeded_draws
from normfree.train.engine.setup import Rig
from normfree.train.run.logging import EventLog, write_curves
from normfree.train.run.result import RunResult, Snapshot
from normfree.train.run.run_folder import RunFolder, Status
from normfree.train.run.run_state import Standing
from normfree.train.run.signals import Stop
from normfree.train.text.token_runs import require_token_scores
from normfree.train.text.translation import Bleu

_LOOK = 0.5  # seconds between two looks at the loss, each of which waits for the device
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
            run = _Run(rig, folder if processes.first else None, stop, seed_draws, began)
        return run.train(resume=resume, progress=progress, command=command, picture=picture)


class _Run:
    """A run on its way: what it trains with, where it stands, and the folder it is kept in."""

    def __init__(
        self, rig: Rig, folder: RunFolder | None, stop: Stop, seed_draws: Callable[..., None], began: float
    ) -> None:
        self.rig, self.folder, self._stop, self._seed_draws, self._begun = rig, folder, stop, seed_draws, began
        self.config, self.model, self.step, self.processes = rig.config, rig.model, rig.step, rig.processes
        self._judge = Judge(rig, stop, folder)
        self.standing = Standing(rig, folder, began)
        self.total = rig.steps * rig.config.epochs
        self.signal: int | None = None
        self._log: EventLog | None = None

    # The loop

    def train(
        self,
        *,
        resume: bool,
        progress: Callable[[Snapshot], None] | None,
        command: str | None,
        picture: bool,
    ) -> RunResult:
        """Go on until the end, a signal or a divergence, and say how it ended."""
        self._start(resume)
        status = self._loop(progress)
        train_loss, train_accuracy, _ = self._look() if self.standing.done else (None, None, True)
        self._train_seconds = time.perf_counter() - self._train_start
        if status == "interrupted" or not self.config.epochs:
            self.standing.save()
        test = bleu = None
        if status == "finished":
            status, test = self._test()
        if status == "diverged":
            self.standing.go_back()
        with self.step.averaged():
            self.rig.release()
        if status == "finished":
            bleu = self._judge.translate()
            if self._judge.signal is not None:
                status = "interrupted"
        result = self._result(status, train_loss, train_accuracy, test, bleu, command)
        self._close(result, picture)
        return result

    def _start(self, resume: bool) -> None:
        """Capture the step where it is to be, and stand where the run begins or goes on, in all processes."""
        if self.config.graph:
            self.step.start_epoch(0, self._factors(0))
            self.step.capture()
        with self.processes.together():
            self._open(resume)
        self.standing.begin()
        self._train_start = self._looked = time.perf_counter()
        self._setup_seconds = self._train_start - self._begun
        self._done_at_start = self.standing.done

    def _loop(self, progress: Callable[[Snapshot], None] | None) -> Status:
        config, flying = self.config, InFlight(self.rig.device)
        if self.standing.owed and (status := self._end_epoch(self.standing.done // self.rig.steps - 1)) is not None:
            return status
        while self.standing.done < self.total:
            epoch, first = divmod(self.standing.done, self.rig.steps)
            self.step.start_epoch(epoch, self._factors(epoch), first)
            if first == 0:
                self.step.clear_metrics()
            for _ in range(first, self.rig.steps):
                self._seed_draws(config.seed, self.standing.done, self.processes.rank)
                self.step()
                self.standing.done += 1
                flying.launched()
                now = time.perf_counter()
                due = bool(config.checkpoint_minutes) and now - self.standing.saved >= 60 * config.checkpoint_minutes
                alive = True
                if due or now - self._looked >= _LOOK:
                    loss, accuracy, alive = self._look()
                    if alive and progress is not None:
                        seen = self.standing.done, self.total, self.standing.done / self.rig.steps
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
                        self.standing.save()
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
            self.standing.validation = found
        record: dict[str, Any] = {
            "step": self.standing.done,
            "epoch": epoch + 1,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "lr": self.config.lr * self._factors(epoch)[-1],
            "seconds": round(self.standing.seconds, 3),
            f"{self.rig.inputs.unit}_per_second": round(speed, 1),
        }
        if (score := self.standing.validation) is not None:
            record |= {"validation_loss": score.loss, "validation_accuracy": score.accuracy}
        if self.folder is not None:
            self.folder.append(record)
            if self._log is not None:
                self._log(record)
        if self.standing.done >= self.total or self.standing.is_due(epoch):
            self.standing.save()
        return None

    def _test(self) -> tuple[Status, Score | None]:
        """The score in test, and how the run ends by it."""
        with self.step.averaged():
            test = self._judge.score(self.rig.inputs.test)
        if self._judge.signal is not None:
            return "interrupted", None  # what is trained is saved, and resuming does the rest
        if test is not None and not math.isfinite(test.loss):
            return "diverged", None  # by its last step, after which no loss was seen any more
        return "finished", test

    def _look(self) -> tuple[float, float, bool]:
        """Mean loss and accuracy of this epoch so far, and whether the run is alive; waits for the device."""
        self._looked = time.perf_counter()
        steps = self.standing.done % self.rig.steps or self.rig.steps
        return float(self.step.loss_sum) / steps, float(self.step.correct) / steps, bool(self.step.alive)

    def _factors(self, epoch: int) -> list[float]:
        """What the learning rates are multiplied by in each step of an epoch."""
        schedule, config = self.config.lr_schedule, self.config
        first = epoch * self.rig.steps
        return [schedule.factor(first + i, self.rig.steps, config.epochs) for i in range(self.rig.steps)]

    def _speed(self) -> float:
        """Images or tokens a second since this process began to train."""
        seconds = time.perf_counter() - self._train_start
        return (self.standing.done - self._done_at_start) * self.rig.inputs.per_step / max(seconds, 1e-9)

    # The folder

    def _open(self, resume: bool) -> None:
        """Write the configuration, or go on from the last checkpoint."""
        if self.folder is None:
            return
        if resume:
            self.standing.resume(self.folder)
        if self.config.tensorboard:  # first, because a folder with a configuration counts as a run
            self._log = EventLog(self.folder.path, done=self.standing.done)
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

    def _close(self, result: RunResult, picture: bool) -> None:
        again = self.folder is not None and self.folder.status == "finished"  # resumed, and there was nothing to do
        if self.folder is not None and not again:
            self.folder.write_result(result.to_json(), str(self.rig.device))
            if picture:
                write_curves(self.folder, f"{self.config.model}, {self.config.method}")
        self.processes.wait()

    def _result(
        self,
        status: Status,
        loss: float | None,
        accuracy: float | None,
        test: Score | None,
        bleu: Bleu | None,
        command: str | None,
    ) -> RunResult:
        cuda = self.rig.device.type == "cuda"
        steps = self.standing.done - self._done_at_start
        return RunResult(
            status=status,
            config=self.config,
            model=self.model,
            steps=self.standing.done,
            epochs=self.standing.done / self.rig.steps,
            train_loss=loss,
            train_accuracy=accuracy,
            validation=self.standing.validation,
            test=test,
            linear_accuracy=LINEAR_ACCURACY if getattr(self.rig.data, "name", None) == "fashion14" else None,
            parameters=self.rig.parameters,
            classes=class_count(self.rig.data),
            seconds=self.standing.seconds,
            setup_seconds=self._setup_seconds,
            throughput=steps * self.rig.inputs.per_step / max(self._train_seconds, 1e-9),
            unit=self.rig.inputs.unit,
            bleu=bleu,
            inputs=self.rig.data.manifest["inputs"] if isinstance(self.rig.data, Prepared) else None,
            peak_gib=torch.cuda.max_memory_allocated(self.rig.device) / 2**30 if cuda else None,
            signal=self.signal or self._judge.signal,
            command=command,
        )
