"""Our questions on trained networks: precision and `isograd`.

All accuracies and errors are in per cent.
"""

from __future__ import annotations

from typing import Any

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import (
    Check,
    Cost,
    Measurement,
    Scale,
    aside,
    expect,
    rows_claim,
)
from normfree_papers.claims.range_reasons import GAP, reading, trains
from normfree_papers.claims.seed_metrics import (
    DEAD,
    QUICK_SETTINGS,
    SMALL,
    Runs,
    accuracy,
    error,
    over,
)

# Precision: does float32 give the accuracies of the faster precisions?

_WORD = reading("match", "a ratio of errors within 9.5 %, which section 4.2 of fixup calls a gap", "outside of it")


def _networks(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        return {"Fixup, 10 layers": recipe("depth_test", model="wrn-10-1", **SMALL)}
    return {
        "Fixup, 100 layers": recipe("depth_test"),
        "batch norm, 100 layers": recipe("depth_test", method="batchnorm"),
        "weight norm, 100 layers": recipe("wninit_depth"),
        "Fixup, ResNet-110": recipe("fixup_ablation"),
        "batch norm, ResNet-110": recipe("fixup_ablation", method="batchnorm"),
    }


def _precision_rows(scale: Scale) -> dict[str, TrainConfig]:
    precisions = {"float32": "float32", "fast": "bf16" if scale == "quick" else "auto"}
    return {
        f"{name}, {kind}": config.with_changes(precision=precision)
        for name, config in _networks(scale).items()
        for kind, precision in precisions.items()
    }


@rows_claim(
    _precision_rows,
    id="beyond/precision",
    where="Our control of precision",
    statement="Training in float32 gives the test errors of bf16 and mixed precision, in which runs on a GPU are made.",
    paper_value="none; the papers do not name a precision other than the framework's float32",
    how="WRN-100-1 after one epoch and ResNet-110 after three, by Fixup, batch norm and weight norm, in float32 and in "
    "the precision that a GPU takes by itself (full); 10 layers in float32 and bf16 on the embedded images (quick).",
    cost=Cost(quick_seconds=40, full_seconds=1040, device="gpu"),
    checks=(
        *(
            expect(f"errors in float32 over fast, {name}", low=1 / GAP, high=GAP, scale="full").reading(
                f"test error in float32 over that in the fast precision, {name}", why=_WORD
            )
            for name in _networks("full")
        ),
        expect("test error, Fixup, 10 layers, float32", high=100 - DEAD, scale="quick").reading(
            "test error of the stand-in in float32, in %: it trains", why=trains()
        ),
    ),
    needs_data="CIFAR-10",
)
def precision(runs: Runs, scale: Scale) -> Measurement:
    """Test errors in float32 and in the fast precision. Reference: none; a control of our own runs."""
    errors = runs.numbers(error)
    columns = errors.named("test error, {}")
    for name in _networks(scale):
        columns[f"errors in float32 over fast, {name}"] = over(errors[f"{name}, float32"], errors[f"{name}, fast"])
    return Measurement(values=columns, panels=runs.learning_panel("training accuracy"))


# Isograd, whose gradient is flat over the whole network: does it train better than fan-out and fan-in?
#
# `robust` proposes fan-out to preserve the gradient. Over a whole ResNet-50 it loses more than fan-in does, and
# `isograd` loses nothing (robust/fig2). The runs are those of robust/fig3, so that both claims share them.

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
            why="our reading of the word 'reach': at most one point behind; more refutes it",
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
    where="Our question B",
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
    found = runs.numbers(accuracy)
    pairs = (_FLAT, _FAN_OUT), (_FLAT, _FAN_IN), (_FLAT, _NORMED), (_FAN_OUT, _FAN_IN)
    return Measurement(
        values=found.named("test accuracy, {}") | found.leads(*pairs),
        panels=runs.learning_panel("training accuracy"),
        tables=found.accuracy_table("weights"),
    )
