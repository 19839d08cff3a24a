"""Our question on precision: does float32 give the test errors of the faster precisions?

All errors are in per cent.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Scale, expect, rows_claim
from normfree_papers.claims.seed_metrics import DEAD, SMALL, Runs
from normfree_papers.claims.shared_ranges import GAP, reading, trains

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
    where="Our question on precision",
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
    errors = runs.errors()
    columns = errors.named("test error, {}")
    for name in _networks(scale):
        columns[f"errors in float32 over fast, {name}"] = errors[f"{name}, float32"] / errors[f"{name}, fast"]
    return Measurement(values=columns, panels=runs.learning_panel("training accuracy"))
