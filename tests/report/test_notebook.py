"""What notebooks show of plans, configurations and comparisons: short, escaped, and the numbers that count."""

import pytest

import normfree as nf
from normfree.comparison.comparison import ComparedRun, Comparison
from normfree.report.notebook import notebook_html
from normfree.report.tables import Column, Table


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
