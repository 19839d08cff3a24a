"""The broken networks of the sixth set fail to learn what their twins learn; the healthy ones learn."""

import pytest

from broken_networks_sixth import BROKEN
from fifth_parts import Broken, Healthy
from healthy_networks_sixth import HEALTHY
from twin_training import Run, check_answers, check_broken, check_healthy, explained, places_exist, sgd, signs

RUNS: dict[str, Run] = {
    "multilabel_sigmoid_twice": Run(signs),
    "resnet_adds_branch_twice": Run(steps=120),
    "unet_concatenates_itself": Run(steps=100),
    "vit_scores_times_sqrt": Run(steps=100),
    "autoencoder_sigmoid_output": Run(explained),
    "dcgan_norm_weights_around_zero": Run(explained, 150, 0.1, sgd),
    "audio_instance_norm_before_pool": Run(),
    "cnn_divided_by_255_twice": Run(steps=150, lr=0.02, optimizer=sgd),
    "mobilenet_nll_of_logits": Run(),
    "gpt_without_causal_mask": Run(prefix=12),
    "seq2seq_targets_not_shifted": Run(steps=500, alone=True),
    "lstm_state_detached_each_step": Run(steps=250, lr=3e-3),
    "bigru_states_by_view": Run(steps=150, lr=3e-3),
    "textcnn_dropout_as_keep": Run(),
    "tagger_ignores_a_tag": Run(),
    "transformer_positions_by_sample": Run(),
    "bag_attention_softmax_of_one": Run(steps=300, lr=3e-3),
    "mlp_without_activations": Run(),
    "vae_kl_summed_over_batch": Run(explained, 300),
    "graph_sum_of_neighbours": Run(),
    "mixer_without_transpose": Run(),
    "binary_cross_entropy_of_one_logit": Run(signs),
    "siamese_root_of_zero": Run(explained, 300),
    "siren_default_weights": Run(explained),
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
