"""A monitor inside a training run: it sees, and changes nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.monitor import Monitor
from normfree.models import build


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layer = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer(self.norm(x).relu()))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Batch norm, whose statistics a pass changes, and dropout, which draws random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """A residual network without normalization, which a large step breaks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(12))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + 0.3 * branch(x.relu())
        return self.out(x)  # type: ignore[no-any-return]


def made(factory: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def train(
    model: nn.Module, monitor: Monitor | None, steps: int = 12, *, between: bool = False, rates: Any = lambda step: 0.05
) -> list[Tensor]:
    """A run of SGD with momentum; the monitor may also look between backward pass and step."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates(step)
        x = torch.randn(16, 4, generator=generator)
        y = (x[:, 0] > 0).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if monitor and between:
            monitor.step(x, y)
        loss.backward()
        optimizer.step()
        if monitor and not between:
            monitor.step(x, y)
    return [t.detach().clone() for t in model.state_dict().values()]


@pytest.fixture(autouse=True)
def _random_state_is_restored() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("between", [False, True], ids=["after the step", "between forward and backward"])
@pytest.mark.parametrize("every", [1, 5])
def test_run_is_bit_identical_with_a_monitor(every: int, between: bool) -> None:
    plain = train(made(Net), None)
    model = made(Net)
    monitor = Monitor(model, every=every)
    watched = train(model, monitor, between=between)
    assert len(monitor.moments) == math.ceil(12 / every)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_run_differs_with_a_pass_of_its_own() -> None:
    """The control: a plain forward pass in between changes dropout and running statistics."""

    class Careless(Monitor):
        def step(self, inputs: Any, targets: Any = None) -> None:
            self.model(inputs)

    model = made(Net)
    watched = train(model, Careless(model))
    assert not all(torch.equal(a, b) for a, b in zip(train(made(Net), None), watched, strict=True))


def test_first_and_every_nth_step_are_measured() -> None:
    model = made(Net)
    monitor = Monitor(model, every=4)
    x, y = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    taken = [monitor.step(x, y) is not None for _ in range(10)]
    assert taken == [True, False, False, False, True, False, False, False, True, False]
    assert [m.step for m in monitor.moments] == [0, 4, 8]
    assert all(len(m.forward) == len(m.backward) == 4 and m.loss > 0 for m in monitor.moments)


def test_measuring_by_hand_does_not_count() -> None:
    monitor = Monitor(made(Net), every=4)
    assert monitor.measure(torch.randn(8, 4)).step == 0
    for _ in range(3):
        monitor.step(torch.randn(8, 4))
    assert monitor.measure(torch.randn(8, 4)).step == 2
    assert [m.step for m in monitor.moments] == [0, 0, 2]


@pytest.mark.parametrize("every", [0, -1])
def test_every_below_one_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match=f"expected every to be at least 1 step, got {every}"):
        Monitor(made(Net), every=every)


def strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_moments_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    monitor = Monitor(made(Net), every=1, path=path)
    for count in range(1, 4):
        moment = monitor.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        assert moment is not None
        records = [strict(line) for line in path.read_text().splitlines()]
        assert len(records) == count
        assert records[-1] == {
            "step": count - 1,
            "loss": moment.loss,
            "status": moment.verdict.status,
            "sentence": moment.verdict.sentence,
            "forward": list(moment.forward),
            "backward": list(moment.backward),
        }


def test_lines_are_json_also_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    monitor = Monitor(made(Net), path=path)
    monitor.measure(torch.randn(8, 4))  # without targets the loss is NaN
    monitor.measure(torch.full((8, 4), math.inf), torch.zeros(8, dtype=torch.long))
    first, second = (strict(line) for line in path.read_text().splitlines())
    assert first["loss"] == "nan"
    assert second["status"] == "faulty"  # the input is not finite
    assert set(second["forward"]) == {"nan"}


def test_moment_of_the_explosion_is_found(tmp_path: Path) -> None:
    """The learning rate is set too high at step 6; step 5 is the last good one."""

    def rates(step: int) -> float:
        return 0.01 if step < 6 else 1e3

    model = made(Plain)
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    train(model, monitor, rates=rates)
    found = monitor.first("exploding")
    assert found is not None
    assert found.step == 6
    assert [m.verdict.status for m in monitor.moments[:6]] == ["preserved"] * 6
    assert not any(math.isfinite(value) for value in monitor.moments[-1].forward)  # the end of the run is NaN
    monitor.save(tmp_path / "run.png")
    control = made(Plain)
    healthy = Monitor(control, every=1)
    train(control, healthy, rates=lambda step: 0.01)
    assert healthy.first("exploding") is None


@pytest.mark.parametrize("count", [1, 2, 7, 8, 14, 50])
def test_picture_shows_first_and_last_moment(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import normfree.diagnostics.monitor as room

    monitor = Monitor(made(Net), every=1)
    moment = monitor.measure(torch.randn(8, 4))
    monitor.moments = [type(moment)(**{**vars(moment), "step": step}) for step in range(count)]
    drawn: list[Any] = []
    monkeypatch.setattr(room, "write_plot", lambda panels, *_args, **_options: drawn.extend(panels))
    monitor.save(tmp_path / "signal.png")
    for panel in drawn:
        names = [curve.name for curve in panel.curves]
        assert (names[0], names[-1]) == ("step 0", f"step {count - 1}")
        assert len(names) == min(count, 7)


def test_picture_is_written(tmp_path: Path) -> None:
    monitor = Monitor(made(Net), every=1)
    with pytest.raises(ValueError, match="expected at least one measurement"):
        monitor.save(tmp_path / "none.png")
    monitor.measure(torch.randn(8, 4))
    monitor.measure(torch.randn(8, 4))  # twice at one step: the later counts
    monitor.save(tmp_path / "signal.png")
    assert (tmp_path / "signal.png").read_bytes().startswith(b"\x89PNG")


def test_plan_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import normfree.diagnostics.propagation as room

    asked = 0
    discover = room.discover

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        return discover(*args, **kwargs)

    monkeypatch.setattr(room, "discover", count)
    monitor = Monitor(made(Net), every=1)
    for _ in range(3):
        monitor.step({"x": torch.randn(8, 4)})
    assert asked == 1


def test_method_of_the_model_is_not_recommended_to_it() -> None:
    model, x = build("resmlp-12-16", "fixup", in_channels=1), torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "branch" in name and parameter.dim() > 1:
                parameter.normal_()
    verdict = Monitor(model).measure(x).verdict
    assert verdict.status == "exploding"
    assert verdict.recommendation == diagnose(model, x).verdict.recommendation
    assert verdict.recommendation.startswith("it has 'fixup' already")


def test_own_model_and_loss_are_accepted() -> None:
    model = build("resmlp-4-8", "fixup", generator=torch.Generator().manual_seed(0))
    monitor = Monitor(model, every=1, loss=lambda out, wanted: (out - wanted).square().mean())
    moment = monitor.step(torch.randn(8, 3, 28, 28), torch.ones(8, 10))
    assert moment is not None
    assert moment.loss == pytest.approx(1.0)  # the classifier is zero


class Writer:
    """What TensorBoard's `SummaryWriter` is to a monitor."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))


def test_monitor_logs_to_a_function_and_to_a_writer() -> None:
    x, y = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    calls: list[tuple[dict[str, float], int]] = []
    writer = Writer()
    model = made(Net)
    one = Monitor(model, every=2, log=lambda numbers, step: calls.append((numbers, step)))
    two = Monitor(model, every=2, log=writer)
    for _ in range(3):
        one.step(x, y)
        two.step(x, y)
    assert [step for _, step in calls] == [0, 2]
    assert calls[0][0] == one.moments[0].scalars()
    assert set(calls[0][0]) >= {"signal/loss", "signal/forward_per_block", "signal/backward_in_all"}
    assert writer.seen == [(name, value, step) for numbers, step in calls for name, value in numbers.items()]
