"""The broken networks of the seventh set fail to learn what their twins learn; the healthy ones learn."""

from typing import Any

import pytest
from torch import Tensor

from broken_networks_seventh import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_seventh import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, sgd


def confidence(output: Tensor, targets: Tensor) -> float:
    """Return the mean probability of the right class."""
    return float(output.softmax(1).gather(1, targets[:, None]).mean())


def halves(output: Tensor, targets: Tensor) -> float:
    """Return how often a probability is on the right side of one half, from -1 to 1, with 0 for a coin."""
    return 2 * float(((output > 0.5) == (targets > 0.5)).float().mean()) - 1


def flat(output: Any, targets: Tensor) -> float:
    """Return the share of the variance that a single output explains, whatever its shape."""
    output = output[0] if isinstance(output, tuple) else output
    return explained(output.flatten(), targets.flatten())


RUNS: dict[str, Run] = {
    "resnet_norms_kept_in_eval": Run(steps=100, lr=0.02, optimizer=sgd),
    "depthwise_fan_out_ignores_groups": Run(steps=150, lr=0.02, optimizer=sgd),
    "unet_raw_pixels_in_last_skip": Run(steps=100),
    "audio_film_without_one": Run(),
    "vit_two_zeros_in_branch": Run(),
    "cosine_scores_without_scale": Run(confidence, 150),
    "densenet_zero_transition": Run(steps=100),
    "contrastive_scale_exponentiated_twice": Run(lr=0.1, optimizer=sgd),
    "audio_rms_norm_overflows_in_half": Run(),
    "mixer_eps_without_minus": Run(confidence),
    "lstm_forgets_each_step": Run(steps=250, lr=3e-3),
    "gpt_squares_without_norm": Run(steps=150),
    "decoder_attends_to_itself": Run(steps=300, lr=2e-3),
    "reader_mask_inverted": Run(),
    "series_scaled_in_each_layer": Run(explained, 150),
    "highway_gates_closed": Run(steps=300, lr=3e-3),
    "gcn_oversmooths": Run(),
    "gated_mlp_one_column_unscaled": Run(flat, 300),
    "regression_broadcasts_targets": Run(flat),
    "gaussian_head_raw_variance": Run(flat),
    "mlp_layers_in_python_list": Run(steps=300, lr=3e-3),
    "multilabel_softmax_then_bce": Run(halves, 300, 3e-3),
    "autoencoder_std_of_a_transformer": Run(explained, 300),
    "hashing_without_straight_through": Run(explained, 400, 3e-3),
}


def test_answers_are_complete() -> None:
    check_answers(BROKEN, HEALTHY, RUNS)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_places_exist(case: Broken) -> None:
    assert places_exist(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_is_worse_than_twin(case: Broken) -> None:
    check_broken(case, RUNS[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_learns(case: Healthy) -> None:
    check_healthy(case)
