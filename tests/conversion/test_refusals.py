"""What `convert` refuses with a true reason: a case as it was reported, a variant, and a control for each."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from remedies import named_methods, refusal

D = 16
X = torch.randn(12, D, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """x + W2 act(W1 norm(x))."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.first, self.act, self.second = norm(D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))


def network(*front: nn.Module, norm: Callable[[int], nn.Module] = nn.LayerNorm, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*front, nn.Linear(D, D), *[Block(norm) for _ in range(blocks)], nn.Linear(D, 5))


# --- samples that become alike


@pytest.mark.parametrize(
    ("front", "example"),
    [
        pytest.param([nn.BatchNorm1d(D)], 1000 * X + 5000, id="raw columns"),
        pytest.param([nn.Identity(), nn.BatchNorm1d(D)], X + 25, id="columns far from zero"),
    ],
)
def test_outputs_that_are_the_same_for_all_samples_are_refused(front: list[nn.Module], example: Tensor) -> None:
    text = refusal(network(*front), "dyt", example)
    name = len(front) - 1
    assert f"output 0 is the same for all samples, from '{name}' on" in text


def test_raw_data_are_named_and_no_method_is_recommended() -> None:
    model = network(nn.BatchNorm1d(D))
    for method in ("fixup", "nf", "dyt"):
        text = refusal(model, method, 1000 * X + 5000)
        assert "standardize the data first: their size is 5," in text
        assert named_methods(text) is None
    _, plan = nf.convert(model, "lsuv:by=layer", 1000 * X + 5000)
    assert any("standardize the data first" in note for note in plan.changes.notes)


def test_standardized_data_convert_without_a_note() -> None:
    for method in ("fixup", "dyt"):
        converted, plan = nf.convert(network(nn.BatchNorm1d(D)), method, X)
        assert not any("standardize" in note or "same" in note for note in plan.changes.notes)
        assert plan.changes.method.startswith(method)
        assert isinstance(converted, nn.Sequential)


def test_a_model_that_divides_raw_data_itself_gets_no_such_remedy() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(nn.BatchNorm1d(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x / 255)

    _, plan = nf.convert(Divided(), "dyt", 255 * X)
    assert not any("standardize" in note for note in plan.changes.notes)


@pytest.mark.parametrize("blocked", [float("-inf"), -1e9])
def test_a_mask_is_not_data(blocked: float) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(D, 2, batch_first=True), nn.LayerNorm(D)
            self.head = nn.Linear(D, 5)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.norm(x)
            return self.head(x + self.attention(y, y, y, attn_mask=mask)[0])

    tokens = X.reshape(3, 4, D)
    _, plan = nf.convert(Masked(), "fixup", (tokens, torch.full((4, 4), blocked).triu(1)))
    assert not any("standardize" in note for note in plan.changes.notes)
    _, plan = nf.convert(Masked(), "fixup", (100 * tokens, torch.zeros(4, 4)))
    assert any("standardize" in note for note in plan.changes.notes)


def test_samples_that_are_alike_in_the_original_are_not_compared() -> None:
    alike = X[:1].repeat(4, 1)  # a batch norm would return zeros
    nf.convert(network(), "fixup", alike)


# --- frozen weights


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "wn", "dyt"])
def test_a_frozen_backbone_is_refused(method: str) -> None:
    model = network()
    model[:-1].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = refusal(model, method, X)
    norms = "'1.norm', '2.norm'"
    layers = "'0', '1.first', '1.second', '2.first', '2.second'"
    assert (norms if method == "dyt" else layers) in text
    assert "frozen (requires_grad is False)" in text
    assert "convert before freezing" in text
    assert named_methods(text) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_single_frozen_layer_is_named_alone() -> None:
    model = network()
    model[1].first.weight.requires_grad_(False)
    assert "by 'fixup': '1.first': frozen" in refusal(model, "fixup", X)


def test_a_method_that_keeps_the_weights_converts_trained_normalizers_between_frozen_layers() -> None:
    model = network()
    for layer in (model[0], *(layer for block in model[1:3] for layer in (block.first, block.second))):
        layer.requires_grad_(False)
    converted, plan = nf.convert(model, "dyt", X)
    assert torch.equal(converted[1].first.weight, model[1].first.weight)
    assert not converted[1].first.weight.requires_grad
    assert converted[1].norm.alpha.requires_grad
    assert not any("frozen" in note for note in plan.changes.notes)


def test_a_frozen_normalizer_between_trained_layers_becomes_trainable() -> None:
    model = network()
    model[1].norm.requires_grad_(False)
    converted, plan = nf.convert(model, "dyt", X)
    assert all(p.requires_grad for p in converted.parameters())
    assert "frozen until now, and trainable in its new form: '1.norm'" in plan.changes.notes


