"""Models with unusual forward passes, for checking that conversion is right or refuses with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.model_state import call_arguments

WIDTH, CLASSES, BATCH, DEPTH = 16, 4, 12, 3


def features() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def maps() -> Tensor:
    return torch.randn(BATCH, WIDTH, 6, 6)


def labels() -> Tensor:
    return torch.arange(BATCH) % CLASSES


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def conv_bn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH))


class Stack(nn.Module):
    """Blocks one after the other between a stem and a head; `step` says what a block does to the signal."""

    def __init__(self, parts: Callable[[], nn.Module] = mlp, depth: int = DEPTH) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(parts() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.step(block, x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class InPlaceSum(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        out = x.clone()
        out += block(x)
        return out


class AddWithAlpha(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.add(x, block(x), alpha=2)


class Minus(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x - block(x)


class Lerp(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.lerp(x, block(x), 0.5)


class StackedSum(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([x, block(x)]).sum(0)


class ItemAssignment(Stack):
    """Half of the channels get a residual sum, by assignment to a slice."""

    def __init__(self) -> None:
        half = WIDTH // 2
        super().__init__(lambda: nn.Sequential(nn.LayerNorm(half), nn.Linear(half, half), nn.ReLU()))

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, : WIDTH // 2] = x[:, : WIDTH // 2] + block(x[:, WIDTH // 2 :])
        return out


class SplitAndShuffle(Stack):
    """A residual sum on one half, after which the halves are interleaved."""

    def __init__(self) -> None:
        half = WIDTH // 2
        super().__init__(lambda: nn.Sequential(nn.LayerNorm(half), nn.Linear(half, 32), nn.ReLU(), nn.Linear(32, half)))

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        return torch.stack([one, two + block(two)], 2).flatten(1)


class Gated(nn.Module):
    """out(value · sigmoid(gate)) behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(self.norm(x)).chunk(2, -1)
        return self.out(value * torch.sigmoid(gate))


class Scaled(nn.Module):
    """A layer scale under a name of its own, applied by addcmul."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.zeta = mlp(), nn.Parameter(torch.full((WIDTH,), 1e-5))


class Addcmul(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.addcmul(x, block.zeta, block.f(x))


class NamedScale(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.f(x) * block.zeta


class Modulated(nn.Module):
    """adaLN: a condition gives shift, scale and gate of a branch by one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation, self.f = nn.Linear(WIDTH, 3 * WIDTH), nn.Sequential(*mlp()[1:])

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, -1)
        return x + gate * self.f(self.norm(x) * (1 + scale) + shift)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Modulated() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class TwoGates(nn.Module):
    """x + a(t) · b(u) · f(x): two gates and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.a, self.b = mlp(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.detach()) * torch.tanh(self.b(x)) * self.f(x)


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform, self.gate = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * self.transform(x) + (1 - t) * x


class HighwayStack(Stack):
    def __init__(self) -> None:
        super().__init__(Highway)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Einsum(nn.Module):
    """Attention written with einsum over tokens, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = torch.einsum("bic,bjc->bij", self.q(h), self.k(h)).div(math.sqrt(WIDTH)).softmax(-1)
        return self.o(torch.einsum("bij,bjc->bic", weights, self.v(h)))


class EinsumAttention(Stack):
    def __init__(self) -> None:
        super().__init__(Einsum)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class Shared(Stack):
    """One block is used four times."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.step(self.blocks[0], x)
        return self.norm(x)


class Generated(Stack):
    """The sum over a generator of branches is added to the input."""

    def branches(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            yield block(x)

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.norm(x + sum(self.branches(x)))


class Nested(Stack):
    """A residual sum inside the branch of another."""

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        inner = block[1](block[0](x))
        inner = inner + block[2](inner)
        return x + block[3](inner)


class LossInside(Stack):
    """Takes the labels, and returns a dict with loss and logits."""

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, targets), "logits": logits}


class Reconstruction(nn.Module):
    """The difference of input and output inside forward is a loss, no residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.decoder = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.decoder(self.encoder(x))
        return {"loss": (x - out).abs().mean(), "out": out}


class NestedOutputs(Stack):
    """Two heads in nested lists."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> list[Any]:
        x = self.body(x)
        return [[self.head(x)], {"second": (self.second(x),)}]


class AveragedHeads(Stack):
    """A learned mean of three classifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.mixture = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x, share = self.body(x), self.mixture.softmax(0)
        return share[0] * self.head(x) + share[1] * self.heads[0](x) + share[2] * self.heads[1](x)


