"""The tables of `make faults` take the place of those in the page, which has all rows and only good outcomes."""

import pytest

from fault_kinds import ROWS
from fault_tables import PAGE, TABLES, Counts, put, read_page

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


@pytest.mark.parametrize("name", TABLES)
def test_page_has_every_row_and_no_bad_outcome(name: str) -> None:
    """A fault that is added to the suite, or whose outcome is bad, needs another run of it before the page is true."""
    *found, (_, total) = read_page(PAGE.read_text(encoding="utf-8"), name)
    assert [names for names, _ in found] == ROWS[name]
    good = {"whole", "refused", "harmless", "read"}
    for names, counted in found:
        assert counted["tried"] == sum(counted[outcome] for outcome in counted.keys() & good) > 0, names
    assert total["tried"] == sum(counted["tried"] for _, counted in found)
    assert name != "processes" or total["tried"] >= 400