def test_a_frozen_backbone_with_normalizers_without_parameters_is_refused() -> None:
    model = network()
    for block in model[1:3]:
        block.norm = nn.LayerNorm(D, elementwise_affine=False)
    nf.convert(model, "dyt", X)  # the control
    model[:-1].requires_grad_(False)
    assert "'1.norm', '2.norm'" in refusal(model, "dyt", X)


def test_a_frozen_bias_is_noted() -> None:
    model = network()
    model[1].first.bias.requires_grad_(False)
    _, plan = nf.convert(model, "fixup", X)
    assert "frozen, but scaled, drawn or set to zero: '1.first.bias'" in plan.changes.notes
    _, plan = nf.convert(network(), "fixup", X)
    assert not any("frozen" in note for note in plan.changes.notes)


# --- sums of numbers per sample


class Coupling(nn.Module):
    """A normalizing flow of couplings, with a running log-determinant."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            x = torch.cat([b * torch.tanh(scale).exp() + shift, a], 1)
            total = total + self.reduce(torch.tanh(scale))
        return total - 0.5 * self.reduce(x.square())


@pytest.mark.parametrize(
    "reduce",
    [
        lambda s: s.sum(1),
        lambda s: 0.5 * s.mean(-1, keepdim=True),
        lambda s: torch.logsumexp(s, 1),
        lambda s: s.sum(),
    ],
    ids=["sum", "mean", "logsumexp", "number"],
)
def test_a_running_log_determinant_is_no_residual_stream(reduce: Callable[[Tensor], Tensor]) -> None:
    assert not nf.discover(Coupling(reduce), X[:, :8]).branches


def test_a_stream_that_a_layer_reads_stays_residual_though_its_branch_ends_in_a_sum() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, D) for _ in range(3))
            self.head = nn.Linear(1, 5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).mean(1, keepdim=True)
            return self.head(x)

    assert len(nf.discover(Narrow(), X[:, :1]).branches) == 3


def test_the_last_residual_sum_of_a_network_without_a_head_stays_residual() -> None:
    assert len(nf.discover(network()[:-1], X).branches) == 2


# --- true reasons


class Differentiated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = self.net(x)
        return torch.cat([out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]], 1)


def test_a_forward_pass_that_differentiates_is_named() -> None:
    model = Differentiated()
    text = refusal(model, "fixup", X)
    assert "its forward pass differentiates" in text
    assert "shape" not in text
    model.net, _ = nf.convert(model.net, "fixup", X)  # the remedy works
    assert model(X).shape == (12, 5 + D)
    assert "check the shape of the example, (12, 3)" in refusal(network(), "fixup", X[:, :3])  # control


def test_local_response_norm_is_one_reason_with_a_remedy_that_works() -> None:
    class Local(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.stem, self.norm, self.conv = nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 3, padding=1)
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head((x + self.conv(F.relu(self.norm(x)))).mean((2, 3)))

    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    text = refusal(Local(nn.LocalResponseNorm(3)), "fixup", images)
    assert "'norm': LocalResponseNorm is not a normalizer that can be removed; replace it" in text
    assert "make it a module" not in text
    for norm in (nn.BatchNorm2d(8), nn.Identity()):
        nf.convert(Local(norm), "fixup", images)


@dataclass
class Output:
    logits: Tensor
    rest: list[Tensor]


@pytest.mark.parametrize("make", [Output, lambda a, b: SimpleNamespace(logits=a, rest=b)], ids=["dataclass", "names"])
def test_outputs_in_a_dataclass_are_checked(make: Callable[[Tensor, list[Tensor]], Any]) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(nn.BatchNorm1d(D))

        def forward(self, x: Tensor) -> Any:
            return make(self.net(x), [x])

    _, plan = nf.convert(Wrapped(), "fixup", X)
    assert not any("was not checked" in note for note in plan.changes.notes)
    assert "output 0 is the same for all samples" in refusal(Wrapped(), "dyt", X + 25)


def test_an_activation_module_is_named_as_one() -> None:
    class Late(nn.Module):
        def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.act = act  # one for all layers, so that none of them can hold a scalar after it
            self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(8))
            self.layers, self.head = nn.ModuleList(nn.Linear(D, D) for _ in range(8)), nn.Linear(D, 5)

        def forward(self, x: Tensor) -> Tensor:
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + self.act(layer(norm(x)))
            return self.head(x)

    module = refusal(Late(nn.GELU()), "nf", X)
    assert "'layers.0' (and 7 more): 'act' lies between it and the sum '(model)#1'" in module
    assert "of its own" not in module
    function = refusal(Late(F.gelu), "nf", X)
    assert "'layers.0' (and 7 more): an activation in the model's own code lies between" in function
    assert function.count("make that activation a module of its own") == 1


def test_a_reason_that_holds_for_one_module_is_not_counted() -> None:
    assert "more)" not in refusal(network(nn.LocalResponseNorm(3)), "fixup", X)


# --- examples


@pytest.mark.parametrize("method", ["fixup", "nf", "dyt"])
def test_the_example_is_named_if_it_is_at_fault(method: str) -> None:
    model = network()
    assert "expected an example without NaN, got NaN in its tensor of shape (12, 16)" in refusal(
        model, method, X.clone().fill_(float("nan"))
    )
    partly = X.clone()
    partly[3, 3] = float("nan")
    assert "expected an example without NaN" in refusal(model, method, {"input": partly})
    assert "before anything was changed" in refusal(model, method, X * float("inf"))
    for empty in (X[:0], (X[:, :0],)):
        assert "expected an example of at least one sample, got the shape" in refusal(model, method, empty)


def test_an_example_of_zeros_is_named_or_noted() -> None:
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    nn.init.ones_(convolutions[1].bias)
    images = torch.zeros(4, 3, 8, 8)
    text = refusal(convolutions, "nf", images)
    assert "expected an example with different values, got one value everywhere" in text
    assert named_methods(text) is None
    _, plan = nf.convert(convolutions, "dyt", images)
    assert any("all values of the example are the same" in note for note in plan.changes.notes)
    _, plan = nf.convert(convolutions, "nf", torch.randn(images.shape, generator=torch.Generator().manual_seed(1)))
    assert not any("all values" in note for note in plan.changes.notes)


# --- normalizers that other code looks into


class ByHand(nn.Module):
    """Standardizes by the statistics of a batch norm that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.norm.running_mean) / (self.norm.running_var + self.norm.eps).sqrt()
        return x + self.second(F.relu(self.first(y)))