class Contrastive(Stack):
    """Cosines to prototypes of a projection that is normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.body(x)), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


class Batched(Stack):
    """Copies its samples one by one into a batch of its own."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.new_zeros(x.shape)
        for i in range(len(x)):
            batch[i].copy_(x[i])
        return self.head(self.body(batch))


class FunctionalNorm(Stack):
    """A layer norm that is no module."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(*mlp()[1:]))

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(F.layer_norm(x, (WIDTH,)))


class Convolutional(nn.Module):
    """Blocks of convolutions on maps; `step` says what a block does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(conv_bn() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return F.relu(x + block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x.mean((2, 3)))


class ActivationInBranch(Convolutional):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + F.relu(block(x))


class SqueezeGate(Convolutional):
    """A branch that is multiplied by a gate which it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates, strict=True):
            out = block(x)
            x = F.relu(x + out * torch.sigmoid(gate(out.mean((2, 3))))[:, :, None, None])
        return self.head(x.mean((2, 3)))


class ParallelConvolutions(Convolutional):
    """Three parallel layers and no activation between them: one layer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.pointwise = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)) for _ in self.blocks
        )
        self.direct = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, pointwise, direct in zip(self.blocks, self.pointwise, self.direct, strict=True):
            x = F.relu(block(x) + pointwise(x) + direct(x))
        return self.head(x.mean((2, 3)))


class ParallelBranches(Stack):
    """x + f(norm(x)) + g(norm(x)), in one expression."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(mlp() for _ in self.blocks)

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, other in zip(self.blocks, self.others, strict=True):
            x = x + block(x) + other(x)
        return self.norm(x)


class Graph(Stack):
    """Message passing: what the neighbours send is added by index_add."""

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        senders = torch.arange(len(x)).roll(1)
        return x.index_add(0, senders, block(x))


class LearnedToken(Stack):
    """A learned query reads the samples and is added to what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.reader = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(self.query + self.reader(x))


class MultiplicativeOnly(Stack):
    """x · (1 + f(x)) instead of a sum."""

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x * (1 + block(x))


METHODS = ("fixup", "skipinit", "nf")


@dataclass(frozen=True)
class Unusual:
    """A model, an example, its loss, and the loss of a guess.

    Attributes:
        name: the name of the class
        may_refuse: the methods that may refuse the model; a refusal by another is wrong
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    loss_of: Callable[[Any], Tensor]
    chance: float = math.log(CLASSES)
    may_refuse: tuple[str, ...] = ()

    def loss(self, model: nn.Module, example: Any) -> Tensor:
        args, kwargs = call_arguments(example)
        return self.loss_of(model(*args, **kwargs))


def classified(out: Tensor) -> Tensor:
    return F.cross_entropy(out, labels())


def own_loss(out: dict[str, Tensor]) -> Tensor:
    return out["loss"]


def both_heads(out: list[Any]) -> Tensor:
    return (classified(out[0][0]) + classified(out[1]["second"][0])) / 2


def case_of(kind: Callable[[], nn.Module], example: Callable[[], Any] = features, **options: Any) -> Unusual:
    return Unusual(kind.__name__, kind, example, options.pop("loss_of", classified), **options)


def gated() -> nn.Module:
    return Stack(Gated)


def two_gates() -> nn.Module:
    return Stack(TwoGates)


SCALED = ("fixup", "skipinit")  # which need residual branches
UNUSUAL: tuple[Unusual, ...] = (
    *map(case_of, (InPlaceSum, AddWithAlpha, Minus, ItemAssignment, SplitAndShuffle, gated, two_gates, NamedScale)),
    *map(case_of, (Generated, Nested, AveragedHeads, Batched, ParallelBranches, LearnedToken)),
    *(
        case_of(kind, may_refuse=METHODS)
        for kind in (StackedSum, Addcmul, Graph, Lerp, HighwayStack, MultiplicativeOnly)
    ),
    case_of(Shared, may_refuse=("nf",)),
    case_of(Conditioned, lambda: (features(), features())),
    case_of(EinsumAttention, lambda: torch.randn(BATCH, 5, WIDTH)),
    case_of(LossInside, lambda: (features(), labels()), loss_of=own_loss),
    case_of(Reconstruction, loss_of=own_loss, chance=0.8, may_refuse=SCALED),
    case_of(NestedOutputs, loss_of=both_heads),
    case_of(Contrastive, may_refuse=("fixup",)),
    case_of(FunctionalNorm, may_refuse=METHODS),
    *(case_of(kind, maps) for kind in (Convolutional, SqueezeGate)),
    case_of(ActivationInBranch, maps, may_refuse=("skipinit",)),
    case_of(ParallelConvolutions, maps, may_refuse=SCALED),
)
