"""The claim of `fixup` on ImageNet, of which only a small stand-in was run, for lack of the data.

Reference: Zhang, Dauphin, Ma 2019, section 4.2 and appendix C.3, Table 2. All accuracies and errors are in per cent.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, aside, expect, training_claim
from normfree_papers.claims.readings import printed_error, reading, trains
from normfree_papers.claims.seed_metrics import CHANCE, DEAD, EMBEDDED, accuracy, minus, training_accuracy

_FIXUP, _GROUP = "Fixup + mixup", "group norm + mixup"
_MIXED = {"batch norm + mixup": ("batchnorm", 0.2), _GROUP: ("groupnorm", 0.1), _FIXUP: ("fixup", 0.7)}  # section 4.2
_PLAIN = {"batch norm": "batchnorm", "Fixup": "fixup"}
_TABLE2 = {
    "ResNet-50, batch norm": 23.6,
    "ResNet-50, batch norm + mixup": 23.3,
    f"ResNet-50, {_GROUP}": 23.9,
    "ResNet-50, Xavier": 31.5,
    "ResNet-50, Fixup": 27.6,
    f"ResNet-50, {_FIXUP}": 24.0,
    "ResNet-101, batch norm": 22.0,
    "ResNet-101, batch norm + mixup": 20.8,
    f"ResNet-101, {_GROUP}": 21.4,
    f"ResNet-101, {_FIXUP}": 21.4,
}


def _rows(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        made = {"ResNet-20": recipe("fixup_cifar", **EMBEDDED, batch_size=32, model="resnet20", epochs=5)}
    else:
        fifty = recipe("fixup_imagenet")
        made = {"ResNet-50": fifty, "ResNet-101": fifty.with_changes(model="resnet101", epochs=200)}
    rows = {}
    for network, config in made.items():
        for row, method in _PLAIN.items():
            if (network, row) != ("ResNet-101", "Fixup"):  # of which the table has no row
                rows[f"{network}, {row}"] = config.with_changes(method=method, mixup=0.0)
        for row, (method, mixup) in _MIXED.items():
            rows[f"{network}, {row}"] = config.with_changes(method=method, mixup=mixup)
    if scale == "full":  # the paper gives no rate for Xavier; this is that of xavier_cifar
        rows["ResNet-50, Xavier"] = rows["ResNet-50, Fixup"].with_changes(method="xavier", lr=1e-4)
    return rows


def _printed(row: str) -> Check:
    main = not row.endswith("Xavier")  # the paper gives no rate for Xavier
    return printed_error(row, _TABLE2[row], main=main, images=50_000)


@training_claim(
    id="fixup/table2",
    where="Table 2, Figures 5 and 6",
    statement="On ImageNet Fixup alone overfits, and with mixup it is on par with group norm.",
    paper_value="test error: ResNet-50 with Fixup 27.6 %, with mixup 24.0 % (group norm 23.9 %, batch norm "
    "23.3 %), Xavier 31.5 %, batch norm without mixup 23.6 %; ResNet-101 with mixup 21.4 % (group norm "
    "21.4 %, batch norm 20.8 %, without mixup 22.0 %); Figures 5 and 6 show the curves",
    how="Recipe fixup_imagenet on ImageNet in .data/imagenet, with the paper's coefficients of mixup, other "
    "methods and ResNet-101 for 200 epochs (full); ResNet-20, 5 epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=110, full_seconds=102_000, device="gpu"),
    checks=(
        *map(_printed, _TABLE2),
        expect(
            "ResNet-50, training error, batch norm - Fixup",
            paper="fits the training set very well, but overfits (Figure 5)",
            low=0.0,
            scale="full",
        ).reading(
            "without mixup Fixup overfits: its training error lies below batch norm's, in points",
            why=reading("overfits", "a lower training error at a higher test error", "below 0"),
        ),
        expect(f"ResNet-50, {_FIXUP} - {_GROUP}", paper=0.1, high=0.48, scale="full").printed(
            "with mixup, Fixup's error is on par with group norm's, in points",
            why="the printed gap of 0.1 and two standard deviations of an error counted on 50,000 images, 0.38",
        ),
        aside("ResNet-50, Xavier - Fixup", paper=3.9, low=0.0, scale="full").printed(
            "Fixup alone improves the test error of standard initialization, in points",
            why="the order of the table; the paper gives no rate for Xavier, so an aside",
        ),
        expect(f"test error, ResNet-20, {_FIXUP}", paper="trains", high=100 - DEAD, scale="quick").reading(
            "test error of Fixup with mixup, in %: it trains", why=trains()
        ),
    ),
    seeds=1,
    needs_data="ImageNet",
    lacks="ImageNet",
    departures=(
        "bf16 on a GPU",
        "batch norm is trained here, where the table quotes others",
        "Xavier's rate is chosen",
    ),
)
def table2(settings: Settings) -> Measurement:
    """Test error with and without mixup. Reference: fixup, section 4.2, Table 2."""
    runs = settings.train_rows(_rows(settings.scale))
    network = "ResNet-20" if settings.quick else "ResNet-50"
    chance = CHANCE if settings.quick else 0.1  # ten classes, and a thousand
    found, fitted = runs.numbers(lambda run: 100 - accuracy(run, chance)), runs.numbers(training_accuracy)
    normed, plain = (fitted[f"{network}, {row}"] for row in _PLAIN)
    columns = found.named("test error, {}")
    columns[f"{network}, {_FIXUP} - {_GROUP}"] = minus(found[f"{network}, {_FIXUP}"], found[f"{network}, {_GROUP}"])
    columns[f"{network}, training error, batch norm - Fixup"] = minus(plain, normed)
    if not settings.quick:
        columns["ResNet-50, Xavier - Fixup"] = minus(found["ResNet-50, Xavier"], found["ResNet-50, Fixup"])
    return Measurement(
        values=columns,
        panels=(
            *found.paper_panel("test error", {} if settings.quick else _TABLE2),
            *runs.learning_panel("training accuracy, on mixed images where there is mixup", chance),
        ),
    )