class Added(ByHand):
    """Calls the normalizer, and adds its bias elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(self.norm(x)) + self.norm.bias))


class Typed(ByHand):
    """Reads only the type of the normalizer's weight, as libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(self.norm(x.to(self.norm.weight.dtype)))))


@pytest.mark.parametrize(("block", "tensor"), [(ByHand, "running_var"), (Added, "bias")])
@pytest.mark.parametrize("method", ["fixup", "dyt"])
def test_normalizer_whose_tensors_other_code_reads_is_named(block: type[nn.Module], tensor: str, method: str) -> None:
    text = refusal(nn.Sequential(nn.Linear(D, D), block(), block(), nn.Linear(D, 5)), method, X)
    assert f"'1.norm' (and 1 more): other code reads its {tensor}; call the normalizer there" in text


def test_normalizer_whose_weight_tells_the_type_is_removed() -> None:
    model, _ = nf.convert(nn.Sequential(nn.Linear(D, D), Typed(), nn.Linear(D, 5)), "fixup", X)
    assert type(model[1].norm).__name__ == "RemovedNorm"


# --- a single weight per output


@pytest.mark.parametrize(("method", "lack"), [("nf", "variance to standardize"), ("wn", "direction to learn")])
def test_layer_with_a_single_weight_per_output_is_named(method: str, lack: str) -> None:
    depthwise = nn.Conv2d(8, 8, 1, groups=8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), depthwise, nn.BatchNorm2d(8), nn.Conv2d(8, 2, 6))
    text = refusal(model, method, torch.randn(4, 3, 8, 8))
    assert f"'2.weight' cannot become a {'standardized' if method == 'nf' else 'weight norm'} layer" in text
    assert f"a single weight per output has no {lack}; use 'dyt' or 'lsuv:by=layer'" in text


# --- isograd on models that are no ResNets


def test_isograd_says_why_it_needs_images() -> None:
    model = nn.Sequential(nn.Embedding(9, D), Block(), nn.Linear(D, 5))
    text = refusal(model, "isograd", torch.randint(9, (12,)))
    assert "isograd is meant for ResNets, and expects a batch of images, got values of type torch.int64" in text


class Indexed(nn.Module):
    """Looks at values, and so does not run without them."""

    def forward(self, x: Tensor) -> Tensor:
        return x[(x.sum(1) > -100).nonzero()[:, 0]]


def test_isograd_says_that_a_model_needs_values() -> None:
    text = refusal(network(Indexed()), "isograd", X)
    assert "isograd is meant for ResNets, and reads the resolution of each layer from a pass without values" in text
    assert named_methods(text) == ["fixup", "skipinit", "rezero", "nf", "wn", "dyt"]


# --- a normalizer of the model's own


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


def test_channels_of_an_own_normalizer_come_from_its_only_vector() -> None:
    model, plan = nf.convert(network(norm=OwnRMSNorm), "dyt", X)
    assert len(plan.changes.removed) == 2
    assert model[1].norm.weight.shape == (D,)
