"""The broken networks of the sixth set fail to learn what their twins learn; the healthy ones learn."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from broken_networks_sixth import BROKEN
from fifth_parts import Broken, Case, Healthy
from healthy_networks_sixth import HEALTHY

OUTSIDE = {"inputs", "targets", "output", "loss"}  # places that are no modules


def accuracy(output: Tensor, targets: Tensor) -> float:
    """Return the share of right classes."""
    return float((output.argmax(1) == targets).float().mean())


def last_token(output: Tensor, targets: Tensor) -> float:
    """Return the share of right tokens at the last of 24 positions, which no input reveals."""
    return accuracy(output[23::24], targets[23::24])


def signs(output: Tensor, targets: Tensor) -> float:
    """Return how often the sign of a score is right, from -1 to 1, with 0 for a coin."""
    return 2 * float(((output > 0) == (targets > 0.5)).float().mean()) - 1


def explained(output: Any, targets: Tensor) -> float:
    """Return the share of the targets' variance that the output explains, at least -1."""
    output = output[0] if isinstance(output, tuple) else output[:, : targets.shape[1]] if targets.dim() == 2 else output
    return max(-1.0, float(1 - (output - targets).square().mean() / targets.var()))


class Run(NamedTuple):
    """How to train a network: a score of which 1 is best, steps, and an optimizer with its learning rate."""

    score: Callable[[Any, Tensor], float] = accuracy
    steps: int = 200
    lr: float = 1e-3
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


RUNS: dict[str, Run] = {
    "multilabel_sigmoid_twice": Run(signs),
    "resnet_adds_branch_twice": Run(steps=120),
    "unet_concatenates_itself": Run(steps=100),
    "vit_scores_times_sqrt": Run(steps=100),
    "autoencoder_sigmoid_output": Run(explained),
    "dcgan_norm_weights_around_zero": Run(explained, 150, 0.1, sgd),
    "segmentation_softmax_over_width": Run(steps=100),
    "audio_instance_norm_before_pool": Run(),
    "resnet_norm_removed": Run(steps=60, lr=0.02, optimizer=sgd),
    "cnn_shared_batch_norm": Run(steps=100),
    "cnn_divided_by_255_twice": Run(steps=150, lr=0.02, optimizer=sgd),
    "mobilenet_nll_of_logits": Run(),
    "gpt_without_causal_mask": Run(last_token),
    "seq2seq_targets_not_shifted": Run(),
    "lstm_state_detached_each_step": Run(steps=250, lr=3e-3),
    "bigru_states_by_view": Run(steps=150, lr=3e-3),
    "textcnn_dropout_as_keep": Run(),
    "tagger_ignores_a_tag": Run(),
    "transformer_positions_by_sample": Run(),
    "bag_attention_softmax_of_one": Run(steps=300, lr=3e-3),
    "lstm_weights_of_std_one": Run(lr=3e-3),
    "mlp_without_activations": Run(),
    "vae_kl_summed_over_batch": Run(explained, 300),
    "vqvae_without_straight_through": Run(explained, 400, 2e-3),
    "graph_sum_of_neighbours": Run(),
    "mixer_without_transpose": Run(),
    "binary_cross_entropy_of_one_logit": Run(signs),
    "siamese_root_of_zero": Run(explained, 300),
    "siren_default_weights": Run(explained),
    "diffusion_raw_time_steps": Run(explained, 300),
    "experts_picked_by_argmax": Run(steps=400, lr=1e-2),
    "upscaler_view_for_pixel_shuffle": Run(explained, 150),
}


def trained(make: Callable[..., Case], broken: bool, run: Run, reads_twin: bool = False) -> float:
    """Return the score on data that were not trained on, or -1 where it is not finite.

    With `reads_twin`, these are the twin's data: what is at hand when the network writes by itself.
    """
    cases = [make(broken=broken, batch=batch) for batch in range(8)]
    model, loss = cases[0][0], cases[0][3]
    optimizer = run.optimizer(model.parameters(), lr=run.lr)
    torch.manual_seed(1)
    for step in range(run.steps):
        _, inputs, targets, _ = cases[step % 8]
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    model.eval()
    unseen = [make(broken=broken and not reads_twin, batch=batch) for batch in (8, 9)]
    with torch.no_grad():
        scores = [run.score(model(inputs), targets) for _, inputs, targets, _ in unseen]
    score = sum(scores) / len(scores)
    return score if score == score else -1.0


def test_answers_are_complete() -> None:
    names = [case.name for case in BROKEN] + [case.name for case in HEALTHY]
    assert len(BROKEN) == 24
    assert len(HEALTHY) == 30
    assert len(set(names)) == len(names)
    for case in BROKEN:
        assert case.cause
        assert all(word == word.lower() for word in case.words)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_places_exist(case: Broken) -> None:
    names = {name for name, _ in case.make()[0].named_modules()}
    assert all(place in {*names, *OUTSIDE} for place in case.place)


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_is_worse_than_twin(case: Broken) -> None:
    run = RUNS[case.name]
    healthy = trained(case.make, False, run)
    broken = trained(case.make, True, run, reads_twin=case.name == "seq2seq_targets_not_shifted")
    print(f"{case.name}: twin {healthy:.2f}, broken {broken:.2f}")
    assert healthy > 0.75
    assert broken < healthy - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_learns(case: Healthy) -> None:
    model, inputs, targets, loss = case.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    values = []
    for _ in range(30):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    print(f"{case.name}: loss {values[0]:.3f} to {values[-1]:.3f}")
    assert values[-1] < 0.9 * values[0] or values[-1] < values[0] - 0.3
