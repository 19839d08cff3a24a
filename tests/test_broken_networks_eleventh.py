"""The broken networks of the eleventh set fail to learn what their twins learn; the healthy ones learn."""

import pytest
from torch import Tensor
from torch.nn import functional as F

from broken_networks_eleventh import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_eleventh import HEALTHY
from twin_training import (
    Run,
    accuracy,
    check_answers,
    check_broken,
    check_healthy,
    explained,
    places_exist,
    sgd,
    signs,
)


def likes(output: Tensor, targets: Tensor) -> float:
    """Return how often a probability tells whether an item is liked, from -1 to 1, with 0 for a coin."""
    return signs(output - 0.5, targets)


def density(output: Tensor, targets: Tensor) -> float:
    """Return the modelled density over the true one, as a geometric mean over rows and the eight columns."""
    return float(((output - targets).mean() / 8).exp())


def classes(output: Tensor, targets: Tensor) -> float:
    """Return the share of right classes of a network that also tells the domain."""
    return accuracy(output[:, :4], targets[:, 0])


def likelihood(output: Tensor, targets: Tensor) -> float:
    """Return the probability that scores give to the right answer, as a geometric mean."""
    return float((-F.cross_entropy(output, targets)).exp())


def likelihood_of_logs(output: Tensor, targets: Tensor) -> float:
    """Return the same for logarithms of probabilities."""
    return float((-F.nll_loss(output, targets)).exp())


def found(output: Tensor, targets: Tensor) -> float:
    """Return the harmonic mean of precision and recall of the cells in which an object is seen."""
    seen = (output > 0).float()
    return float(2 * (seen * targets).sum() / (seen.sum() + targets.sum()))


RUNS: dict[str, Run] = {
    "mlp_weights_all_positive": Run(lr=3e-3),
    "mlp_layer_made_in_forward": Run(lr=3e-3),
    "recommender_probabilities_saturated": Run(likes, lr=3e-3),
    "graph_net_all_nodes_alike": Run(steps=150, lr=3e-3),
    "flow_scales_begin_at_half": Run(density, 150, 3e-3),
    "regressor_variance_through_relu": Run(explained, 300, 3e-3),
    "multitask_gradient_reversed_for_both": Run(classes, lr=3e-3),
    "diffusion_steps_up_to_thousand": Run(explained, 300, 3e-3),
    "contrastive_cosines_as_scores": Run(likelihood, 150, 3e-3),
    "unet_gan_weights_without_norms": Run(steps=60, lr=0.03, optimizer=sgd),
    "resnet_blocks_average_both_paths": Run(steps=70),
    "generator_weights_without_std": Run(explained, 60),
    "discriminator_normalizes_weight_data": Run(signs, 100, 3e-3),
    "vae_codes_from_sample": Run(explained, 300, 3e-3),
    "detector_prior_of_wrong_sign": Run(found, 100),
    "cnn_log_softmax_over_the_batch": Run(likelihood_of_logs, 60, 3e-3),
    "timm_convnext_instance_norm_before_pooling": Run(steps=60),
    "torchvision_mobilenet_norms_frozen_from_scratch": Run(steps=70, lr=0.02, optimizer=sgd),
    "cnn_fan_in_without_the_kernel": Run(steps=80),
    "rnn_recurrent_weights_near_zero": Run(steps=100),
    "decoder_mask_hides_the_token_itself": Run(steps=100, lr=3e-3),
    "vit_attends_over_heads": Run(steps=60),
    "transformers_distilbert_gains_drawn_too": Run(steps=60, lr=3e-4),
    "encoder_squares_overflow_in_half": Run(steps=20, lr=3e-4),
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
