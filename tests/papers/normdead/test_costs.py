"""What batch norm costs: each measurement against a closed form."""

import pytest
import torch
from torch import nn

from normfree_papers.normdead import costs


@pytest.mark.parametrize("batch", [64, 1024])
def test_other_companions_move_an_output_by_the_root_of_three_over_n(batch):
    assert costs.companion_change(batch, 0) == pytest.approx((3 / batch) ** 0.5, rel=0.1)


def test_contrast_is_normalized_in_training_alone():
    assert costs.deviation_at_contrast(0, training=True) == pytest.approx(1, abs=0.01)
    assert costs.deviation_at_contrast(0, training=False) == pytest.approx(2, rel=0.03)


def test_variance_after_dropout_is_below_one():
    # Var[x]/(E[x²]/(1 - p) - E[x]²) with E[x²] = 1/2 and E[x]² = 1/(2π) for ReLU of N(0, 1)
    with torch.random.fork_rng(devices=[]):
        assert costs.variance_after_dropout(0) == pytest.approx(0.34085 / (0.625 - 0.15915), rel=0.02)


def test_modes_agree_without_batch_norm():
    assert costs.modes_apart("he_in", 0) == 0
    assert costs.modes_apart("batchnorm", 0) > 0.01


def test_saved_bytes_count_every_storage_once_and_no_parameter():
    x = torch.zeros(4, 8)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    # The input of the first layer, and the output of ReLU, which the second layer keeps as well
    assert costs.saved_bytes(plain, x) == 4 * (4 * 8 + 4 * 16)


def test_step_seconds_are_positive_and_by_name():
    models = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}
    found = costs.step_seconds(models, torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), repeats=2)
    assert found.keys() == models.keys()
    assert all(0 < seconds < 10 for seconds in found.values())
