"""The top Hessian eigenvalue against exact Hessians in float64, against curvlinops, and `wninit` Table 2 on a CPU."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from normfree.diagnostics.curvature import Hessian, top_eigenvalue
from normfree.models import build


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The whole matrix of the mean cross-entropy by automatic differentiation."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = {n: v.view_as(p) for (n, p), v in zip(parameters.items(), flat.split(sizes), strict=True)}
        return F.cross_entropy(functional_call(model, parts, (x,)), y)

    flat = torch.cat([p.flatten() for p in parameters.values()])
    return torch.autograd.functional.hessian(loss, flat)


def mlp(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(seed + p.numel())) / p.shape[-1] ** 0.5)
    return model, torch.randn(11, 5, generator=seeded(seed)).double(), torch.arange(11) % 3


def residual(seed: int, method: str = "he_in") -> tuple[nn.Module, Tensor, Tensor]:
    model = build(
        "resmlp-3-6", method, in_channels=1, size=3, num_classes=4, generator=seeded(seed), dtype=torch.double
    )
    return model, torch.randn(12, 1, 3, 3, generator=seeded(seed + 1)).double(), torch.arange(12) % 4


def small_resnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = build("wrn-10-1", "he_in", num_classes=3, generator=seeded(0), dtype=torch.double)
    return model, torch.randn(4, 3, 8, 8, generator=seeded(1)).double(), torch.arange(4) % 3


def top(matrix: Tensor, which: str = "magnitude") -> float:
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()] if which == "magnitude" else values.max())


CASES = {
    "mlp 0": lambda: mlp(0),
    "mlp 1": lambda: mlp(1),
    "residual": lambda: residual(0),
    "weight norm": lambda: residual(1, "wn"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    model, x, y = CASES[request.param]()
    return model, x, y, exact_hessian(model, x, y)


@pytest.mark.parametrize("algorithm", ["lanczos", "power"])
def test_eigenvalue_is_that_of_the_exact_hessian(
    case: tuple[nn.Module, Tensor, Tensor, Tensor], algorithm: str
) -> None:
    model, x, y, matrix = case
    found = top_eigenvalue(model, x, y, algorithm=algorithm, tolerance=1e-7, max_products=3000)
    assert found.converged
    assert found.eigenvalue == pytest.approx(top(matrix), rel=1e-9)
    assert found.log10 == pytest.approx(math.log10(abs(top(matrix))))


def test_default_tolerance_is_within_1e_4(case: tuple[nn.Module, Tensor, Tensor, Tensor]) -> None:
    model, x, y, matrix = case
    found = top_eigenvalue(model, x, y)
    assert found.eigenvalue == pytest.approx(top(matrix), rel=1e-6)  # quadratic in the residual, 1e-4 at worst


def test_product_is_that_of_the_exact_hessian(case: tuple[nn.Module, Tensor, Tensor, Tensor]) -> None:
    model, x, y, matrix = case
    v = torch.randn(len(matrix), generator=seeded(3), dtype=torch.double)
    torch.testing.assert_close(Hessian(model, x, y)(v), matrix @ v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batch", [1, 5, 12, 100])
def test_micro_batches_equal_the_full_batch(micro_batch: int) -> None:
    model, x, y = residual(0)
    v = torch.randn(Hessian(model, x, y).size, generator=seeded(3), dtype=torch.double)
    whole = Hessian(model, x, y)(v)
    torch.testing.assert_close(Hessian(model, x, y, micro_batch=micro_batch)(v), whole, rtol=1e-10, atol=1e-12)


def test_unweighted_mean_of_unequal_micro_batches_would_be_wrong() -> None:
    model, x, y = residual(0)
    v = torch.randn(Hessian(model, x, y).size, generator=seeded(3), dtype=torch.double)
    pieces = [Hessian(model, x[i : i + 5], y[i : i + 5])(v) for i in (0, 5, 10)]
    assert not torch.allclose(sum(pieces) / 3, Hessian(model, x, y)(v), rtol=1e-2)


@pytest.mark.parametrize("vectors", [3, 4, 8])
def test_restart_keeps_few_vectors_and_the_answer(vectors: int) -> None:
    model, x, y = mlp(1)
    exact = top(exact_hessian(model, x, y))
    free = top_eigenvalue(model, x, y, tolerance=1e-8)
    tight = top_eigenvalue(model, x, y, tolerance=1e-8, vectors=vectors, max_products=500)
    assert tight.converged
    assert tight.products > vectors  # or nothing was restarted
    assert tight.products >= free.products
    assert tight.eigenvalue == pytest.approx(exact, rel=1e-9)


class Saddle(nn.Module):
    """A loss with the Hessian diag(d)."""

    def __init__(self, diagonal: list[float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(len(diagonal), dtype=torch.double))
        self.register_buffer("diagonal", torch.tensor(diagonal, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.diagonal * self.theta**2).sum() / 2


def mean(output: Tensor, _: object) -> Tensor:
    return output.mean()


def test_indefinite_hessian_has_two_tops() -> None:
    model, x = Saddle([-9.0, 5.0, 1.0, 0.5, -2.0, 3.0]), torch.ones(2, dtype=torch.double)
    magnitude = top_eigenvalue(model, x, None, loss=mean)
    largest = top_eigenvalue(model, x, None, loss=mean, which="largest")
    power = top_eigenvalue(model, x, None, loss=mean, algorithm="power")
    assert magnitude.eigenvalue == pytest.approx(-9)
    assert power.eigenvalue == pytest.approx(-9)
    assert largest.eigenvalue == pytest.approx(5)
    assert largest.stable_learning_rate == pytest.approx(2 / 5)
    assert magnitude.stable_learning_rate < largest.stable_learning_rate
    assert magnitude.log10 == pytest.approx(math.log10(9))


def test_stable_learning_rate_is_where_descent_diverges() -> None:
    model, x = Saddle([4.0, 1.0, 0.1]), torch.ones(2, dtype=torch.double)
    limit = top_eigenvalue(model, x, None, loss=mean).stable_learning_rate
    for factor, stable in ((0.99, True), (1.01, False)):
        theta = torch.ones(3, dtype=torch.double)
        for _ in range(2000):
            theta = theta - factor * limit * model.diagonal * theta
        assert (float(theta.norm()) < 2) is stable


def test_largest_entry_of_the_iterate_is_not_the_eigenvalue() -> None:
    model, x, y = mlp(0)
    matrix = exact_hessian(model, x, y)
    v = torch.randn(len(matrix), generator=seeded(0), dtype=torch.double)
    for _ in range(500):
        v = matrix @ (v / v.norm())
    found = top_eigenvalue(model, x, y).eigenvalue
    assert found == pytest.approx(top(matrix), rel=1e-6)
    assert float(v.abs().max()) < 0.9 * found  # the mistake: H v = λ v, whose largest entry is λ · max |v_i|


def test_zero_hessian() -> None:
    found = top_eigenvalue(Saddle([0.0] * 4), torch.ones(2, dtype=torch.double), None, loss=mean)
    assert (found.eigenvalue, found.log10, found.converged) == (0.0, -math.inf, True)
    assert found.stable_learning_rate == math.inf


def test_history_shows_the_convergence() -> None:
    model, x, y = residual(0)
    seen: list[tuple[int, float]] = []
    found = top_eigenvalue(model, x, y, on_product=lambda k, value: seen.append((k, value)))
    assert [value for _, value in seen] == list(found.history)
    assert [k for k, _ in seen] == list(range(1, found.products + 1))
    assert found.history[-1] == found.eigenvalue
    errors = [abs(value - found.eigenvalue) for value in found.history]
    assert errors[-2] < 1e-3 * errors[0]
    short = top_eigenvalue(model, x, y, max_products=3)
    assert not short.converged
    assert short.history == found.history[:3]
    assert json.loads(json.dumps(found.to_json()))["products"] == found.products


def test_lanczos_needs_fewer_products_than_power() -> None:
    model, x, y = mlp(1)
    lanczos, power = (
        top_eigenvalue(model, x, y, algorithm=a, max_products=3000, tolerance=1e-6) for a in ("lanczos", "power")
    )
    assert 2 * lanczos.products < power.products


@pytest.mark.parametrize("algorithm", ["lanczos", "power"])
def test_diverging_product_ends_with_nan(algorithm: str) -> None:
    model, x, y = mlp(0)
    with torch.no_grad():
        model[0].weight.fill_(math.inf)
    found = top_eigenvalue(model, x, y, algorithm=algorithm)
    assert math.isnan(found.eigenvalue)
    assert math.isnan(found.log10)
    assert math.isnan(found.stable_learning_rate)
    assert (found.converged, found.products) == (False, 1)


def test_convolutional_eigenvalue_is_that_of_curvlinops() -> None:
    import curvlinops
    from scipy.sparse import linalg

    model, x, y = small_resnet()
    parameters = list(model.parameters())
    operator = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)])
    (expected,) = linalg.eigsh(operator.to_scipy(), k=1, which="LM", return_eigenvectors=False, tol=1e-8)
    found = top_eigenvalue(model, x, y, tolerance=1e-7, micro_batch=3)
    assert found.eigenvalue == pytest.approx(expected, rel=1e-8)
    single = top_eigenvalue(model.float(), x.float(), y)
    assert single.converged
    assert single.eigenvalue == pytest.approx(expected, rel=1e-3)


def test_chosen_parameters_are_a_block_of_the_hessian() -> None:
    model, x, y = mlp(0)
    block = exact_hessian(model, x, y)[-21:, -21:]  # the last layer's 18 weights and 3 biases
    assert top_eigenvalue(model, x, y, parameters=model[4].parameters()).eigenvalue == pytest.approx(top(block))
    for p in model[:4].parameters():
        p.requires_grad_(False)
    assert top_eigenvalue(model, x, y).eigenvalue == pytest.approx(top(block))


class Noisy(nn.Module):
    """Batch norm, dropout and attention, called by names: everything that could leave a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, *, x: Tensor, scale: float) -> dict[str, Tensor]:
        h = self.drop(self.norm(x))
        return {"logits": self.out(self.mix(h[None], h[None], h[None], need_weights=False)[0][0]) * scale}


