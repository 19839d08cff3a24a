"""Training batches of one shape, made on the device or fetched from the host; and scores over batches."""

import math
import os
import signal
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normfree.data.images.image_set import in_order
from normfree.nn.model_state import eval_mode
from normfree.train.data import explained_worker_end, mean_score, score, sum_scores
from normfree.train.engine.inputs import ShapedFeed
from normfree.train.engine.step import OneShapeFeed
from tiny_images import tiny_images


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


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(432, 10))


def images(batch_size: int) -> list[tuple[Tensor, Tensor]]:
    data = tiny_images()
    return list(in_order(data.test, batch_size=batch_size, mean=data.mean, std=data.std))


def test_score_equals_a_count_image_by_image() -> None:
    model = net().eval()
    loss, hits = 0.0, 0
    with torch.no_grad():
        for inputs, labels in images(1):
            scores = model(inputs)[0].double()
            loss -= math.log(math.exp(scores[labels[0]]) / scores.exp().sum())
            hits += int(scores.argmax()) == int(labels[0])
    for batch_size in (7, 40, 1000):
        found = score(model.train(), images(batch_size))
        assert found.accuracy == hits / 40
        assert found.loss == pytest.approx(loss / 40, rel=1e-6)


def test_score_leaves_modes_and_statistics_alone() -> None:
    model = net().train()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(model, images(16))
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    with pytest.raises(RuntimeError, match="input"):
        score(model, [(torch.zeros(1), torch.zeros(1))])
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]


def test_parts_are_put_together_by_their_numbers() -> None:
    """Two processes with 13 and 27 images, one after the other: the sums are averaged, the ratio is that of all."""
    data, model = tiny_images(), net()
    whole = score(model, images(1000))
    sums: list[Tensor] = []
    for part in (slice(0, 13), slice(13, None)):
        batches = in_order(data.test.take(part), batch_size=5, mean=data.mean, std=data.std)
        sums.append(sum_scores(model, batches))
    together = mean_score((sums[0] + sums[1]) / 2)
    assert together.accuracy == pytest.approx(whole.accuracy)
    assert together.loss == pytest.approx(whole.loss)


def test_score_of_nothing_is_not_a_number() -> None:
    assert all(math.isnan(value) for value in score(net(), []))


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
