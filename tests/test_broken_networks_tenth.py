"""The broken networks of the tenth set fail to learn what their twins learn; the healthy ones learn."""

import pytest
from torch import Tensor

from broken_networks_tenth import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_tenth import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, sgd, signs


def flat(output: Tensor, targets: Tensor) -> float:
    """Return the share of the variance that a column of outputs explains."""
    return explained(output.flatten(), targets)


def boxes(output: tuple[Tensor, Tensor], targets: Tensor) -> float:
    """Return the share of the variance of the boxes' offsets that is explained."""
    return explained(output[0], targets[:, :4])


def real(output: Tensor, targets: Tensor) -> float:
    """Return how often a probability tells whether a picture is real, from -1 to 1, with 0 for a coin."""
    return signs(output - 0.5, targets)


RUNS: dict[str, Run] = {
    "mlp_dropout_of_keep_probability": Run(explained, 300, 3e-3),
    "regressor_error_of_all_pairs": Run(flat, 300, 3e-3),
    "recommender_vectors_in_list": Run(explained, 400, 0.01),
    "graph_sums_over_neighbors": Run(explained, lr=3e-3),
    "clouds_root_of_zero_distance": Run(lr=3e-3),
    "separables_depthwise_by_all_channels": Run(steps=120, lr=2e-3),
    "torchvision_resnet_every_norm_zero": Run(steps=25),
    "resnet_shortcut_added_again": Run(steps=100),
    "cnn_gates_begin_shut": Run(steps=60),
    "detector_offsets_through_relu": Run(boxes, 150, 3e-3),
    "vqvae_no_straight_through": Run(explained, 200, 3e-3),
    "vae_log_variance_too_wide": Run(explained),
    "cnn_group_norm_of_single_values": Run(steps=50),
    "discriminator_softmax_of_one_score": Run(real, 60),
    "unet_without_activations": Run(steps=60, lr=3e-3),
    "timm_vit_frozen_at_random": Run(steps=100),
    "gpt_probabilities_into_cross_entropy": Run(lr=0.015, optimizer=sgd),
    "gpt_tied_to_standard_normal_words": Run(steps=100, lr=0.015, optimizer=sgd),
    "encoder_padding_mask_inverted": Run(steps=150),
    "lstm_runs_over_the_batch": Run(steps=150, lr=3e-3),
    "gru_weights_of_standard_normal": Run(steps=100, lr=3e-3),
    "diffusion_gates_and_projections_zero": Run(explained, lr=3e-3),
    "words_of_length_one_in_half": Run(steps=150, lr=2e-3),
    "transformers_bert_initializer_range_one": Run(steps=150),
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
