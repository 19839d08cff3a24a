"""Scores are the means over all labels."""

import math

import pytest
import torch
from torch import Tensor, nn

from normfree.data.images.image_set import in_order
from normfree.nn.model_state import eval_mode
from normfree.train.data_sources import image_sums
from normfree.train.engine.setup import mean_score, score, sum_scores
from tiny_images import tiny_images


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
        found = score(model.train(), images(batch_size), image_sums)
        assert found.accuracy == hits / 40
        assert found.loss == pytest.approx(loss / 40, rel=1e-6)


def test_score_leaves_modes_and_statistics_alone() -> None:
    model = net().train()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(model, images(16), image_sums)
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    with pytest.raises(RuntimeError, match="input"):
        score(model, [(torch.zeros(1), torch.zeros(1))], image_sums)
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]


def test_parts_are_put_together_by_their_numbers() -> None:
    """Two processes with 13 and 27 images, one after the other: the sums are averaged, the ratio is that of all."""
    data, model = tiny_images(), net()
    whole = score(model, images(1000), image_sums)
    sums: list[Tensor] = []
    for part in (slice(0, 13), slice(13, None)):
        batches = in_order(data.test.take(part), batch_size=5, mean=data.mean, std=data.std)
        sums.append(sum_scores(model, batches, image_sums))
    together = mean_score((sums[0] + sums[1]) / 2)
    assert together.accuracy == pytest.approx(whole.accuracy)
    assert together.loss == pytest.approx(whole.loss)


def test_score_of_nothing_is_not_a_number() -> None:
    assert all(math.isnan(value) for value in score(net(), [], image_sums))
