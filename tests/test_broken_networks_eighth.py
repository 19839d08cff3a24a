"""The broken networks of the eighth set fail to learn what their twins learn; the healthy ones learn."""

import pytest
from torch import Tensor

from broken_networks_eighth import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_eighth import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, sgd, signs


def cells(output: Tensor, targets: Tensor) -> float:
    """Return the share of the variance over all cells of a map that the output explains."""
    return explained(output.flatten(), targets.flatten())


def matched(output: Tensor, targets: Tensor) -> float:
    """Return the share of the variance of probabilities that is explained by probabilities or by their logarithms."""
    return explained(output.exp() if float(output.max()) <= 0 else output, targets)


RUNS: dict[str, Run] = {
    "video_weights_of_std_one": Run(steps=80, lr=0.01, optimizer=sgd),
    "critic_clips_weights_in_forward": Run(signs, 100),
    "superresolution_divides_by_scale": Run(explained, 60, 2e-3),
    "unet_channels_first_by_reshape": Run(steps=50),
    "glimpse_by_argmax": Run(lr=3e-3),
    "detector_prior_without_log": Run(cells, 150, 3e-3),
    "grid_head_on_backbone_data": Run(steps=120, lr=3e-3),
    "exposure_summed_in_half": Run(steps=100),
    "vgg_norm_momentum_zero": Run(steps=80),
    "resmlp_head_of_std_one": Run(steps=80, lr=0.01, optimizer=sgd),
    "spectrogram_decibels_into_relu": Run(steps=80),
    "gated_convolutions_without_skip": Run(steps=60),
    "dilated_loop_keeps_last_layer": Run(),
    "rnn_recurrent_weights_of_std_one": Run(),
    "gru_of_raw_prices": Run(),
    "memory_softmax_twice": Run(),
    "tagger_mask_of_the_diagonal": Run(steps=150),
    "events_positions_never_added": Run(steps=150),
    "adapters_zero_twice": Run(),
    "experts_are_copies": Run(steps=300, lr=0.02),
    "graph_norm_of_single_values": Run(lr=3e-3),
    "sparse_code_penalty_summed": Run(explained, lr=3e-3),
    "student_divergence_of_probabilities": Run(matched),
    "decoder_without_gain": Run(explained, 250, 0.1, sgd),
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
