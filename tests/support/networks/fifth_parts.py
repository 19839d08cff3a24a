"""What the cases of the fifth and later sets share: their records and small tasks that a sound network learns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fault_cases
from fault_cases import Subject

Case = tuple[Any, ...]  # (model, inputs), (model, inputs, targets) or (model, inputs, targets, loss)


@dataclass(frozen=True)
class Broken:
    """A network with a fault; `make(broken=False)` builds its healthy twin, `batch` draws other data of the task.

    `place` holds names of modules or prefixes of them; "inputs", "targets", "loss", "output" and "model" stand for
    places that are no module. `words` are alternatives, each the beginning of a word or phrase
    in lower case: a right answer says at least one of them.
    """

    name: str
    make: Callable[..., Case]
    place: set[str]
    words: list[str]
    cause: str


@dataclass(frozen=True)
class Healthy:
    """A sound network, with which nothing is wrong at the start of training."""

    name: str
    make: Callable[[], Case]


def subject(case: Case) -> Subject:
    """Return a case as the record of the other sets."""
    model, inputs, targets, loss = (*case, None, None)[:4]
    return Subject(model, inputs, targets, loss)


def scored(case: Broken) -> fault_cases.Broken:
    """Return a broken network as `benchmarks/diagnosis.py` scores it."""
    places = tuple("input" if place == "inputs" else place for place in sorted(case.place))
    words = tuple(case.words)
    return fault_cases.Broken(case.name, lambda broken: subject(case.make(broken=broken)), places, case.cause, words)


def sound(networks: dict[str, Callable[[], Case]]) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Return a decorator that adds a function which builds a sound network to these, with a seed before it."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        def seeded() -> Case:
            torch.manual_seed(0)
            return make()

        networks[make.__name__] = seeded
        return seeded

    return add


def generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers with this seed."""
    return torch.Generator().manual_seed(seed)


def images(batch: int, n: int = 64, classes: int = 10, size: int = 16, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Return standardized pictures, one smooth pattern per class under noise, and their classes."""
    patterns = torch.randn(classes, channels, 4, 4, generator=generator(7))
    patterns = F.interpolate(patterns, size=size, mode="bilinear")
    draw = generator(1000 + batch)
    labels = torch.randint(classes, (n,), generator=draw)
    noise = torch.randn(n, channels, size, size, generator=draw)
    return (patterns[labels] + noise) / 1.2, labels


def scenes(batch: int, n: int = 32, classes: int = 4, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return pictures of colored regions and the class of each pixel."""
    colors = 1.5 * torch.randn(classes, 3, generator=generator(8))
    draw = generator(1000 + batch)
    fields = F.interpolate(torch.randn(n, classes, 4, 4, generator=draw), size=size, mode="bilinear")
    labels = fields.argmax(1)
    noise = 0.5 * torch.randn(n, 3, size, size, generator=draw)
    return (colors[labels].permute(0, 3, 1, 2) + noise) / 1.3, labels


def _hidden(table: Tensor, outputs: int) -> Tensor:
    fixed = generator(9)
    first = 1.5 * torch.randn(table.shape[1], 12, generator=fixed) / table.shape[1] ** 0.5
    return torch.tanh(table @ first) @ torch.randn(12, outputs, generator=fixed) / 2


def table(batch: int, n: int = 128, features: int = 8, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Return standardized columns and smooth, roughly standardized targets of shape (n, outputs)."""
    columns = torch.randn(n, features, generator=generator(1000 + batch))
    return columns, _hidden(columns, outputs)


def categories(batch: int, n: int = 128, features: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return standardized columns and a class that is a smooth function of them."""
    columns, scores = table(batch, n, features, classes)
    return columns, scores.argmax(1)


def series(batch: int, n: int = 64, steps: int = 20, features: int = 4) -> tuple[Tensor, Tensor]:
    """Return time series and their class: which of the features has the largest mean over the first half."""
    draw = generator(1000 + batch)
    values = torch.randn(n, steps, features, generator=draw) + torch.randn(n, 1, features, generator=draw)
    return values, values[:, : steps // 2].mean(1).argmax(1)


def sentences(batch: int, n: int = 64, length: int = 20, vocabulary: int = 40) -> tuple[Tensor, Tensor]:
    """Return padded sentences (0 pads, 1 begins) and their class: whether more words are from the upper half."""
    draw = generator(1000 + batch)
    words = torch.randint(2, vocabulary, (n, length), generator=draw)
    shift = (torch.randint(2, (n, 1), generator=draw) * 2 - 1) * (vocabulary // 4)
    words = (words + shift).clamp(2, vocabulary - 1)
    words[:, 0] = 1
    lengths = torch.randint(6, length - 1, (n, 1), generator=draw)
    words = words.masked_fill(torch.arange(length) >= lengths, 0)
    upper = (words >= vocabulary // 2).sum(1) > ((words > 1) & (words < vocabulary // 2)).sum(1)
    return words, upper.long()


def chains(batch: int, n: int = 32, length: int = 24, vocabulary: int = 100) -> tuple[Tensor, Tensor]:
    """Return token sequences in which the next token mostly follows from the last one, and the next tokens."""
    follows = torch.randperm(vocabulary, generator=generator(10))
    draw = generator(1000 + batch)
    tokens = torch.randint(vocabulary, (n, length + 1), generator=draw)
    known = torch.rand(n, length + 1, generator=draw) < 0.9
    for step in range(length):
        tokens[:, step + 1] = torch.where(known[:, step], follows[tokens[:, step]], tokens[:, step + 1])
    return tokens[:, :-1], tokens[:, 1:].flatten()