def test_model_is_untouched_and_every_product_sees_the_same_noise() -> None:
    model = Noisy().double()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    inputs, y = {"x": torch.randn(6, 8, generator=seeded(0)).double(), "scale": 2.0}, torch.arange(6) % 3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, again = (top_eigenvalue(model, inputs, y, max_products=200, micro_batch=m) for m in (None, 6))
    assert first.converged
    assert first.eigenvalue == pytest.approx(again.eigenvalue)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_model_that_raises_is_untouched() -> None:
    model = Noisy()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        top_eigenvalue(model, {"x": torch.randn(6, 7), "scale": 1.0}, torch.arange(6) % 3, generator=seeded(0))
    assert int(model.norm.num_batches_tracked) == 0
    assert not torch.equal(torch.get_rng_state(), state)  # this test's own draw
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "powr"}, "expected algorithm"),
        ({"which": "smallest"}, "expected algorithm"),
        ({"algorithm": "power", "which": "largest"}, "use algorithm='lanczos'"),
        ({"max_products": 0}, "max_products"),
        ({"vectors": 2}, "vectors"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"parameters": []}, "require gradients"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    model, x, y = mlp(0)
    with pytest.raises(ValueError, match=message):
        top_eigenvalue(model, x, y, **settings)


def test_meta_model_is_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        top_eigenvalue(build("resnet20", device="meta"), torch.zeros(1, 3, 32, 32), torch.zeros(1).long())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_proposed_weight_norm_has_the_least_curvature() -> None:
    """`wninit` Table 2 at CPU scale: WRN-40-1, 64 seeded noise images."""
    x = torch.randn(64, 3, 32, 32, generator=seeded(0))
    y = torch.randint(10, (64,), generator=seeded(1))
    logs = {}
    for method in ("wn", "wn_default", "wn_data", "wn_hanin"):
        example = x if method == "wn_data" else None
        model = build("wrn-40-1", method, example=example, generator=seeded(0))
        found = top_eigenvalue(model, x, y, tolerance=1e-3, micro_batch=32)
        assert found.converged
        logs[method] = found.log10
    assert all(logs["wn"] <= logs[other] - 0.5 for other in logs if other != "wn"), logs


@pytest.mark.gpu
def test_gpu_gives_the_same_eigenvalue() -> None:
    model, x, y = small_resnet()
    expected = top_eigenvalue(model, x, y).eigenvalue
    assert top_eigenvalue(model.cuda(), x.cuda(), y.cuda()).eigenvalue == pytest.approx(expected, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_memory_is_bounded_by_vectors_and_one_micro_batch() -> None:
    model = build("wrn-40-10", "wn", generator=seeded(0)).cuda()
    x = torch.randn(256, 3, 32, 32, generator=seeded(0)).cuda()
    y = torch.randint(10, (256,), generator=seeded(1)).cuda()
    size = sum(p.numel() for p in model.parameters()) * 4
    top_eigenvalue(model, x[:32], y[:32], max_products=1)
    torch.cuda.reset_peak_memory_stats()
    top_eigenvalue(model, x[:32], y[:32], max_products=8, vectors=4)
    one = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    top_eigenvalue(model, x, y, max_products=8, vectors=4, micro_batch=32)
    assert torch.cuda.max_memory_allocated() <= one + 4 * size


def test_function_without_a_second_derivative_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardsigmoid(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="differentiated twice, got one with aten::hardsigmoid_backward"):
        top_eigenvalue(model, torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0]))
