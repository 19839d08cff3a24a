"""Numbers, durations and lists of names as text."""

from normfree.report.formatting import duration, percent, shorten_names


def test_duration_has_the_two_largest_units() -> None:
    assert [duration(s) for s in (0.4, 59.6, 61, 3599, 7260)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 1 min",
    ]


def test_percent_writes_spread_and_digits() -> None:
    assert percent(0.8351, 0.0123) == "83.5 ± 1.2 %"
    assert percent(0.8351, digits=2) == "83.51 %"
    assert percent(None) == ""


def test_first_names_counts_the_rest() -> None:
    assert shorten_names(["a", "b", "c"]) == "a, b, c"
    assert shorten_names(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert shorten_names(["a", "b", "c"], limit=1) == "a and 2 more"
