"""The broken networks of the fifth set fail to learn what their twins learn; the healthy ones learn."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from broken_networks_fifth import BROKEN
from fifth_parts import Broken, Case, Healthy
from healthy_networks_fifth import HEALTHY

OUTSIDE = {"inputs", "targets", "output", "loss", "model", "layers"}  # places that are no modules


def accuracy(output: Tensor, targets: Tensor) -> float:
    """Return the share of right classes."""
    return float((output.argmax(1) == targets).float().mean())


def explained(output: Any, targets: Tensor) -> float:
    """Return the share of the targets' variance that the output explains, at least -1."""
    output = output[0] if isinstance(output, tuple) else output
    error = (output - targets.view_as(output)).square().mean() / targets.var()
    return max(-1.0, float(1 - error))


def explained_odds(output: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that the probabilities explain, at least -1."""
    return explained(output.sigmoid(), targets)


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
    "softmax_before_loss": Run(lr=0.02, optimizer=sgd),
    "vgg_without_norm": Run(steps=150),
    "resnet_forgotten_skip": Run(steps=120),
    "resnet_one_block_unlike": Run(steps=100, lr=0.05, optimizer=sgd),
    "resnet_zero_twice": Run(steps=120),
    "detector_prior_everywhere": Run(explained_odds),
    "unet_view_of_scores": Run(steps=60),
    "transfer_all_frozen": Run(),
    "encoder_under_no_grad": Run(),
    "vae_sample": Run(explained),
    "table_raw_columns": Run(),
    "table_price_targets": Run(explained, 300),
    "mlp_deep_sigmoid": Run(),
    "regression_broadcast": Run(explained, 300),
    "mlp_constant_init": Run(),
    "mlp_plain_list": Run(steps=300, lr=3e-3),
    "regression_norm_on_output": Run(explained),
    "multitask_one_head": Run(explained, 300),
    "recommender_default_embeddings": Run(explained_odds, 300, 0.01),
    "lstm_batch_first": Run(lr=3e-3),
    "text_inverted_mask": Run(steps=120),
    "gpt_tied_default_embedding": Run(steps=100),
    "graph_too_deep": Run(steps=150),
    "audio_log_of_zero": Run(),
}


def trained(make: Callable[..., Case], broken: bool, run: Run) -> float:
    """Return the score on data that were not trained on, or -1 where it is not finite."""
    cases = [make(broken=broken, batch=batch) for batch in range(10)]
    model, loss = cases[0][0], cases[0][3]
    optimizer = run.optimizer(model.parameters(), lr=run.lr)
    torch.manual_seed(1)
    for step in range(run.steps):
        _, inputs, targets, _ = cases[step % 8]
        value = loss(model(inputs), targets)
        if not value.requires_grad:
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = [run.score(model(inputs), targets) for _, inputs, targets, _ in cases[8:]]
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
    assert case.place & (names | {"layers"})  # a plain list is no module
    assert all(place in {*names, *OUTSIDE} for place in case.place)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_is_worse_than_twin(case: Broken) -> None:
    run = RUNS[case.name]
    healthy = trained(case.make, False, run)
    broken = trained(case.make, True, run)
    print(f"{case.name}: twin {healthy:.2f}, broken {broken:.2f}")
    assert healthy > 0.75
    assert broken < healthy - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY[12:], ids=lambda case: case.name)
def test_healthy_learns(case: Healthy) -> None:
    model, inputs, targets, loss = case.make()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    values = []
    for _ in range(30):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    print(f"{case.name}: loss {values[0]:.3f} to {values[-1]:.3f}")
    assert values[-1] < 0.9 * values[0]
