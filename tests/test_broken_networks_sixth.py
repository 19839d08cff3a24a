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


def signs(output: Tensor, targets: Tensor) -> float:
    """Return how often the sign of a score is right, from -1 to 1, with 0 for a coin."""
    return 2 * float(((output > 0) == (targets > 0.5)).float().mean()) - 1


def explained(output: Any, targets: Tensor) -> float:
    """Return the share of the targets' variance that the output explains, at least -1."""
    output = output[0] if isinstance(output, tuple) else output[:, : targets.shape[1]] if targets.dim() == 2 else output
    return max(-1.0, float(1 - (output - targets).square().mean() / targets.var()))


class Run(NamedTuple):
    """How to train a network: a score of which 1 is best, steps, and an optimizer with its learning rate.

    With `alone`, the score is on what is at hand when the network writes by itself: the twin's inputs.
    With `prefix`, the score is on the token after that many first tokens, the only ones that the network gets.
    """

    score: Callable[[Any, Tensor], float] = accuracy
    steps: int = 200
    lr: float = 1e-3
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    alone: bool = False
    prefix: int = 0


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


def unseen(make: Callable[..., Case], broken: bool, run: Run, model: torch.nn.Module) -> list[float]:
    """Return the scores on two batches that were not trained on."""
    scores = []
    for batch in (8, 9):
        _, inputs, targets, _ = make(broken=broken and not run.alone, batch=batch)
        if run.prefix:
            targets = targets.view(len(inputs), -1)[:, run.prefix - 1]
            inputs = inputs[:, : run.prefix]
        output = model(inputs)
        scores.append(run.score(output[run.prefix - 1 :: run.prefix] if run.prefix else output, targets))
    return scores


def trained(make: Callable[..., Case], broken: bool, run: Run) -> float:
    """Return the score on data that were not trained on, or -1 where it is not finite."""
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
    with torch.no_grad():
        scores = unseen(make, broken, run, model)
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
    broken = trained(case.make, True, run)
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
