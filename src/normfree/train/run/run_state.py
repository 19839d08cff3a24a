"""Where a run stands, and how that is kept: saved, gone on from by another process, gone back to from a divergence."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import Any

from torch import Tensor

from normfree.data.text.prepared_folder import Prepared
from normfree.train.config import FREE, TrainConfig
from normfree.train.engine.evaluation import Score
from normfree.train.engine.model_setup import built_from, require_images
from normfree.train.engine.setup import Rig
from normfree.train.run.run_folder import RunFolder, require_same
from normfree.train.text.token_runs import require_data

Kept = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and the plain state of a checkpoint."""
_SHARE, _SMALL = 0.1, 2**25  # of the time, for large checkpoints after epochs; bytes of one that may come after each


class Standing:
    """Where a run stands: what its rig holds, and the counters beside. Saves to a folder, where there is one.

    `done` are its steps, `validation` the last score there. `owed` is whether an earlier process saved the last step of
    an epoch, and ended before its metrics. `saved` is when a state was kept last, and `begun` when this process began.
    """

    def __init__(self, rig: Rig, folder: RunFolder | None, begun: float) -> None:
        self._rig, self._folder, self._begun = rig, folder, begun
        self._built_from = built_from(rig.config, rig.data) if folder is not None else {}
        self.done = 0
        self.validation: Score | None = None
        self.owed = False
        self.saved = begun
        self._before = 0.0  # seconds that earlier processes trained
        self._cost = 0.0  # seconds that the last checkpoint took
        self._kept: deque[Kept] = deque(maxlen=2)  # the last two states that were saved, or the one that it began with

    @property
    def seconds(self) -> float:
        """How long the run has taken, over all processes one after the other."""
        return self._before + time.perf_counter() - self._begun

    def resume(self, folder: RunFolder) -> None:
        """Go on from the last checkpoint in a folder; raises `ValueError` where the run there is another one."""
        rig = self._rig
        if folder.config_path.exists():
            free = FREE if rig.processes.world == 1 else {*FREE, "graph"}  # which one process may have had
            require_same(asdict(TrainConfig.from_toml(folder.config_path)), asdict(rig.config), folder.path, free=free)
        if folder.status == "diverged":
            raise ValueError(
                f"expected a run that can go on, but the one in '{folder.path}' diverged; "
                "start another one with a lower learning rate, or another method"
            )
        found = folder.resume()
        if found is not None:
            tensors, state = found
            if isinstance(rig.data, Prepared):
                require_data(rig.data, state, folder.path)
            else:
                require_images(self._built_from, state, folder.path)
            rig.step.restore_(tensors)
            self.done, self._before = state["step"], state["seconds"]
            self.validation = Score(*state["validation"]) if state["validation"] else None
            logged = next((record for record in folder.read_metrics() if record["step"] == self.done), None)
            self.owed = logged is None and self.done > 0 and self.done % rig.steps == 0
            if logged is not None and "validation_loss" in logged:  # which may be newer than the checkpoint
                self.validation = Score(logged["validation_loss"], logged["validation_accuracy"])

    def begin(self) -> None:
        """Let all processes stand where the first does, and keep where that is."""
        self._share()
        self._kept.append(self._state())
        self.saved = time.perf_counter()

    def _share(self) -> None:
        """Let every process stand where the first does: at its weights, or at the checkpoint that it read."""
        step, processes = self._rig.step, self._rig.processes
        if processes.world > 1:
            state = step.state()
            processes.share_(state.values())
            step.restore_(state)
            told = processes.tell((self.done, self._before, self.validation, self.owed))
            self.done, self._before, self.validation, self.owed = told

    def is_due(self, epoch: int) -> bool:
        """Whether there is to be a checkpoint after this epoch; large ones take a small share of the time at most."""
        every = self._rig.config.checkpoint_epochs
        small = sum(tensor.nbytes for tensor in self._kept[-1][0].values()) <= _SMALL
        worth = small or time.perf_counter() - self.saved >= self._cost / _SHARE
        return bool(every) and (epoch + 1) % every == 0 and self._rig.processes.tell(worth)

    def save(self) -> None:
        """Keep where the run stands now, in the folder, too."""
        began = time.perf_counter()
        if self._kept[-1][1]["step"] == self.done:
            self._kept.pop()  # the same state again
        self._kept.append(self._state())
        if self._folder is not None:
            self._folder.save(*self._kept[-1])
        self.saved = time.perf_counter()
        self._cost = self.saved - began

    def _state(self) -> Kept:
        """A copy of all that a run consists of, and where it is."""
        state = {
            "step": self.done,
            "seconds": self.seconds,
            "validation": self.validation and list(self.validation),
            **self._built_from,
        }
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._rig.step.state().items()}, state

    def go_back(self) -> None:
        """Leave a diverged run, and its folder, in the last saved state that is known to be good.

        A state is known to be good when the step after it found its loss finite and below the limit. Where none is, the
        one is left that this process began with. Clocks decide what is saved, so that all processes take the first's.
        """
        self.done = int(self._rig.step.count)  # where it diverged
        good = next((kept for kept in reversed(self._kept) if kept[1]["step"] < self.done), self._kept[0])
        tensors, state = good
        self._rig.step.restore_(tensors)
        self.validation = Score(*state["validation"]) if state["validation"] else None
        self._share()
        if self._folder is not None and self._folder.saved_step != state["step"]:
            self._folder.save(tensors, state)
