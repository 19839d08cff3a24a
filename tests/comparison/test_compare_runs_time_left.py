"""The estimate of the time left: from the runs that ended, shared by those in progress."""

import pytest

from normfree.comparison.compare_runs import TimeLeft

RUNS = [("deep", 40), ("deep", 40), ("deep", 40), ("flat", 10), ("flat", 10)]


def test_runs_of_a_model_take_as_long_as_those_that_ended() -> None:
    now = 0.0
    left = TimeLeft(RUNS, clock=lambda: now)
    assert left.text == ""
    left.see({0: "10 %"})
    now = 80.0
    left.end(0, 80.0)
    # Two runs of 80 s, and two of a quarter of the depth.
    assert left.seconds == pytest.approx(2 * 80 + 2 * 20)
    left.see({1: "0 %"})
    now = 90.0
    left.see({1: "10 %"})
    assert left.seconds == pytest.approx(70 + 80 + 2 * 20)
    left.end(1, 100.0)
    assert left.seconds == pytest.approx(90 + 2 * 90 / 4)


def test_runs_in_progress_share_the_rest() -> None:
    now = 0.0
    left = TimeLeft([("deep", 40)] * 9, clock=lambda: now)
    left.end(0, 60.0)
    left.see({1: "", 2: "", 3: "", 4: ""})
    assert left.seconds == pytest.approx(8 * 60 / 4)
    for number in range(1, 8):
        left.end(number, 60.0)
    left.see({8: ""})
    now = 50.0
    assert left.text == "about 10 s left"
    now = 100.0  # longer than the others
    assert left.text == ""
    left.end(8, 100.0)
    assert left.text == ""


def test_no_estimate_is_shorter_than_the_longest_run() -> None:
    left = TimeLeft([("flat", 1), ("deep", 100), ("flat", 1)], clock=lambda: 0.0)
    left.end(0, 1.0)
    left.see({1: "", 2: ""})
    assert left.seconds == pytest.approx(100.0)


def test_speed_of_runs_in_progress_tells_the_time_before_any_ends() -> None:
    now = 0.0
    left = TimeLeft(RUNS, clock=lambda: now)
    left.see({0: "40%, loss 1", 1: "0%, loss 2"})  # the first one continues an earlier process
    now = 10.0
    left.see({0: "44%, loss 1", 1: "4%, loss 2"})
    assert left.seconds is None
    now = 20.0
    left.see({0: "50%, loss 1", 1: "20%, loss 2"})
    whole = {0: 20 / 0.1, 1: 20 / 0.2}
    deep = (whole[0] + whole[1]) / 2
    per_layer = deep / 40
    assert left.seconds == pytest.approx((whole[0] * 0.5 + whole[1] * 0.8 + deep + 2 * 10 * per_layer) / 2)
    left.end(1, 100.0)
    assert left.seconds == pytest.approx(whole[0] * 0.5 + deep + 2 * 10 * per_layer)
