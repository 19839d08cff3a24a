"""Conversion of models with parts of their own: factors inside an attention, flows, normalizers written by hand."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.conversion import save_converted
from pass_counter import Passes

D = 16
TOKENS = torch.randn(6, 5, D, generator=torch.Generator().manual_seed(1))


# --- factors that are no layer scales


class Attention(nn.Module):
    """Attention without an output layer; `gain` and `temperature` multiply what the softmax reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.gain, self.temperature = nn.Parameter(torch.full((D,), 3.0)), nn.Parameter(torch.tensor(10.0))
        self.gamma = nn.Parameter(torch.full((D,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query = F.normalize(self.query(h), dim=-1) * self.gain
        scores = query @ F.normalize(self.key(h), dim=-1).transpose(1, 2) * self.temperature
        return x + self.gamma * (scores.softmax(-1) @ self.value(h))


class EdgeAttention(nn.Module):
    """Graph attention: a vector scores pairs of nodes, and exp and a sum turn the scores into weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.value = nn.LayerNorm(D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.linspace(-1, 1, 2 * D))
        self.gamma = nn.Parameter(torch.full((D,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.value(self.norm(x))
        left, right = (h * part for part in self.gain.chunk(2))
        weights = F.leaky_relu(left.sum(-1).unsqueeze(2) + right.sum(-1).unsqueeze(1)).exp().unsqueeze(-1)
        return x + self.gamma * (weights * h.unsqueeze(1)).sum(2) / weights.sum(2)


@pytest.mark.parametrize("method", ["fixup", "wn"])
@pytest.mark.parametrize("block", [Attention, EdgeAttention])
def test_only_factors_of_the_branch_output_are_layer_scales(block: type[nn.Module], method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), block(), block(), nn.Flatten(), nn.Linear(5 * D, 4))
    converted, plan = nf.convert(model, method, TOKENS)
    assert [branch.layer_scales for branch in plan.branches] == [("1.gamma",), ("2.gamma",)]
    parameters, before = dict(converted.named_parameters()), dict(model.named_parameters())
    for name, value in before.items():
        if name.endswith(("gain", "temperature")):
            assert torch.equal(parameters[name], value)
    assert (parameters["1.gamma"] == 1).all()
    noted = [note for note in plan.changes.notes if note.startswith("layer scales were set to 1")]
    assert noted == ["layer scales were set to 1, because the method scales the branches: '1.gamma', '2.gamma'"]


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda x, f, g: x + f * g,
    "division": lambda x, f, g: x + f / (1 / g),
    "einsum": lambda x, f, g: x + torch.einsum("btd,d->btd", f, g),
    "diagonal matrix": lambda x, f, g: x + f @ torch.diag(g),
    "linear": lambda x, f, g: x + F.linear(f, g.diag()),
    "convolution": lambda x, f, g: x + F.conv1d(f.mT, g[:, None, None], groups=D).mT,
    "addcmul": lambda x, f, g: torch.addcmul(x, g, f),
    "addcmul in place": lambda x, f, g: x.clone().addcmul_(f, g, value=0.5),
    "addcdiv": lambda x, f, g: torch.addcdiv(x, f, 1 / g),
    "rsub": lambda x, f, g: torch.rsub(f * g, x),
}


class Spelled(nn.Module):
    """x + g · f(x) with a layer scale g, and a vector that is none: the kernel of a convolution over the tokens."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.gamma, self.kernel = nn.Parameter(torch.full((D,), 1e-5)), nn.Parameter(torch.randn(3))
        self.add = SPELLINGS[spelling]

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv1d(self.norm(x).mT, self.kernel.expand(D, 1, 3), padding=1, groups=D).mT
        return self.add(x, self.last(F.gelu(self.first(h))), self.gamma)


@pytest.mark.parametrize("method", ["fixup", "nf"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layer_scale_is_found_however_it_is_written(spelling: str, method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Spelled(spelling), Spelled(spelling), nn.Flatten(), nn.Linear(5 * D, 4))
    converted, plan = nf.convert(model, method, TOKENS)
    assert [branch.layer_scales for branch in plan.branches] == [("1.gamma",), ("2.gamma",)]
    assert [branch.shortcut for branch in plan.branches] == ["identity", "identity"]
    assert (converted.get_parameter("1.gamma") == 1).all()
    assert torch.equal(converted.get_parameter("1.kernel"), model.get_parameter("1.kernel"))


class Alphas(nn.Module):
    """ReZero with the multipliers of all blocks in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(3))
        self.alphas, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        for alpha, block in zip(self.alphas, self.blocks, strict=True):
            x = x + alpha * block(x)
        return self.head(x)


def test_a_vector_of_layer_scales_is_named_once() -> None:
    _, plan = nf.convert(Alphas(), "fixup", torch.randn(6, D))
    (note,) = (note for note in plan.changes.notes if "layer scales" in note)
    assert note.endswith(": 'alphas'")


# --- outputs that are no scores of classes


class Step(nn.Module):
    """A step of a flow whose last layer has as many outputs as the flow."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        wide = [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
        self.net = nn.Sequential(nn.Linear(D // 2, 64), nn.LayerNorm(64), nn.ReLU(), *wide, nn.Linear(64, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)[:: -1 if self.turned else 1]
        scale, shift = self.net(a).chunk(2, 1)
        b = b * torch.tanh(scale).exp() + shift
        return torch.cat([b, a] if self.turned else [a, b], 1), torch.tanh(scale).sum(1)


class Densities(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(i % 2 == 1) for i in range(steps))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for step in self.steps:
            x, change = step(x)
            volume = volume + change
        return x, volume


class Corrected(nn.Module):
    """Adds its last layer to a multiple of its input, as a denoiser does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, D))

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x * torch.sigmoid(x) * self.net(x)


class Masked(nn.Module):
    """Scores of classes, of which a mask from the input forbids some: a control."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).masked_fill(x > 200, -1e4)


@pytest.mark.parametrize(
    ("make", "are_scores"),
    [(lambda: Densities(1), False), (lambda: Densities(6), False), (Corrected, False), (Masked, True)],
)
def test_first_loss_is_that_of_scores_alone(make: Callable[[], nn.Module], are_scores: bool) -> None:
    torch.manual_seed(0)
    x = 25 * torch.randn(32, D)  # which the normalizer reduces
    try:
        text = "; ".join(nf.convert(make(), "wn", x, generator=torch.Generator().manual_seed(0))[1].changes.notes)
    except ValueError as refusal:
        text = str(refusal)
    assert ("the first loss at" in text) is are_scores
    if are_scores:
        assert f"a uniform guess has {math.log(D):.3g}" in text


# --- code that runs in training mode only


class RunningNorm(nn.Module):
    """Branch with a batch norm in its own code; `by_running` divides by the running statistics in training, too."""

    def __init__(self, by_running: bool) -> None:
        super().__init__()
        self.first, self.last, self.by_running = nn.Linear(D, D), nn.Linear(D, D), by_running
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("variance", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mean, variance = self.mean, self.variance
        if self.training:
            now, size = h.mean(0), h.var(0, unbiased=False)
            mean.lerp_(now.detach(), 0.1)
            variance.lerp_(size.detach(), 0.1)
            if not self.by_running:
                mean, variance = now, size
        return x + self.last(torch.relu((h - mean) / torch.sqrt(variance + 1e-5)))


@pytest.mark.parametrize("by_running", [False, True])
def test_normalization_by_running_statistics_in_code_is_noted(by_running: bool) -> None:
    model = nn.Sequential(RunningNorm(by_running), RunningNorm(by_running), nn.LayerNorm(D), nn.Linear(D, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, plan = nf.convert(model, "fixup", torch.randn(6, D))
    assert any("divided by its own scale in the code of '0', '1'" in note for note in plan.changes.notes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ReadsInTraining(nn.Module):
    """Reads an attribute of its normalizer in training mode."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.norm, self.layer, self.attribute = nn.LayerNorm(D), nn.Linear(D, D), attribute

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0 * torch.as_tensor(getattr(self.norm, self.attribute)).sum()
        return x + self.layer(self.norm(x))


@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_normalizer_that_is_read_in_training_is_kept_readable_or_refused(method: str) -> None:
    def model(attribute: str) -> nn.Module:
        return nn.Sequential(ReadsInTraining(attribute), ReadsInTraining(attribute), nn.Linear(D, 4))

    x = torch.randn(6, D)
    converted, _ = nf.convert(model("weight"), method, x)
    converted.train()(x).sum().backward()
    with pytest.raises(
        ValueError, match=r"on the example in training mode, but '0\.norm' failed: .* no attribute 'eps'"
    ):
        nf.convert(model("eps"), method, x)
    with pytest.raises(ValueError, match=r"'0\.norm' .*: other code reads its bias"):
        nf.convert(model("bias"), method, x)


def test_models_that_draw_random_numbers_in_training_leave_the_random_state() -> None:
    model = nn.Sequential(ReadsInTraining("weight"), nn.Dropout(0.5), nn.Linear(D, 4)).train()
    state = torch.get_rng_state()
    nf.convert(model, "fixup", torch.ones(6, D).cumsum(0), generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


# --- normalizers of other libraries


class NoNorm(nn.Module):
    """Scales and shifts, in the place of a normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.full((D,), 0.7)), nn.Parameter(torch.full((D,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.bias


class ActNorm(NoNorm):
    """The same, in other code."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.gain.exp()


class GraphNorm(NoNorm):
    """Normalizes over the samples: a control."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        return super().forward(centred / centred.square().mean(0).add(1e-5).sqrt())


def residual(norm: nn.Module, width: int = D) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = norm, nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(self.norm(x))

    return nn.Sequential(Block(), nn.LayerNorm(width), nn.Linear(width, 4))


@pytest.mark.parametrize("method", ["fixup", "dyt"])
def test_module_named_like_a_normalizer_that_scales_and_shifts_stays(method: str) -> None:
    x = torch.randn(6, D)
    for kind in (NoNorm, ActNorm):
        converted, plan = nf.convert(residual(kind()), method, x)
        assert type(converted[0].norm) is kind
        assert [record.kind for record in plan.changes.removed] == ["LayerNorm"]
    with pytest.raises(ValueError, match=r"'0\.norm': GraphNorm is not a normalizer that can be removed"):
        nf.convert(residual(GraphNorm()), method, x)


class OwnBatchNorm(nn.Module):
    """Batch norm whose vectors have names of their own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        dims = (0, *range(2, x.dim()))
        shape = (1, -1, *(1,) * (x.dim() - 2))
        mean, variance = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.gain.view(shape) + self.offset.view(shape)


@pytest.mark.parametrize(("shape", "dim"), [((6, D), 1), ((6, D, 5, 5), 1)])
def test_channels_of_an_own_normalizer_come_from_vectors_of_one_length(shape: tuple[int, ...], dim: int) -> None:
    first = nn.Linear(D, D) if len(shape) == 2 else nn.Conv2d(D, D, 3, padding=1)
    model = nn.Sequential(first, OwnBatchNorm(D), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(shape)
    model(x)
    converted, _ = nf.convert(model, "dyt", x)
    assert converted[1].weight.shape == (D,)
    assert converted[1].dim % len(shape) == dim


class Standardized(nn.Module):
    """A parametrization that standardizes a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        weight = weight - weight.mean(1, keepdim=True)
        return weight / weight.std(1, keepdim=True)


def test_parametrization_is_no_normalizer_of_the_signal() -> None:
    model = residual(nn.LayerNorm(D))
    nn.utils.parametrize.register_parametrization(model[0].layer, "weight", Standardized())
    _, plan = nf.convert(model, "dyt", torch.randn(6, D))
    assert not any("behaves like a normalizer" in note for note in plan.changes.notes)


# --- outputs in objects


class Batch:
    """Tensors as attributes, beside a reference to itself."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.parent = scores, self


MAKERS: dict[str, Callable[[Tensor], object]] = {
    "object": Batch,
    "categorical": lambda scores: torch.distributions.Categorical(logits=scores),
    "independent": lambda mean: torch.distributions.Independent(torch.distributions.Normal(mean, 1.0), 1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_outputs_in_objects_are_checked(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = residual(nn.LayerNorm(D))

        def forward(self, x: Tensor) -> object:
            return MAKERS[kind](self.net(x))

    _, plan = nf.convert(Model(), "fixup", torch.randn(6, D))
    assert not any("was not checked" in note for note in plan.changes.notes)


# --- models that do not take two images of the example


class Frames(nn.Module):
    """Reads clips of four frames, stored as images one after the other; `fixed` reads exactly three clips."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.stem, self.fixed = nn.Conv2d(3, D, 3, padding=1), fixed
        self.block = nn.Sequential(nn.BatchNorm2d(D), nn.ReLU(), nn.Conv2d(D, D, 3, padding=1))
        self.head = nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        clips = x.mean((2, 3)).reshape(3 if self.fixed else -1, 4, D)
        return self.head(clips.mean(1))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_the_whole_example_is_used_for_a_model_that_does_not_take_two_images(
    method: str, fixed: bool, tmp_path: Path
) -> None:
    counter, images = Passes(), torch.randn(12, 3, 8, 8)
    converted, plan = nf.convert(counter.around(Frames(fixed)), method, images)
    assert counter.cost <= 15
    assert len(plan.branches) == 1
    assert converted(images).shape == (3, 5)
    converted, _ = nf.convert(Frames(fixed), method, images)
    save_converted(tmp_path / "frames", converted)
    loaded = nf.load(tmp_path / "frames", lambda: Frames(fixed))
    assert torch.equal(loaded.eval()(images), converted.eval()(images))


# --- layers of own classes


class GraphLayer(nn.Module):
    """x W + b between neighbours, which a buffer names: more than a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D) / 4), nn.Parameter(torch.zeros(D))
        self.register_buffer("neighbours", torch.eye(6).roll(1, 0) + torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.neighbours @ (x @ self.weight) + self.bias


@pytest.mark.parametrize("method", ["nf", "wn"])
def test_layer_that_mixes_samples_is_not_reparametrized(method: str) -> None:
    model = nn.Sequential(GraphLayer(), nn.LayerNorm(D), nn.ReLU(), GraphLayer(), nn.LayerNorm(D), nn.Linear(D, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' .*: GraphLayer uses its weight in a custom way"):
        nf.convert(model, method, torch.randn(6, D))


# --- products of the signal with itself


class Retention(nn.Module):
    """Attention without a softmax, and a gate: the fourth power of the stream where no normalizer limits it."""

    def __init__(self, divides: bool = False) -> None:
        super().__init__()
        self.norm, self.inner, self.divides = nn.LayerNorm(D), nn.LayerNorm(D), divides
        self.query, self.key, self.value, self.gate, self.last = (nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query, key = F.elu(self.query(h)) + 1, F.elu(self.key(h)) + 1
        read = query @ (key.transpose(1, 2) @ self.value(h))
        if self.divides:
            return x + self.last(read / (query @ key.sum(1).unsqueeze(-1)))
        return x + self.last(F.silu(self.gate(h)) * self.inner(read))


class Polynomial(nn.Module):
    """A product of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.layers, self.last = nn.ModuleList(nn.Linear(D, D) for _ in range(3)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (layer(self.norm(x)) for layer in self.layers)
        return x + self.last(a * b * c)


class Softened(Attention):
    """Attention with a softmax, and a gated feed-forward that a router weighs: a control."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        h = self.norm(x)
        shares = self.value(h).softmax(-1)
        share = shares.gather(-1, shares.argmax(-1, keepdim=True))
        return x + self.value(F.silu(self.query(h)) * self.key(h)) * share


@pytest.mark.parametrize(
    ("block", "noted"),
    [(Retention, True), (lambda: Retention(divides=True), False), (Polynomial, True), (Softened, False)],
)
def test_branches_that_grow_as_a_third_power_are_noted(block: Callable[[], nn.Module], noted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), block(), block(), nn.Flatten(), nn.Linear(5 * D, 4))
    for method, limits in (("fixup", False), ("dyt", True)):
        _, plan = nf.convert(model, method, TOKENS)
        found = [note for note in plan.changes.notes if "multiplied with itself" in note]
        assert bool(found) is (noted and not limits)
        assert all("'1', '2'" in note for note in found)
