"""The suggested rate: against closed forms, on models that diverge at batch norm's rate, and without a trace."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.data import load
from normfree.models.third_party import create_model
from normfree.optim.rate_search import find_lr
from normfree.plan import remembered_plan

CURVATURES = (4.0, 1.0, 0.25)  # of the quadratic loss


class Quadratic(nn.Module):
    """½ Σ λ_i w_i², of which gradient descent diverges above 2/max λ."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(CURVATURES)))

    def forward(self, scale: Tensor) -> Tensor:
        return scale.mean() * (self.weight**2 * torch.tensor(CURVATURES)).sum() / 2


def value(output: Tensor, target: Any) -> Tensor:
    return output


def descend(rate: float, momentum: float, steps: int = 400) -> float:
    """The loss after plain steps, without the library."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(1))
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bound_of_a_quadratic_is_known(momentum: float) -> None:
    exact = 2 * (1 + momentum) / max(CURVATURES)
    found = find_lr(Quadratic(), [(torch.ones(1), None)], value, momentum=momentum, steps=200, runs=1)
    assert found.bounds == pytest.approx((exact,), rel=1e-4)
    assert descend(0.97 * exact, momentum) < 1e-3
    assert not descend(1.03 * exact, momentum) < 1e3  # which is true for NaN too
    assert found.interval[0] <= found.suggestion <= found.interval[1]
    assert exact / 30 < found.suggestion < exact
    assert exact < found.diverged[0] < math.inf  # later than the bound, because the loss has become small before
    assert max(found.after) < found.before == pytest.approx(sum(CURVATURES) / 2)


def test_groups_keep_the_rates_of_their_method() -> None:
    model = nf.build("resmlp-3-8", "fixup", num_classes=3)
    seen: list[list[float]] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups)
        optimizer.register_step_pre_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
        return optimizer

    batches = [
        (torch.randn(6, 3, 28, 28, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(2)
    ]
    find_lr(model, batches, optimizer=make, steps=20, runs=1, check=2)
    assert seen
    assert all(two == pytest.approx(0.1 * one) for one, two in seen)


class Noisy(nn.Module):
    """Batch norm, whose statistics a pass changes, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.out = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


def noisy_batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [((x := torch.randn(12, 4, generator=draw)), (x[:, 0] > 0).long()) for _ in range(count)]


def test_nothing_changes() -> None:
    torch.manual_seed(0)
    model = Noisy().eval()
    model.norm.train()
    model.first.weight.grad = torch.ones(8, 4)
    held = {name: t.clone() for name, t in model.state_dict().items()}
    grad, state = model.first.weight.grad, torch.get_rng_state()
    one = find_lr(model, noisy_batches(), steps=20, runs=2, check=5)
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model.modules()] == [False, False, True, False, False]
    assert model.first.weight.grad is grad
    assert model.out.weight.grad is None
    assert torch.equal(grad, torch.ones(8, 4))
    assert all(torch.equal(t, held[name]) for name, t in model.state_dict().items())
    assert find_lr(model, noisy_batches(), steps=20, runs=2, check=5) == one


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_whatever_the_mode_of_the_caller(mode: Any) -> None:
    torch.manual_seed(0)
    model = Noisy()
    batches = noisy_batches()
    expected = find_lr(model, batches, steps=20, runs=2, check=5)
    with mode():
        assert find_lr(model, batches, steps=20, runs=2, check=5) == expected
        assert not torch.is_grad_enabled()


def test_model_is_restored_after_an_error() -> None:
    model = Noisy()
    held = {name: t.clone() for name, t in model.state_dict().items()}
    batches = [*noisy_batches(1), (torch.randn(12, 4), torch.full((12,), 7))]  # a label that does not exist
    with pytest.raises(ValueError, match="got numbers from 7 to 7"):
        find_lr(model, batches, steps=20)
    assert all(torch.equal(t, held[name]) for name, t in model.state_dict().items())


