"""Every method on every small model that admits it: all parameters learn, and the seed alone sets the weights."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.methods import get, initialize_, names
from normfree.models import Network, build
from normfree.models.builder import find_family

VARIANTS = (
    "fixup:bias=false",
    "fixup:scale=0.1,bias=false",
    "fixup:scale=10,bias=false",
    "fixup:branches=false",
    "fixup:scalar_lr=1/L",
    "convshort:reads=raw",
    "convshort:reads=raw,gain=1",
    "isograd:shortcut=conv",
    "hanin:r=0.5",
    "nf:beta=1",
    "selu:dropout=0.05",
    "small_branch:beta=0.1",
)
MODELS = ("resnet8", "wrn-10-1", "resmlp-3-16", "mlp-4-16", "cnn-4-8", "dense-7-6", "highway-4-16")
CLASSES = 5
RATES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-6)


def admitted(method: str, model: str) -> bool:
    record, family = get(method), find_family(model)[0]
    return family.skip in record.skips and (family.spatial or not record.spatial_only)


CASES = [(method, model) for method in (*names(), *VARIANTS) for model in MODELS if admitted(method, model)]
every_case = pytest.mark.parametrize(("method", "model"), CASES)


@cache
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(7)), torch.arange(8) % CLASSES


def built(method: str, model: str, seed: int = 0, **options: Any) -> Network:
    generator = torch.Generator().manual_seed(seed)
    return build(model, method, num_classes=CLASSES, example=batch()[0], generator=generator, **options)


def loss_of(model: nn.Module) -> Tensor:
    """The training loss on the batch; dropout, where there is any, drops the same units every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = batch()
        return F.cross_entropy(model(x), y)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model), list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, found, strict=True)}


@torch.no_grad()
def step_(model: nn.Module, by: dict[str, Tensor], lr: float) -> None:
    for name, parameter in model.named_parameters():
        parameter.add_(by[name], alpha=-lr)


def lowering_rates(model: nn.Module, rates: tuple[float, ...] = RATES) -> list[float]:
    """The learning rates of which one step of gradient descent lowers the loss."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = loss_of(model).item()
    model.load_state_dict(state)  # running statistics are part of the state
    by = gradients(model)
    found = []
    for lr in rates:
        model.load_state_dict(state)
        step_(model, by, lr)
        after = loss_of(model).item()
        if after < before:
            found.append(lr)
    model.load_state_dict(state)
    return found


def silent(model: nn.Module, passes: int = 3, lr: float = 0.01) -> set[str]:
    """The parameters whose gradient is exactly zero in each of the first backward passes, with a step between."""
    left = {name for name, _ in model.named_parameters()}
    for _ in range(passes):
        by = gradients(model)
        left = {name for name in left if not by[name].any()}
        # Unit steps, because a rate that suits one method blows up another.
        length = torch.stack([g.norm() for g in by.values()]).norm()
        step_(model, by, (lr / length).item())
    return left


@every_case
def test_some_learning_rate_lowers_the_loss_in_one_step(method: str, model: str) -> None:
    network = built(method, model)
    assert loss_of(network).isfinite()
    assert lowering_rates(network)


@every_case
def test_every_parameter_has_a_gradient_in_three_passes(method: str, model: str) -> None:
    assert not silent(built(method, model))


@every_case
def test_weights_come_from_the_seed_alone(method: str, model: str) -> None:
    first = built(method, model).state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)  # another state of the global generator
        again, other = built(method, model).state_dict(), built(method, model, seed=1).state_dict()
    assert differing(first, again) == set()
    weights = {name for name, tensor in first.items() if tensor.dim() >= 2 and tensor.unique().numel() > 1}
    assert weights
    assert weights <= differing(first, other)


@every_case
def test_nothing_global_is_touched(method: str, model: str) -> None:
    def use() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        network = built(method, model)
        initialize_(network, method, example=batch()[0], generator=generator)
        # Dropout in training mode draws from the global generator, as torch's own does.
        return network.train("dropout" not in method)(batch()[0])

    before = globals_of_torch()
    logits = use()
    assert globals_of_torch() == before
    assert logits.shape == (8, CLASSES)
    assert logits.isfinite().all()


@every_case
def test_meta_device_gives_the_same_shapes(method: str, model: str) -> None:
    shadow = build(model, method, num_classes=CLASSES, size=16, device="meta")
    assert all(tensor.is_meta for tensor in shadow.state_dict().values())
    shapes = {name: tensor.shape for name, tensor in shadow.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in built(method, model).state_dict().items()}
    assert shadow(batch()[0].to("meta")).shape == (8, CLASSES)


@pytest.mark.parametrize("method", [name for name in names() if "residual" in get(name).skips])
def test_preactivation_resnet_builds_on_the_meta_device(method: str) -> None:
    shadow = build("preact_resnet18", method, device="meta")
    assert shadow(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    """The names of the tensors that are not the same in every bit."""
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


def globals_of_torch() -> dict[str, object]:
    """Everything of the process that a library could change behind the caller's back."""
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "python generator": random.getstate(),
        "numpy generator": [np.asarray(part).tolist() for part in np.random.get_state(legacy=True)],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")),
    }


# Controls: each property fails where it should.


def test_no_rate_lowers_the_loss_of_a_step_uphill() -> None:
    network = built("he_in", "resnet8")
    assert lowering_rates(network, (1e-3, 1e-4))
    assert not lowering_rates(network, (-1e-3, -1e-4))


def test_zero_layers_around_an_activation_stay_silent() -> None:
    """Zero weight → ReLU → zero weight is dead; one zero weight, as in Fixup, is not."""
    network = built("fixup:bias=false", "resnet8")
    branch = network.body[0][0].branch
    assert not branch.conv2.weight.any()
    assert silent(network, passes=1) >= {f"body.0.0.branch.conv{i}.weight" for i in (1, 2)}
    network = built("fixup:bias=false", "resnet8")
    nn.init.zeros_(network.body[0][0].branch.conv1.weight)
    assert silent(network, passes=6) == {f"body.0.0.branch.conv{i}.weight" for i in (1, 2)} | {"body.0.0.beta.value"}


def test_bias_before_batch_norm_would_stay_silent() -> None:
    """Batch norm subtracts the mean, so a bias before it gets no gradient; this is why such layers have none."""
    network = built("batchnorm", "cnn-4-8")
    network.stem.conv.bias = nn.Parameter(torch.zeros(8))
    gradient = gradients(network)
    assert gradient["stem.conv.bias"].abs().max() < 1e-5 * gradient["stem.conv.weight"].abs().max()
    assert all(m.bias is None for m in built("batchnorm", "resnet8").modules() if isinstance(m, nn.Conv2d))


def test_weights_without_a_generator_come_from_the_global_one() -> None:
    def weights() -> dict[str, Tensor]:
        return build("resnet8", "he_in").state_dict()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = weights(), weights()
        torch.manual_seed(3)
        assert not differing(first, weights())
    assert differing(first, second)


@pytest.mark.parametrize(
    ("change", "restore"),
    [
        (lambda: torch.rand(1), lambda: None),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
        (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: random.random(), lambda: None),
    ],
    ids=["generator", "dtype", "device", "grad", "deterministic", "python"],
)
def test_snapshot_sees_a_change(change: Callable[[], object], restore: Callable[[], object]) -> None:
    before = globals_of_torch()
    try:
        change()
        assert globals_of_torch() != before
    finally:
        restore()
