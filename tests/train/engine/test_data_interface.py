"""Training batches of one shape, made on the device or fetched from the host."""

import os
import signal
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from normfree.train.data_sources import explained_worker_end
from normfree.train.engine.data_interface import ShapedFeed
from normfree.train.engine.step import OneShapeFeed


class Numbers(NamedTuple):
    inputs: Tensor
    other: Tensor | None


class NumberFeed:
    """Batches that hold the number of their epoch and step."""

    steps = 3

    def __init__(self, capturable: bool) -> None:
        self.capturable, self._epoch = capturable, 0

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def batch(self, step: Tensor) -> Numbers:
        return Numbers(10 * self._epoch + step.float(), None)


def test_batch_of_the_device_is_that_of_the_step() -> None:
    feed = OneShapeFeed(NumberFeed(capturable=True), compile=False)
    assert isinstance(feed, ShapedFeed)
    assert (feed.steps, feed.shape_of(2)) == (3, 0)
    feed.start_epoch(4)
    feed.fetch(0)  # nothing to fetch
    assert float(feed.gather(0, torch.tensor(2)).inputs) == 42


def test_batch_of_the_host_is_the_fetched_one_and_stays_in_place() -> None:
    feed = OneShapeFeed(NumberFeed(capturable=False), compile=False)
    feed.fetch(1)
    first = feed.gather(0, torch.tensor(0)).inputs
    assert float(first) == 1
    feed.start_epoch(2)
    feed.fetch(2)
    assert feed.gather(0, torch.tensor(0)).inputs is first, "a captured step reads these tensors"
    assert float(first) == 22


@pytest.mark.faults
def test_killed_worker_is_one_sentence() -> None:
    def end(_: object) -> list[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    killed = pytest.raises(ValueError, match="one of them was killed; free some memory or use fewer workers")
    with killed, explained_worker_end():
        list(DataLoader([1, 2], num_workers=1, collate_fn=end))
    with pytest.raises(RuntimeError, match="another"), explained_worker_end():  # the control: other errors stay
        raise RuntimeError("another error")
