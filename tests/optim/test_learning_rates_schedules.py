"""Schedules against torch's, or against closed forms."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from normfree.optim.learning_rates import Schedule

STEPS, EPOCHS = 7, 12
TOTAL = STEPS * EPOCHS


def ours(schedule: Schedule) -> list[float]:
    return [schedule.factor(step, STEPS, EPOCHS) for step in range(TOTAL)]


def torchs(make: Callable[[Any], Any], *, per_epoch: bool = False) -> list[float]:
    """The rates of a torch scheduler at base rate 1, read before every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for step in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not per_epoch or (step + 1) % STEPS == 0:
            scheduler.step()
    return rates


def test_constant_is_one() -> None:
    assert ours(Schedule()) == [1.0] * TOTAL


def test_step_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.MultiStepLR(o, [6, 9], 0.1), per_epoch=True)
    assert ours(Schedule(kind="step", milestones=(0.5, 0.75), decay=0.1)) == pytest.approx(expected)


def test_cosine_by_step_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL))
    assert ours(Schedule(kind="cosine")) == pytest.approx(expected, abs=1e-12)


def test_cosine_by_epoch_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS), per_epoch=True)
    assert ours(Schedule(kind="cosine", by="epoch")) == pytest.approx(expected, abs=1e-12)
    assert ours(Schedule(kind="cosine", by="step")) != pytest.approx(expected, abs=1e-3)


def test_linear_equals_torchs() -> None:
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, TOTAL))
    assert ours(Schedule(kind="linear")) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [{"warmup": 2}, {"warmup": 14, "warmup_in": "steps"}])
def test_linear_warmup_equals_torchs(warmup: dict[str, Any]) -> None:
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1 / 14, 1.0, 13))
    assert ours(Schedule(**warmup)) == pytest.approx(expected)


def test_cosine_after_warmup_equals_torchs_sequence() -> None:
    expected = torchs(
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 1 / 14, 1.0, 13), lr_scheduler.CosineAnnealingLR(o, TOTAL - 14)],
            milestones=[14],
        )
    )
    assert ours(Schedule(kind="cosine", warmup=2)) == pytest.approx(expected, abs=1e-12)


def test_quadratic_warmup_is_the_square_of_the_linear_one() -> None:
    linear, quadratic = ours(Schedule(warmup=3)), ours(Schedule(warmup=3, warmup_shape="quadratic"))
    assert quadratic == pytest.approx([rate**2 for rate in linear])
    assert quadratic[:2] == pytest.approx([1 / 441, 4 / 441])


@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_inverse_sqrt_has_its_closed_form(warmup: int) -> None:
    w = max(warmup, 1)
    expected = [min((t + 1) / w, math.sqrt(w / (t + 1))) for t in range(TOTAL)]
    assert ours(Schedule(kind="inverse_sqrt", warmup=warmup, warmup_in="steps")) == pytest.approx(expected)


def test_milestones_of_odd_runs_fall_on_the_first_step_of_an_epoch() -> None:
    schedule = Schedule(kind="step", milestones=(91 / 182, 136 / 182))
    for steps in (352, 1, 391):
        assert schedule.factor(136 * steps - 1, steps, 182) == pytest.approx(0.1)
        assert schedule.factor(136 * steps, steps, 182) == pytest.approx(0.01)
        assert schedule.factor(91 * steps - 1, steps, 182) == 1.0
        assert schedule.factor(91 * steps, steps, 182) == pytest.approx(0.1)


def test_warmup_leaves_milestones_where_they_are() -> None:
    plain, warmed = (ours(Schedule(kind="step", warmup=w)) for w in (0, 2))
    assert warmed[2 * STEPS :] == plain[2 * STEPS :]


schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["constant", "step", "cosine", "inverse_sqrt", "linear"]),
    milestones=st.lists(st.floats(0, 1), max_size=4).map(lambda m: tuple(sorted(m))),
    decay=st.floats(0.01, 1),
    by=st.sampled_from(["step", "epoch"]),
    warmup=st.floats(0, 20),
    warmup_shape=st.sampled_from(["linear", "quadratic"]),
)


@given(schedules, st.integers(1, 50), st.floats(0, 20), st.integers(0, 2000))
def test_factor_stays_between_zero_and_one(schedule: Schedule, steps: int, epochs: float, step: int) -> None:
    assert 0 <= schedule.factor(step, steps, epochs) <= 1


@given(schedules, st.integers(1, 50), st.integers(1, 20))
def test_factor_never_rises_after_the_warmup(schedule: Schedule, steps: int, epochs: int) -> None:
    warmup = round(schedule.warmup * steps)
    rates = [schedule.factor(step, steps, epochs) for step in range(warmup, warmup + 60)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rates))


def test_decay_reaches_zero_at_the_end_and_stays() -> None:
    for kind in ("cosine", "linear"):
        schedule = Schedule(kind=kind)
        assert schedule.factor(TOTAL, STEPS, EPOCHS) == pytest.approx(0, abs=1e-12)
        assert schedule.factor(10 * TOTAL, STEPS, EPOCHS) == pytest.approx(0, abs=1e-12)


def test_run_of_zero_epochs_has_a_factor() -> None:
    assert [Schedule(kind=k).factor(0, 5, 0) for k in ("constant", "cosine", "linear")] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "cosin"}, r"expected one of constant, step, .* for 'kind' of a schedule, got 'cosin'"),
        ({"by": "week"}, r"expected one of step, epoch for 'by' of a schedule, got 'week'"),
        ({"warmup_shape": "cubic"}, r"expected one of linear, quadratic for 'warmup_shape'"),
        ({"milestones": (0.5, 1.5)}, r"expected milestones as rising fractions of the run between 0 and 1"),
        ({"milestones": (0.75, 0.5)}, r"expected milestones as rising fractions"),
        ({"milestones": (-1,)}, r"expected milestones as rising fractions of the run between 0 and 1"),
        ({"decay": 0.0}, r"expected a decay above 0 and at most 1"),
        ({"warmup": -1.0}, r"expected a warm-up of at least 0 epochs, got -1"),
        ({"warmup": math.nan}, r"expected a warm-up of at least 0 epochs, got nan"),
    ],
)
def test_bad_schedule_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Schedule(**settings)


@pytest.mark.parametrize("run", [(-1, 5, 2), (0, 0, 2), (0, 5, -1)])
def test_bad_run_is_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected a step of at least 0"):
        Schedule().factor(*run)