class WithLoss(Noisy):
    """Returns its own loss with labels, as transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": 2 * F.cross_entropy(logits, labels), "logits": logits}


def test_mapping_uses_the_models_own_loss() -> None:
    torch.manual_seed(0)
    model = WithLoss()
    batches = [{"x": x, "labels": y} for x, y in noisy_batches()]
    found = find_lr(model, batches, steps=20, runs=1, check=5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = sum(float(model(**batch)["loss"].detach()) for batch in batches) / len(batches)
    assert found.before == pytest.approx(expected, rel=0.2)  # dropout and running statistics differ
    assert len(found.bounds) == 1


@pytest.mark.parametrize(
    ("batches", "settings", "message"),
    [
        ([], {}, "expected at least one batch, got none"),
        ([(torch.randn(4, 4), None)], {}, "got neither; pass a list of pairs"),
        ([3], {}, "expected batches of .inputs, targets. or mappings .* got int"),
        (noisy_batches(1), {"low": 1.0, "high": 0.1}, "expected 0 < low < high"),
        (noisy_batches(1), {"optimizer": "lion"}, "expected optimizer to be sgd, adam, adamw or a function"),
        (noisy_batches(1), {"steps": 3}, "at least 10 steps"),
        (noisy_batches(1), {"momentum": 2.0}, "expected a momentum of at least 0 and below 1, got 2"),
        (noisy_batches(1), {"momentum": -0.1}, "expected a momentum of at least 0 and below 1, got -0.1"),
        (noisy_batches(1), {"momentum": math.nan}, "expected a momentum of at least 0 and below 1, got nan"),
    ],
)
def test_bad_input_is_one_sentence(batches: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_lr(Noisy(), batches, **settings)


def test_loss_that_no_rate_lowers_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="expected a loss that falls at some rate"):
        find_lr(model, [(torch.randn(4, 2), None)], lambda o, _: o.sum() * 0 + 1.0, steps=20, runs=1)


def test_result_is_shown_and_drawn(tmp_path: Path) -> None:
    found = find_lr(Quadratic(), [(torch.ones(1), None)], value, momentum=0.0, steps=40, runs=2)
    assert repr(found).startswith("RateSearch(")
    assert len(repr(found)) < 80
    rate = f"learning rate {found.suggestion:.3g} for sgd without momentum"
    assert f"{rate}: 20 steps at this rate lowered the loss from 2.62 " in str(found)
    assert "The curvature at the start allows rates up to 0.5." in str(found)
    assert "from 2 orders of the batches." in str(found)
    assert f"<b>{rate}</b>" in found._repr_html_()
    assert found.save(tmp_path / "rate.svg").read_text(encoding="utf-8").count("suggested rate") >= 1
    assert set(found.to_json()) >= {"suggestion", "interval", "bounds", "losses"}


# Models that diverge at batch norm's rate


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A segmentation U-Net of residual units, with ten classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 2, stride=2) for i in range(2))
        self.encode = nn.ModuleList(Unit(width * 2**i) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 1) for i in range(2))
        self.merge = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 1) for i in range(2))
        self.decode = nn.ModuleList(Unit(width * 2**i) for i in range(2))
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode[0](self.stem(x))
        skips = []
        for down, unit in zip(self.down, self.encode[1:], strict=True):
            skips.append(x)
            x = unit(down(x))
        for i in (1, 0):
            x = self.decode[i](self.merge[i](torch.cat([F.interpolate(self.up[i](x), scale_factor=2), skips[i]], 1)))
        return self.head(x)  # type: ignore[no-any-return]


def images(size: int, *, dense: bool, count: int = 6, batch: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of clothes with their labels; dense labels are the class on the garment and 0 elsewhere."""
    split = load("fashion14").train
    pixels = split.images.float()
    pixels = (pixels - pixels.mean()) / pixels.std()
    found = []
    for i in torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[: count * batch].split(batch):
        x = F.interpolate(pixels[i], size=(size, size), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
        y = split.labels[i].long()
        found.append((x, (x[:, 0] > 0).long() * y.view(-1, 1, 1) if dense else y))
    return found


GROUP_NORM = "timm:poolformer_s12"  # diverges at 0.1 before conversion, too
DIVERGING = {  # rates at which the models with batch norm train
    GROUP_NORM: 0.1,
    "timm:edgenext_xx_small": 0.1,
    "timm:ghostnet_050": 0.1,
    "timm:mnasnet_small": 0.3,
    "timm:mobilevit_xxs": 0.1,
    "U-Net": 0.3,
}


def trains(model: nn.Module, batches: list[tuple[Tensor, Tensor]], rate: float, steps: int = 20) -> tuple[float, float]:
    """The mean loss over the batches before and after plain steps, without the library's own loop."""

    def mean() -> float:
        with torch.no_grad():
            return sum(float(F.cross_entropy(model(x), y)) for x, y in batches) / len(batches)

    model.train()
    before = mean()
    groups = model.parameters() if remembered_plan(model) is None else nf.param_groups(model, lr=rate)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return before, mean()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["fixup", "nf"])
@pytest.mark.parametrize("name", DIVERGING)
def test_suggested_rate_trains_what_batch_norms_rate_does_not(name: str, method: str) -> None:
    dense = name == "U-Net"
    batches = images(32 if dense else 64, dense=dense)
    torch.manual_seed(0)
    model = UNet() if dense else create_model(name, classes=10)
    converted, _ = nf.convert(model, method, batches[0][0], generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(converted)
    found = find_lr(converted, batches, steps=60, runs=2, curvature=False)
    before, after = trains(converted, batches, found.suggestion)
    assert math.isfinite(after)
    assert after < before
    before, after = trains(other, batches, DIVERGING[name])
    assert not after < before


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIVERGING.keys() - {GROUP_NORM}))
def test_batch_norms_rate_trains_batch_norm(name: str) -> None:
    dense = name == "U-Net"
    torch.manual_seed(0)
    model = UNet() if dense else create_model(name, classes=10)
    before, after = trains(model, images(32 if dense else 64, dense=dense), DIVERGING[name])
    assert after < before
