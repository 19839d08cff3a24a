"""The tables of `make faults` take the place of those in the page, and nothing else changes."""

import pytest

from fault_tables import PAGE, Counts, put

COUNTS: Counts = {"processes": {"rows": [(["saving", "killed"], {"whole": 3, "lost": 1})], "seconds": 90}}


def test_table_takes_the_place_of_the_earlier_one() -> None:
    page = put("before\n<!-- faults: processes -->\nearlier\n<!-- end -->\nafter\n", COUNTS)
    assert "| saving | killed | 4 | 3 | 0 | 1 | 0 | 0 | 0 |\n| all |  | 4 | 3 | 0 | 1 | 0 | 0 | 0 |" in page
    assert "in 1.5 minutes" in page
    assert "earlier" not in page
    assert (page[:7], page[-6:]) == ("before\n", "after\n")
    assert put(page, COUNTS) == page


def test_page_has_a_place_for_each_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert put(text, COUNTS) != text
    with pytest.raises(ValueError, match="in the page; add them"):
        put("nothing", COUNTS)
