"""The intervals against printed tables and against their own coverage in simulations."""

import math
import random
import statistics
from collections.abc import Callable

import pytest

from normfree_papers.claims.intervals import Interval, mean_interval, share_interval, t_quantile

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 19: 2.093, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "printed"), TABLE.items())
def test_t_quantile_is_that_of_the_tables(degrees: int, printed: float) -> None:
    assert round(t_quantile(degrees), 3) == printed


def test_t_quantile_has_the_closed_forms_of_one_and_two_degrees() -> None:
    for level in (0.5, 0.9, 0.95, 0.99):
        assert t_quantile(1, level) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-12)
        assert t_quantile(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-12)
    normal = statistics.NormalDist().inv_cdf(0.975)
    assert t_quantile(100_001) == pytest.approx(normal, rel=2e-5)


@pytest.mark.parametrize(("degrees", "level"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_t_quantile_refuses_what_it_has_not(degrees: int, level: float) -> None:
    with pytest.raises(ValueError, match="expected degrees >= 1"):
        t_quantile(degrees, level)


def normal_interval(values: list[float]) -> Interval:
    """The control: the quantile of the normal distribution, which is too small for few seeds."""
    mean, half = statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def coverage(interval: Callable[[list[float]], Interval | None], count: int, trials: int = 4000) -> float:
    """The share of samples from a normal distribution whose interval holds its mean."""
    draw = random.Random(count)
    hits = 0
    for _ in range(trials):
        found = interval([draw.gauss(3.0, 2.0) for _ in range(count)])
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    return hits / trials


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_mean_interval_covers_the_mean_in_95_of_100_samples(count: int) -> None:
    error = 4 * math.sqrt(0.95 * 0.05 / 4000)  # four standard deviations of the share that is counted
    assert abs(coverage(mean_interval, count) - 0.95) < error
    if count <= 5:
        assert coverage(normal_interval, count) < 0.95 - error  # the wrong quantile shows


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_share_interval_covers_every_share_in_at_least_95_of_100_samples(count: int, share: float) -> None:
    def chance(yes: int) -> float:
        return math.comb(count, yes) * share**yes * (1 - share) ** (count - yes)

    covered = 0.0
    for yes in range(count + 1):
        found = share_interval([1] * yes + [0] * (count - yes))
        covered += chance(yes) * (found.low <= share <= found.high)
    assert covered >= 0.95


def test_share_interval_has_the_closed_forms_of_all_and_none() -> None:
    for count in (1, 3, 20):
        every, none = share_interval([1] * count), share_interval([0] * count)
        assert (every.high, none.low) == (1.0, 0.0)
        assert every.low == pytest.approx(0.025 ** (1 / count), rel=1e-9)
        assert none.high == pytest.approx(1 - 0.025 ** (1 / count), rel=1e-9)
    found = share_interval([0, 1, 0, 0, 0])  # printed limits of one in five: 0.5 % and 71.6 %
    assert (round(found.low, 3), round(found.high, 3)) == (0.005, 0.716)


@pytest.mark.parametrize("outcomes", [[], [0.5, 1.0], [math.nan]])
def test_share_interval_refuses_other_values(outcomes: list[float]) -> None:
    with pytest.raises(ValueError, match="expected outcomes of 0 and 1"):
        share_interval(outcomes)


def test_mean_interval_of_one_value_or_of_none_that_is_finite_is_none() -> None:
    for values in ([1.0], [1.0, math.nan], [1.0, math.inf]):
        assert mean_interval(values) is None
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0)
