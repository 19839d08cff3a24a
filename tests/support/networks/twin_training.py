"""How a broken network and its healthy twin are trained side by side and scored; the tests of each later set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fifth_parts import Broken, Case, Healthy

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


def losses(case: Healthy, steps: int = 30) -> list[float]:
    """Return the losses of a healthy network that is trained on its batch by Adam."""
    model, inputs, targets, loss = case.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    values = []
    for _ in range(steps):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    return values


def places_exist(case: Broken) -> bool:
    """Whether each place of the answer is a module of the broken network or stands for one outside."""
    names = {name for name, _ in case.make()[0].named_modules()}
    return all(place in {*names, *OUTSIDE} for place in case.place)


def check_answers(broken: list[Broken], healthy: list[Healthy], runs: dict[str, Run]) -> None:
    """Assert that a set has its size, no name twice, a run for each broken network, and whole answers."""
    names = [case.name for case in broken] + [case.name for case in healthy]
    assert len(broken) == 24
    assert len(healthy) == 30
    assert len(set(names)) == len(names)
    assert {case.name for case in broken} == set(runs)
    for case in broken:
        assert case.cause
        assert all(word == word.lower() for word in case.words)


def check_broken(case: Broken, run: Run) -> None:
    """Assert that the twin learns, and that the broken network learns clearly less."""
    healthy = trained(case.make, False, run)
    broken = trained(case.make, True, run)
    print(f"{case.name}: twin {healthy:.2f}, broken {broken:.2f}")
    assert healthy > 0.75
    assert broken < healthy - 0.2


def check_healthy(case: Healthy) -> None:
    """Assert that a healthy network learns its batch."""
    values = losses(case)
    print(f"{case.name}: loss {values[0]:.3f} to {values[-1]:.3f}")
    assert values[-1] < 0.9 * values[0] or values[-1] < values[0] - 0.3
