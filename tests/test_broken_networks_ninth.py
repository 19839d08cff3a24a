"""The broken networks of the ninth set fail to learn what their twins learn; the healthy ones learn."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from broken_networks_ninth import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_ninth import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, signs


def alike(output: tuple[Tensor, Tensor], targets: Tensor) -> float:
    """Return how often a cosine above 0.5 tells a pair of one class, from -1 to 1, with 0 for a coin."""
    return signs(F.cosine_similarity(*output) - 0.5, targets)


def rebuilt(output: tuple[Tensor, ...], targets: Tensor) -> float:
    """Return the share of the variance of pictures, scaled to 0 and 1, that the probabilities explain."""
    wanted = targets if float(targets.min()) >= 0 else (0.5 + 0.15 * targets).clamp(0, 1)
    return explained(torch.sigmoid(output[0]).flatten(), wanted.flatten())


def spelled(output: Tensor, targets: Tensor) -> float:
    """Return the share of letters that the best letters of the frames spell at their place."""
    right = 0.0
    for frames, letters in zip(output.argmax(2), targets, strict=True):
        found = [letter for letter in torch.unique_consecutive(frames).tolist() if letter < 5]
        hits = sum(a == b for a, b in zip(found, letters.tolist(), strict=False))
        right += hits / max(len(found), len(letters))
    return right / len(targets)


def likelihood(output: tuple[Tensor, Tensor], _: Tensor) -> float:
    """Return the gain in likelihood over independent normals, as a share of the gain by the true density."""
    z, volume = output
    loss = float((z.square().sum(1) / 2 - volume).mean())
    independent, true = 2 + math.log(2), 2 + 2 * math.log(0.1)
    return (independent - loss) / (independent - true)


def mean_path(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> float:
    """Return the share of the paths' variance that the mean of the mixture explains."""
    means, logits, _ = output
    return explained((means * logits.softmax(1)[..., None]).sum(1), targets)


def solved(output: Tensor, force: Tensor) -> float:
    """Return the share of the solution's variance that is explained; its second derivative is the force."""
    return explained(output[:, 0], -force / 2.4674)


RUNS: dict[str, Run] = {
    "cnn_one_norm_for_all_layers": Run(steps=80),
    "unet_dice_of_logits": Run(signs, 120),
    "detector_boxes_read_as_corners": Run(explained, 150, 3e-3),
    "discriminator_leaky_relu_true": Run(signs, 100),
    "siamese_cosine_labels_zero_one": Run(alike, 100),
    "coordinates_in_pixels": Run(explained, 250, 3e-3),
    "vae_cross_entropy_of_standardized_pictures": Run(rebuilt, 250, 3e-3),
    "equalized_convolutions_without_root": Run(steps=60, lr=0.01),
    "cnn_linear_made_in_forward": Run(steps=60),
    "vit_pools_over_channels": Run(steps=80),
    "textcnn_word_vectors_never_filled": Run(lr=3e-3),
    "gpt_classifier_reads_first_token": Run(),
    "ctc_fewer_frames_than_letters": Run(spelled, lr=3e-3),
    "lstm_reads_state_after_padding": Run(steps=100, lr=3e-3),
    "forecaster_level_never_restored": Run(explained),
    "gru_dropout_in_evaluation": Run(explained, 600, 3e-3),
    "filterbank_where_hides_logarithm": Run(lr=3e-3),
    "graph_messages_overwrite": Run(lr=3e-3),
    "flow_halves_never_swapped": Run(likelihood, 400, 3e-3),
    "mixture_without_logsumexp": Run(mean_path, 300, 3e-3),
    "pinn_of_relus": Run(solved, 300, 5e-3),
    "experts_gated_by_mean_of_batch": Run(steps=300, lr=0.02),
    "cloud_centered_in_single_precision": Run(lr=3e-3),
    "radial_bumps_too_narrow": Run(explained, 300, 0.01),
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
