import io
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import normfree as nf
from normfree.comparison.comparison_result import ComparedRun, Comparison
from normfree.report import Column, Link, Table, print_table, sparkline, to_markdown
from normfree.report.tables import notebook_html, shorten_names

TABLE = Table(
    title="Methods [all]",
    columns=(Column("method", style="cyan"), Column("gain", justify="right"), Column("weights")),
    rows=(
        (
            "convshort_brock",
            "1.41",
            "each channel drawn with variance γ²/fan_in, and [bold]nothing[/bold] else",
        ),
        ("fixup", "0.5", "He fan-out times L^(-1/(2m-2)), the last layer of a branch and the classifier at zero"),
    ),
    caption="Two methods",
)


def printed(table: Table, width: int, **options: bool) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=width, **options))
    return out.getvalue()


def test_cells_of_a_marked_column_have_the_colour_of_their_mark() -> None:
    rows = (("✓ holds", "✗ plain"), ("✗ fails", "x"), ("◐ in part", "x"), ("– not run", "x"), ("other", "x"))
    text = printed(Table("", (Column("verdict", marked=True), Column("any")), rows), 80, force_terminal=True)
    for styled in ("\x1b[32m✓ holds", "\x1b[31m✗ fails", "\x1b[33m◐ in part", "\x1b[2m– not run"):
        assert styled in text
    assert text.count("\x1b[3") == 3  # no other cell is coloured
    assert to_markdown(Table("", (Column("verdict", marked=True),), (("✗ fails",),))).endswith("| ✗ fails |")


@pytest.mark.parametrize("width", [30, 50, 80, 120, 400])
def test_print_table_keeps_every_word_within_the_width(width: int) -> None:
    text = printed(TABLE, width)
    assert max(map(len, text.splitlines())) <= width
    missing = Counter("".join(cell for row in TABLE.rows for cell in row)) - Counter(text)
    assert not {letter for letter in missing if letter != " "}


def test_links_are_a_last_column_of_markdown() -> None:
    rows = (("a", "1"), ("b", "2"))
    links = ((Link("result", "../a%20b.json"), Link("log", "log.txt")), ())
    table = Table("", (Column("run"), Column("n", "right")), rows, links=links)
    assert to_markdown(table).splitlines() == [
        "| run | n | files |",
        "| --- | ---: | --- |",
        "| a | 1 | [result](../a%20b.json) [log](log.txt) |",
        "| b | 2 |  |",
    ]
    assert "result" not in printed(table, 80)
    with pytest.raises(ValueError, match="expected links for 2 rows, got 1"):
        Table("t", table.columns, rows, links=links[:1])


@pytest.mark.parametrize("href", ["/etc/passwd", "javascript:alert(1)", "https://example.org"])
def test_link_is_relative(href: str) -> None:
    with pytest.raises(ValueError, match="expected a relative address"):
        Link("a", href)


def test_print_table_breaks_no_word_at_80_columns() -> None:
    words = set(printed(TABLE, 80).split())
    assert {word for row in TABLE.rows for cell in row for word in cell.split()} <= words


def test_print_table_splits_into_parts_that_repeat_the_first_column() -> None:
    words = ("a" * 15, "b" * 15, "c" * 15, "d" * 15)
    table = Table("wide", tuple(Column(f"column{i}") for i in range(4)), (words,), caption="end")
    text = printed(table, 40)
    assert [text.count(word) for word in words] == [3, 1, 1, 1]
    assert (text.count("wide"), text.count("end")) == (1, 1)
    # The control: where the words fit, there is one part.
    assert printed(table, 80).count(words[0]) == 1


def test_print_table_shows_brackets_as_they_are() -> None:
    text = printed(TABLE, 200)
    assert "Methods [all]" in text
    assert "[bold]nothing[/bold]" in text


def test_print_table_styles_only_a_terminal() -> None:
    assert "\x1b[" not in printed(TABLE, 80)
    assert "\x1b[" in printed(TABLE, 80, force_terminal=True)


def test_print_table_in_a_pipe_prints_one_row_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    print_table(TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(all(cell in line for cell in row) for line in lines) for row in TABLE.rows)
    assert not any(line.endswith("  ") and len(line) > 500 for line in lines)


