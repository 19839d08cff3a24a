"""Weights that are used outside of torch's weight layers are found by the identity of the parameter."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree import discover
from normfree.graph import unaccounted
from normfree.plan import Layer


class Held(nn.Module):
    """A module whose parameters other modules use."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(*shape))


class Uses(nn.Module):
    """x + f(x, W) with W in another module."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.held = Held(*shape)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(x, self.held.matrix)


USES: list[tuple[str, Callable[[Tensor, Tensor], Tensor], tuple[int, ...], bool]] = [
    ("linear", lambda x, w: F.linear(x, w), (6, 6), False),
    ("linear of a transposed", lambda x, w: F.linear(x, w.t()), (6, 6), True),
    ("matmul", lambda x, w: x @ w, (6, 6), True),
    ("matmul with .T", lambda x, w: torch.matmul(x, w.T), (6, 6), False),
    ("addmm", lambda x, w: torch.addmm(x.new_zeros(6), x.view(-1, 6), w).view(x.shape), (6, 6), True),
    ("einsum, inputs first", lambda x, w: torch.einsum("bnd,de->bne", x, w), (6, 6), True),
    ("einsum, outputs first", lambda x, w: torch.einsum("bnd,ed->bne", x, w), (6, 6), False),
    ("from the left", lambda x, w: w @ x, (4, 4), False),
    ("conv1d", lambda x, w: F.conv1d(x, w, padding=1), (4, 4, 3), False),
    ("transposed convolution", lambda x, w: F.conv_transpose1d(x, w, padding=1), (4, 4, 3), True),
    ("standardized", lambda x, w: F.linear(x, (w - w.mean(1, keepdim=True)) / w.std()), (6, 6), False),
]


@pytest.mark.parametrize(("use", "shape", "transposed"), [case[1:] for case in USES], ids=[case[0] for case in USES])
def test_weight_used_through_a_function_is_found(
    use: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], transposed: bool
) -> None:
    model = Uses(use, *shape)
    plan = discover(model, torch.zeros(2, 4, 6))
    (branch,) = plan.branches
    assert branch.layers == (Layer("held", parameter="matrix", transposed=transposed),)
    assert branch.layers[0].path == "held.matrix"
    assert unaccounted(model, plan) == ()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x + w,
        lambda x, w: x * w,
        lambda x, w: torch.cat([x, w.expand(2, 4, 6)], 1)[:, :4],
        lambda x, w: torch.where(x > 0, x, w),
        lambda x, w: F.embedding(x.argmax(-1), w),
        lambda x, w: F.layer_norm(x, (4, 6), w),
        lambda x, w: F.scaled_dot_product_attention(x, x, x, attn_mask=(w @ w.T)),
    ],
    ids=["added", "scaled", "beside", "chosen", "looked up", "normalizer", "bias of an attention"],
)
def test_parameter_that_multiplies_no_vector_stands_aside(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Uses(use, 4, 6)
    plan = discover(model, torch.zeros(2, 4, 6))
    assert plan.other_parameters == ("held.matrix",)
    assert not list(plan.layers())
    assert unaccounted(model, plan) == ()


def test_parameter_used_in_a_strange_way_is_unaccounted_for() -> None:
    for use in (lambda x, w: torch.cdist(x, w), lambda x, w: x):
        model = Uses(use, 6, 6)
        plan = discover(model, torch.zeros(2, 6, 6))
        assert unaccounted(model, plan) == ("held.matrix",)


def test_unused_and_recurrent_layers_are_unaccounted_for() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.memory = nn.Linear(4, 4), nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(self.used(x))[0]

    model = Partly()
    plan = discover(model, torch.zeros(2, 3, 4))
    assert unaccounted(model, plan) == ("unused.weight", "memory.weight_ih_l0", "memory.weight_hh_l0")


def test_transposed_convolution_is_a_weight_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3))
    plan = discover(model, torch.zeros(1, 3, 8, 8))
    assert plan.classifier == (Layer("2", reads_activation=True, transposed=True),)
    assert unaccounted(model, plan) == ()


class Attending(nn.Module):
    """A pre-norm block around torch's own attention."""

    def __init__(self, **options: bool | int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, **options: bool) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, **options)[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_opened(training: bool, batch_first: bool, need_weights: bool) -> None:
    model = Attending(batch_first=batch_first, add_bias_kv=True).train(training)
    plan = discover(model, torch.zeros(2, 3, 8), need_weights=need_weights)
    (branch,) = plan.branches
    assert branch.layers == (
        Layer("attention", parameter="in_proj_weight", parts=3),
        Layer("attention.out_proj"),
    )
    assert branch.degree == 4
    assert set(plan.other_parameters) == {"attention.bias_k", "attention.bias_v"}
    assert unaccounted(model, plan) == ()


def test_multihead_attention_with_separate_projections_has_four_layers() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + self.attention(x, memory, memory)[0]

    model = Crossed()
    plan = discover(model, torch.zeros(3, 2, 8), torch.zeros(5, 2, 6))
    (branch,) = plan.branches
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "weight"]
    assert [layer.parameter for layer in branch.layers] == names
    assert [layer.parameter for layer in branch.first_layers] == ["q_proj_weight"]  # the others read the memory
    assert branch.degree == 4
    assert unaccounted(model, plan) == ()


def test_attention_recorded_on_values_takes_no_fast_path() -> None:
    class Looking(Attending):
        def forward(self, x: Tensor, **options: bool) -> Tensor:
            return super().forward(x) if float(x.sum()) == 0 else x

    model = Looking(batch_first=True).eval()
    (branch,) = discover(model, torch.zeros(2, 3, 8)).branches
    assert [layer.parts for layer in branch.layers] == [3, 1]


def test_weight_that_is_an_embedding_too_is_tied() -> None:
    class Language(nn.Module):
        def __init__(self, tied: bool, module: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.layer = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False) if module else None
            if tied and self.head:
                self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.embedding(x))
            return self.head(y) if self.head else y @ self.embedding.weight.T

    ids = torch.zeros(2, 3, dtype=torch.long)
    assert discover(Language(True, True), ids).classifier == (Layer("head", tied=True),)
    assert discover(Language(True, False), ids).classifier == (Layer("embedding", tied=True),)
    assert discover(Language(False, True), ids).classifier == (Layer("head"),)
