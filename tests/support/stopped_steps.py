"""A signal in the middle of a training step of this process."""

import os

import pytest

from normfree.train.engine.step import TrainStep


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int, number: int) -> None:
    """Send this process a signal in the middle of its `call`-th step from now."""
    original, calls = TrainStep.__call__, 0

    def step(self: TrainStep) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        original(self)

    monkeypatch.setattr(TrainStep, "__call__", step)
