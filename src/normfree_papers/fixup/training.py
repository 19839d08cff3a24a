"""The claims of `fixup` on networks trained for few epochs of CIFAR-10: its rules, depth, and the purpose of each part.

Reference: Zhang, Dauphin, Ma 2019, section 3, section 4.1, appendix C.1. All accuracies and errors are in per cent.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, aside, expect, rows_claim
from normfree_papers.claims.seed_metrics import CHANCE_LINE, DEAD, SMALL, Runs, points_panel, training_accuracy
from normfree_papers.claims.shared_ranges import GAP, does_not_train, reading, trains

# Section 3: rule 2 alone is sufficient and necessary, rules 1 and 3 improve on it

_ZEROS = "zero_last=false,zero_classifier=false"
_RULE_2 = f"fixup:bias=false,multiplier=false,{_ZEROS}"
_PARTS = {"Fixup": "fixup", "no multipliers": "fixup:multiplier=false", "no zeros": f"fixup:{_ZEROS}"}
_ALONE, _WITHOUT = "rule 2 alone", "rules 1 and 3 without rule 2"


def without_rule_2(depth: int) -> str:
    """Fixup with He's weights unscaled in a WRN of this depth, which has (depth - 4)/2 branches of two layers."""
    return f"fixup:scale={((depth - 4) // 2) ** 0.5!r}"


def _rule_rows(scale: Scale) -> dict[tuple[str, str], TrainConfig]:
    """The runs of three experiments: deep networks, the first epochs of a ResNet, and at full scale all its epochs."""
    small = SMALL if scale == "quick" else {}
    depth, network = (100, {"model": "resnet20"}) if scale == "quick" else (1_000, {})
    deep = {_ALONE: _RULE_2, _WITHOUT: without_rule_2(depth)}
    early = {"Fixup": "fixup", _ALONE: _RULE_2}
    whole = {} if scale == "quick" else _PARTS
    return {
        **{(r, "deep"): recipe("depth_test", model=f"wrn-{depth}-1", method=m, **small) for r, m in deep.items()},
        **{(r, "early"): recipe("fixup_ablation", method=m, **small, **network) for r, m in early.items()},
        **{(r, "whole"): recipe("fixup_cifar", method=m) for r, m in whole.items()},
    }