def test_the_rule_in_a_pipe_is_no_longer_than_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    print_table(Table("", (Column("id"), Column("statement")), (("one", "word " * 60 + "end"),)))
    heading, rule, row = capsys.readouterr().out.splitlines()
    assert (heading, rule) == ("id   statement", "─" * 100)
    assert row.endswith("end")


def test_print_table_with_no_color_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(TABLE)
    assert "\x1b[" not in capsys.readouterr().out


def test_to_markdown_escapes_and_aligns() -> None:
    table = Table("", (Column("a", "right"), Column("b", "center")), (("x|y", "1\n2"),), caption="end")
    assert to_markdown(table).splitlines() == ["| a | b |", "| ---: | :---: |", "| x\\|y | 1<br>2 |", "", "end"]


def test_table_refuses_a_ragged_row() -> None:
    with pytest.raises(ValueError, match=r"expected 2 cells in row 1, got 1; give every column"):
        Table("t", (Column("a"), Column("b")), (("1", "2"), ("3",)))


def test_table_refuses_no_columns() -> None:
    with pytest.raises(ValueError, match="expected at least one column, got none"):
        Table("t", (), ())


def test_text_is_escaped() -> None:
    table = Table("t", (Column("<a>"), Column("b", "right")), (("<script>", "1"),), "x & y")
    html = notebook_html("<h>", ["1 < 2"], table, text="a\n<b>")
    assert "<script>" not in html
    assert "<h>" not in html
    assert "<pre>a\n&lt;b&gt;</pre>" in html
    assert '<td style="text-align:right">1</td>' in html
    assert "x &amp; y" in html


def test_plan_and_configuration_have_short_texts() -> None:
    plan = nf.build("resnet20", "fixup").plan
    assert repr(plan) == "ResidualPlan(9 branches, 20 weight layers)"
    assert "9 residual branches in 3 stages" in plan._repr_html_()
    config = nf.TrainConfig(lr=0.3)
    assert repr(config) == "TrainConfig(lr=0.3)"
    assert eval(repr(config), {"TrainConfig": nf.TrainConfig}) == config
    assert "lr = 0.3" in config._repr_html_()


@pytest.mark.parametrize("spread", [1, 2])
def test_comparison_is_a_table(spread: int) -> None:
    runs = tuple(
        ComparedRun(
            method="fixup", model="resnet20", depth=20, lr=0.1, seed=seed, status="finished", validation=0.5, test=0.6,
            seconds=1.0, folder="",
        )
        for seed in range(spread)
    )  # fmt: skip
    found = Comparison(
        runs=runs, settings={}, methods=("fixup",), lrs=(0.1,), seeds=tuple(range(spread)), chance=0.1,
        linear_accuracy=None,
    )  # fmt: skip
    assert repr(found) == f"Comparison(fixup: {spread} runs, 0 diverged)"
    assert "60.0" in found._repr_html_()
    assert "resnet20" in found._repr_html_()


def test_first_names_counts_the_rest() -> None:
    assert shorten_names(["a", "b", "c"]) == "a, b, c"
    assert shorten_names(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert shorten_names(["a", "b", "c"], limit=1) == "a and 2 more"


ANY_CURVE = st.lists(st.floats(min_value=0.0) | st.just(math.nan), min_size=1, max_size=60)


@given(ANY_CURVE, st.integers(1, 30))
def test_sparkline_draws_any_curve(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_sparkline_is_monotone_in_a_growing_curve() -> None:
    assert sparkline([10.0**i for i in range(8)]) == "▁▂▃▄▅▆▇█"


def test_sparkline_keeps_noise_flat() -> None:
    assert len(set(sparkline([1.0, 1.05, 0.95, 1.02]))) <= 2
    # The control: noise of a hundred times the size fills the range.
    assert len(set(sparkline([1.0, 1e5, 1e-5, 1e2]))) > 2


def test_sparkline_shows_what_cannot_be_drawn() -> None:
    assert sparkline([1.0, math.inf, 0.0, math.nan])[1:] == "✗0✗"


@pytest.mark.parametrize(
    ("values", "width", "message"),
    [
        ([], 20, "expected values and width >= 1, got 0 values"),
        ([1.0], 0, "width 0"),
        ([-1.0], 5, "expected values >= 0"),
    ],
)
def test_sparkline_refuses_bad_input(values: list[float], width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparkline(values, width)
