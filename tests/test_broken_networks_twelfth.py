"""The broken networks of the twelfth set fail to learn what their twins learn; the healthy ones learn."""

import pytest

from broken_networks_twelfth import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_twelfth import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, sgd, signs

RUNS: dict[str, Run] = {
    "vgg_one_convolution_times_hundred": Run(steps=60, lr=0.02, optimizer=sgd),
    "autoencoder_tanh_weights_uniform": Run(explained, 150, 3e-3),
    "unet_last_block_dead": Run(steps=60, lr=3e-3),
    "densenet_pixels_up_to_255": Run(steps=60, lr=0.02, optimizer=sgd),
    "timm_vit_queries_and_keys_times_thirty": Run(steps=80),
    "torchvision_swin_bias_of_counts": Run(steps=120, lr=2e-3),
    "equalized_discriminator_scaled_twice": Run(signs, 60, 3e-3),
    "two_streams_motion_gain_zero": Run(steps=60, lr=3e-3),
    "autoencoder_decoder_frozen": Run(explained, 300, 3e-3),
    "pointnet_weights_without_gain": Run(steps=70),
    "tabular_transformer_missing_values": Run(steps=150, lr=3e-3),
    "contrastive_inputs_far_from_zero": Run(steps=150),
    "factorization_both_tables_zero": Run(explained, 200, 0.02),
    "gcn_isolated_nodes_divide_by_zero": Run(steps=100, lr=3e-3),
    "residual_mlp_multiplies_shortcut": Run(explained),
    "color_field_layer_norm_of_two_coordinates": Run(explained, 250, 3e-3),
    "memory_attention_detached": Run(steps=250, lr=3e-3),
    "gpt_block_forgets_skip": Run(steps=60, lr=3e-3),
    "music_decoder_of_deep_post_norm_layers": Run(steps=50, lr=2e-3),
    "keywords_eps_lost_in_half": Run(steps=60),
    "lstm_all_weights_equal": Run(lr=1e-2),
    "transformers_roberta_positions_drown_words": Run(steps=60),
    "heartbeats_norms_left_out": Run(steps=100, lr=0.02, optimizer=sgd),
    "forecaster_relu_on_output": Run(explained, lr=3e-3),
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