@rows_claim(
    _rule_rows,
    "{}, {}",
    id="fixup/sec3",
    where="Section 3, below the three rules",
    statement="Rule 2 alone, the scaling by L^(-1/(2m-2)), is sufficient and necessary to train extremely deep "
    "networks; rule 1 (zeros) and rule 3 (biases and multipliers) improve on it.",
    paper_value="'using Rule 2 alone is sufficient and necessary for training extremely deep residual networks'; rules "
    "1 and 3 'make further improvements'; no numbers",
    how="WRN-1000-1 after one epoch with rule 2 alone and with all but rule 2; ResNet-110 with rule 2 alone in its "
    "first 3 epochs, and without multipliers or without zeros after 200 (full); 100 layers and ResNet-20 on the "
    "embedded images, without the last part (quick).",
    cost=Cost(quick_seconds=100, full_seconds=1370, device="gpu"),
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
def sec3(runs: Runs, scale: Scale) -> Measurement:
    """Rule 2 alone, and Fixup without other rules. Reference: fixup, section 3, text below the rules; equation 5."""
    kinds = ("deep", "early", "whole")
    deep, early, whole = (Runs({row: of for (row, other), of in runs.items() if other == kind}) for kind in kinds)
    fitted, errors = early.training_accuracies(), whole.errors()
    columns = deep.accuracies().named("accuracy, {}")
    columns |= fitted.named("training accuracy, {}") | errors.named("test error, {}")
    columns |= fitted.differences(("Fixup", _ALONE))
    columns |= errors.differences(*((row, "Fixup") for row in list(errors)[1:])).named("test error, {}")
    network = "ResNet-20" if scale == "quick" else "ResNet-110"
    return Measurement(
        values=columns,
        panels=(
            *early.learning_panel(f"training accuracy of {network}, first epochs"),
            *whole.learning_panel(f"training accuracy of {network}"),
        ),
        notes=("a diverged run counts as chance",),
    )


MATCHES = reading(
    "matches",
    "less than 9.5 % more errors, since section 4.2 calls 7.24 against 6.61 % a gap",
    "of the ratio of errors above 1.095",
)

# Figure 3: depth

_METHODS = {"Fixup": "fixup", "batch norm": "batchnorm", "LSUV": "lsuv", "√½ scaling": "sqrt_half"}
_DEPTHS: dict[Scale, tuple[int, ...]] = {"quick": (10, 202), "full": (10, 100, 1_000, 10_000)}
_SLOW, _SLOW_FROM = "Fixup with scalars at 10/L", 1_000  # our own variant, tried from this number of layers on


def _depth_rows(scale: Scale) -> dict[tuple[str, int], TrainConfig]:
    rows = {}
    for depth in _DEPTHS[scale]:
        name = "depth_test_10000" if depth == 10_000 else "depth_test"
        small = SMALL if scale == "quick" else {}
        for method, spelled in _METHODS.items():
            rows[method, depth] = recipe(name, model=f"wrn-{depth}-1", method=spelled, **small)
        if depth >= _SLOW_FROM:
            rows[_SLOW, depth] = rows["Fixup", depth].with_changes(method="fixup:scalar_lr=10/L")
    return rows


def _depth_checks(scale: Scale) -> list[Check]:
    checks = []
    for depth in _DEPTHS[scale]:
        at = f"{depth:,} layers"
        for method in ("Fixup", "batch norm", *([_SLOW] if depth >= _SLOW_FROM else [])):
            is_ours = method == _SLOW
            paper = None if is_ours else "a plot; it trains"
            checks.append(
                expect(f"accuracy, {method}, {at}", paper=paper, low=DEAD, main=not is_ours, scale=scale).reading(
                    f"test accuracy of {method} at {at} after one epoch, in %: it trains",
                    why=trains() + ("; this rate of the scalars is ours" if is_ours else ""),
                )
            )
            if method != "batch norm":
                name, paper = f"errors over batch norm's, {method}, {at}", None if is_ours else "matches"
                checks.append(
                    expect(name, paper=paper, high=GAP, main=not is_ours, scale=scale).reading(
                        f"{method} matches batch norm at {at}: its test error over batch norm's", why=MATCHES
                    )
                )
        checks += [
            expect(
                f"accuracy, {method}, {at}", paper="not able to train past 100 layers", high=DEAD, scale=scale
            ).reading(
                f"test accuracy of {method} at {at}, in %: it does not train at this rate", why=does_not_train("train")
            )
            for method in ("LSUV", "√½ scaling")
            if depth > 100
        ]
    return checks


@rows_claim(
    _depth_rows,
    "{}, {:,} layers",
    id="fixup/fig3",
    where="Figure 3",
    statement="After one epoch Fixup is as accurate as batch norm from 10 to 10,000 layers, where LSUV and √½ scaling "
    "cannot be trained at the same rate past 100.",
    paper_value="a plot of test accuracy over depth; Fixup matches batch norm, LSUV and √½ fail past 100 layers",
    how="Recipes depth_test and depth_test_10000: WRN-d-1 on CIFAR-10, one epoch at 0.1, batches of 128 (64 at 10,000 "
    "layers), from 1,000 layers on Fixup also with its scalars at 10/L of the rate instead of a tenth (full); 10 and "
    "202 layers on the embedded images in batches of 32 (quick).",
    cost=Cost(quick_seconds=300, full_seconds=3070, device="gpu"),
    checks=(*_depth_checks("full"), *_depth_checks("quick")),
    departures=(
        "bf16 or mixed precision on a GPU",
        "scalars at a tenth of the rate, as in the authors' code: the paper gives no rate for them here",
    ),
    needs_data="CIFAR-10",
    version=2,
)
def fig3(runs: Runs, scale: Scale) -> Measurement:
    """Test accuracy after the first epoch over depth. Reference: fixup, section 4.1, Figure 3."""
    found, errors = runs.accuracies(), runs.errors()
    columns = found.named("accuracy, {}, {:,} layers")
    for method, depth in runs:
        if method in ("Fixup", _SLOW):
            ratio = errors[method, depth] / errors["batch norm", depth]
            columns[f"errors over batch norm's, {method}, {depth:,} layers"] = ratio
    depths, methods = _DEPTHS[scale], dict.fromkeys(method for method, _ in runs)
    drawn = {method: [found[method, depth] for depth in depths] for method in methods}
    title = "test accuracy after one epoch of " + ("the embedded images" if scale == "quick" else "CIFAR-10")
    return Measurement(
        values=columns,
        panels=points_panel(title, drawn, at=depths, x_label="layers", levels=(CHANCE_LINE,)),
        notes=(
            "a diverged run counts as chance; the paper prints no numbers for this figure",
            "the paper gives no rate for the scalars here; a tenth is that of the authors' code, and of the text where "
            "regularization is strong",
        ),
    )


# Figure 4: the purpose of each part of Fixup

_ABLATIONS = {
    "batch norm": "batchnorm",
    "Fixup": "fixup",
    "no bias": "fixup:bias=false",
    "0.1 × scale, no bias": "fixup:scale=0.1,bias=false",
    "10 × scale, no bias": "fixup:scale=10,bias=false",
    "no branches": "fixup:branches=false",
}
_LOSES = {
    ("Fixup", "no bias"): ("biases help", "benefit"),
    ("no bias", "0.1 × scale, no bias"): ("a smaller scale slows down learning", "slows"),
    ("no bias", "no branches"): ("removing the branches slows down learning", "slows"),
}


def _ablation_rows(scale: Scale) -> dict[str, TrainConfig]:
    small = {**SMALL, "model": "resnet20"} if scale == "quick" else {}
    return {row: recipe("fixup_ablation", method=method, **small) for row, method in _ABLATIONS.items()}


@rows_claim(
    _ablation_rows,
    id="fixup/fig4",
    where="Figure 4",
    statement="Without biases, with a smaller scale or without branches ResNet-110 learns more slowly in its first 3 "
    "epochs than with all of Fixup, and with a larger scale it fails.",
    paper_value="a plot of the training accuracy of six configurations over 3 epochs",
    how="Recipe fixup_ablation: ResNet-110, 3 epochs of CIFAR-10 at 0.1, the training accuracy being the mean over the "
    "third epoch instead of a moving one over 10 steps (full); ResNet-20 on the embedded images (quick).",
    cost=Cost(quick_seconds=85, full_seconds=496, device="gpu"),
    checks=(
        *(
            expect(f"{better} - {worse}", paper="a plot; above 0", low=0.0).reading(
                f"{words}: training accuracy of {better} less that of {worse}, in points",
                why=reading(word, "a higher training accuracy in the third epoch", "below 0"),
            )
            for (better, worse), (words, word) in _LOSES.items()
        ),
        expect("training accuracy, Fixup", paper="a plot; it trains", low=DEAD).reading(
            "training accuracy of Fixup in the third epoch, in %: it trains", why=trains()
        ),
        expect("training accuracy, 10 × scale, no bias", paper="fails", high=DEAD).reading(
            "training accuracy at 10 times the scale, in %: it does not train", why=does_not_train("fails")
        ),
        aside("training errors over batch norm's", paper="converges as fast", high=GAP).reading(
            "Fixup learns as fast as batch norm: its training error over batch norm's in the third epoch",
            why=MATCHES.replace("matches", "as fast"),
        ),
    ),
    departures=("bf16 on a GPU", "the mean over the third epoch in place of a moving one over 10 steps"),
    needs_data="CIFAR-10",
    version=2,
)
def fig4(runs: Runs, scale: Scale) -> Measurement:
    """Training accuracy in the first three epochs without parts of Fixup. Reference: fixup, appendix C.1, Figure 4.

    Differs: the mean over the third epoch, since runs log once per epoch.
    """
    found, errors = runs.training_accuracies(), runs.numbers(lambda run: 100 - training_accuracy(run))
    columns = found.named("training accuracy, {}") | found.differences(*_LOSES)
    columns["training errors over batch norm's"] = errors["Fixup"] / errors["batch norm"]
    return Measurement(
        values=columns,
        panels=runs.learning_panel(f"training accuracy of {'ResNet-20' if scale == 'quick' else 'ResNet-110'}"),
        notes=("a diverged run counts as chance",),
    )
