"""The claim of `fixup` on its three rules: rule 2 alone is sufficient and necessary, rules 1 and 3 improve on it.

Reference: Zhang, Dauphin, Ma 2019, section 3. All accuracies and errors are in per cent.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Scale, Settings, expect, training_claim
from normfree_papers.claims.readings import does_not_train, reading, trains
from normfree_papers.claims.seed_metrics import DEAD, SMALL, Runs, accuracy, error, training_accuracy

_ZEROS = "zero_last=false,zero_classifier=false"
_RULE_2 = f"fixup:bias=false,multiplier=false,{_ZEROS}"
_PARTS = {"Fixup": "fixup", "no multipliers": "fixup:multiplier=false", "no zeros": f"fixup:{_ZEROS}"}
_ALONE, _WITHOUT = "rule 2 alone", "rules 1 and 3 without rule 2"


def without_rule_2(depth: int) -> str:
    """Fixup with He's weights unscaled in a WRN of this depth, which has (depth - 4)/2 branches of two layers."""
    return f"fixup:scale={((depth - 4) // 2) ** 0.5!r}"


def _rows(scale: Scale) -> dict[str, dict[str, TrainConfig]]:
    """The runs of each experiment: deep networks, the first epochs of a ResNet, and all its epochs."""
    small = SMALL if scale == "quick" else {}
    depth, network = (100, {"model": "resnet20"}) if scale == "quick" else (1_000, {})
    deep = {_ALONE: _RULE_2, _WITHOUT: without_rule_2(depth)}
    early = {"Fixup": "fixup", _ALONE: _RULE_2}
    return {
        "deep": {row: recipe("depth_test", model=f"wrn-{depth}-1", method=m, **small) for row, m in deep.items()},
        "early": {row: recipe("fixup_ablation", method=m, **small, **network) for row, m in early.items()},
        "whole": {}
        if scale == "quick"
        else {row: recipe("fixup_cifar", method=method) for row, method in _PARTS.items()},
    }


@training_claim(
    id="fixup/sec3",
    where="Section 3, below the three rules",
    statement="Rule 2 alone, the scaling by L^(-1/(2m-2)), is sufficient and necessary to train extremely deep "
    "networks; rule 1 (zeros) and rule 3 (biases and multipliers) improve on it.",
    paper_value="'using Rule 2 alone is sufficient and necessary for training extremely deep residual networks'; rules "
    "1 and 3 'make further improvements'; no numbers",
    how="WRN-1000-1 after one epoch with rule 2 alone and with all but rule 2; ResNet-110 with rule 2 alone in its "
    "first 3 epochs, and without multipliers or without zeros after 200 (full); 100 layers and ResNet-20 on the "
    "embedded images, without the last part (quick).",
    cost=Cost(quick_seconds=100, full_seconds=6000, device="gpu"),
    checks=(
        expect(f"accuracy, {_ALONE}", paper="sufficient", low=DEAD).reading(
            "test accuracy of a deep network with rule 2 alone, in %: it trains", why=trains("sufficient")
        ),
        expect(f"accuracy, {_WITHOUT}", paper="necessary", high=DEAD, scale="full").reading(
            "test accuracy of a deep network with all but rule 2, in %: it does not train",
            why=does_not_train("necessary"),
        ),
        expect(f"Fixup - {_ALONE}", paper="further improvements", low=0.0, scale="full").reading(
            "training accuracy in the third epoch of ResNet-110, all rules less rule 2 alone, in points",
            why=reading("improvements", "a higher training accuracy", "below 0"),
        ),
        *(
            expect(f"test error, {row} - Fixup", paper="further improvements", low=0.0, scale="full").reading(
                f"test error of ResNet-110, {row} less Fixup, in points",
                why=reading("improvements", "a lower test error", "below 0"),
            )
            for row in ("no multipliers", "no zeros")
        ),
    ),
    departures=("bf16 or mixed precision on a GPU", "'extremely deep' is 1,000 layers here"),
    needs_data="CIFAR-10",
)
def sec3(settings: Settings) -> Measurement:
    """Rule 2 alone, and Fixup without other rules. Reference: fixup, section 3, text below the rules; equation 5."""
    rows = _rows(settings.scale)
    found = settings.train_rows(
        {(row, kind): config for kind, configs in rows.items() for row, config in configs.items()}, "{}, {}"
    )
    deep, early, whole = (Runs({row: found[row, kind] for row in rows[kind]}) for kind in ("deep", "early", "whole"))
    fitted, errors = early.numbers(training_accuracy), whole.numbers(error)
    columns = deep.numbers(accuracy).named("accuracy, {}")
    columns |= fitted.named("training accuracy, {}") | errors.named("test error, {}")
    columns |= fitted.leads(("Fixup", _ALONE))
    columns |= errors.leads(*((row, "Fixup") for row in list(errors)[1:])).named("test error, {}")
    network = "ResNet-20" if settings.quick else "ResNet-110"
    return Measurement(
        values=columns,
        panels=(
            *early.learning_panel(f"training accuracy of {network}, first epochs"),
            *whole.learning_panel(f"training accuracy of {network}"),
        ),
        notes=("a diverged run counts as chance",),
    )
