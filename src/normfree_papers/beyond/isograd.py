"""Our question on `isograd`: does a gradient that is flat over the whole network train better than fan-out and fan-in?

`robust` proposes fan-out to preserve the gradient. Over a whole ResNet-50 fan-out loses more of it than fan-in, and
`isograd` loses nothing (robust/fig2). The runs are those of robust/fig3, so that both claims share them. All accuracies
are in per cent.
"""

from __future__ import annotations

from typing import Any

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, aside, expect, rows_claim
from normfree_papers.claims.seed_metrics import DEAD, QUICK_SETTINGS, Runs

_FAN_OUT, _FAN_IN, _FLAT, _NORMED = "fan-out", "fan-in", "isograd", "batch norm"
_METHODS = {
    _FAN_OUT: "convshort",
    _FAN_IN: "convshort:fan=in",
    _FLAT: "isograd:shortcut=conv",
    _NORMED: "batchnorm_convshort",
}
_SHARED_EPOCHS = 30  # those of robust/fig3
_SMALL: dict[str, Any] = {**QUICK_SETTINGS, "model": "resnet8", "form": "pre", "flip": False, "randaugment": (0, 0)}


def _isograd_configs(scale: Scale) -> dict[str, TrainConfig]:
    rows = {row: recipe("robust_cifar", method=method, epochs=_SHARED_EPOCHS) for row, method in _METHODS.items()}
    if scale == "full":
        return rows
    return {row: config.with_changes(**_SMALL, epochs=2) for row, config in rows.items()}


def _isograd_checks() -> tuple[Check, ...]:
    ahead = "our reading of the word 'better': a lead above 0 points; a negative one refutes it"
    return (
        *(
            expect(f"{_FLAT} - {other}", low=0.0, scale="full").reading(
                f"isograd trains better than {other}: points of test accuracy by which it leads", why=ahead
            )
            for other in (_FAN_OUT, _FAN_IN)
        ),
        expect(f"{_FLAT} - {_NORMED}", low=-1.0, scale="full").reading(
            "isograd reaches batch norm: points of test accuracy by which it leads",
            why="our reading of the word 'reach': at most one point less; more refutes it",
        ),
        aside(f"{_FAN_OUT} - {_FAN_IN}", low=0.0, scale="full").reading(
            "fan-out trains better than fan-in, as robust proposes: points of test accuracy by which it leads",
            why=ahead,
        ),
        expect(f"test accuracy, {_FLAT}", low=DEAD, scale="quick").reading(
            "test accuracy of isograd, in %: it trains",
            why="our reading of the word 'train': more than twice chance after two epochs; less refutes it",
        ),
    )


@rows_claim(
    _isograd_configs,
    id="beyond/isograd",
    where="Our question on isograd",
    statement="A ResNet-50 whose gradient is flat over the whole network trains better than with fan-out or fan-in "
    "weights, and reaches batch norm.",
    paper_value="none: not in a paper",
    how="Pre-activation ResNet-50 with 1×1 convolutions in every shortcut by the recipe robust_cifar, "
    f"{_SHARED_EPOCHS} epochs, "
    "three seeds, with fan-out, fan-in, isograd and batch norm; ResNet-8, two epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=75, full_seconds=1070, device="gpu"),
    checks=_isograd_checks(),
    quick_seeds=3,
    needs_data="CIFAR-10",
)
def isograd(runs: Runs, scale: Scale) -> Measurement:
    """Test accuracy of isograd beside fan-out, fan-in and batch norm, at the rate of robust's recipe."""
    found = runs.accuracies()
    pairs = (_FLAT, _FAN_OUT), (_FLAT, _FAN_IN), (_FLAT, _NORMED), (_FAN_OUT, _FAN_IN)
    return Measurement(
        values=found.named("test accuracy, {}") | found.differences(*pairs),
        panels=runs.learning_panel("training accuracy"),
        tables=found.accuracy_table("weights"),
    )
