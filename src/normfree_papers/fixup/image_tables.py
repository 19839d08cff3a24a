"""The claims of `fixup` on networks trained to the end: Tables 1 and 4 on CIFAR-10, and Table 2 on ImageNet.

Of Table 2 only a small stand-in was run, for lack of the data. All accuracies and errors are in per cent.

Reference: Zhang, Dauphin, Ma 2019, section 4.2, appendices C.2 and C.3.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, aside, expect, rows_claim
from normfree_papers.claims.seed_metrics import CHANCE, DEAD, QUICK_SETTINGS, SMALL, Runs
from normfree_papers.claims.shared_ranges import does_not_train, printed_error, reading, trains

# Table 1: ResNet-110

_TABLE1: dict[str, float] = {"batch norm": 6.61, "Fixup": 7.24, "Xavier, small rate": 7.78}
_XAVIER = "Xavier, rate 0.01"


def _resnet_rows(scale: Scale) -> dict[str, TrainConfig]:
    rows = {"Fixup": "fixup_cifar", "batch norm": "batchnorm_cifar"}
    if scale == "quick":  # no Xavier: ResNet-20 is too shallow to need a small rate, and would lose by it
        return {row: recipe(name, **SMALL, model="resnet20", epochs=5) for row, name in rows.items()}
    made = {row: recipe(name) for row, name in {**rows, "Xavier, small rate": "xavier_cifar"}.items()}
    return {**made, _XAVIER: recipe("xavier_cifar", lr=0.01)}


def _quick_check(model: str) -> Check:
    return expect(f"{model}: test error, Fixup", paper="trains", high=100 - DEAD, scale="quick").reading(
        "test error of Fixup, in %: it trains", why=trains()
    )


@rows_claim(
    _resnet_rows,
    id="fixup/table1",
    where="Table 1",
    statement="ResNet-110 with Fixup trains at batch norm's rate to a lower error than Xavier's at a small rate, and a "
    "higher one than batch norm's.",
    paper_value="test error on CIFAR-10: batch norm 6.61 %, Xavier at a small rate 7.78 %, Fixup 7.24 %, of 5 runs",
    how="Recipes fixup_cifar, batchnorm_cifar and xavier_cifar, 200 epochs of CIFAR-10, Xavier's rate of 0.0001 being "
    "chosen as the paper gives none (full); ResNet-20 without Xavier, 5 epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=65, full_seconds=3020, device="gpu"),
    checks=(
        printed_error("Fixup", 7.24),
        printed_error("batch norm", 6.61),
        expect("Fixup - batch norm", paper=0.63, low=0.0, scale="full").printed(
            "Fixup's error lies above batch norm's, in points", why="the order of the table"
        ),
        expect("accuracy, Xavier, rate 0.01", paper="fails to train", high=DEAD, scale="full").reading(
            "test accuracy of Xavier at a tenth of the rate, in %: it does not train", why=does_not_train("fail")
        ),
        printed_error("Xavier, small rate", 7.78, main=False),
        aside("Xavier - Fixup", paper=0.54, low=0.0, high=1.3, scale="full").printed(
            "Xavier's error at a small rate lies above Fixup's, in points",
            why="the order of the table, and at most the printed gap with the sampling errors of two counts, 0.54 + "
            "0.74: a network that does not train says nothing; the rate is chosen, so an aside",
        ),
        aside(
            "training accuracy, Fixup - batch norm",
            paper="the gap is due to regularization rather than optimization",
            low=-0.31,
            scale="full",
        ).reading(
            "Fixup fits the training images as well as batch norm, in points",
            why=reading("regularization", "less than half of the gap of 0.63 is there in training", "below -0.31"),
        ),
        _quick_check("ResNet-20"),
    ),
    departures=("bf16 on a GPU", "Xavier's rate is chosen"),
    needs_data="CIFAR-10",
)
def table1(runs: Runs, scale: Scale) -> Measurement:
    """Test error of ResNet-110 with Fixup, batch norm and Xavier. Reference: fixup, section 4.2, Table 1."""
    found, fitted = runs.errors(), runs.training_accuracies()
    model, mark, paper = ("ResNet-20", "ResNet-20: ", {}) if scale == "quick" else ("ResNet-110", "", _TABLE1)
    columns = {f"{mark}test error, {row}": numbers for row, numbers in found.items() if row != _XAVIER}
    columns |= found.differences(("Fixup", "batch norm")).named(mark + "{}")
    columns |= fitted.differences(("Fixup", "batch norm")).named(mark + "training accuracy, {}")
    if scale == "full":
        columns["Xavier - Fixup"] = found["Xavier, small rate"] - found["Fixup"]
        columns[f"accuracy, {_XAVIER}"] = runs.accuracies()[_XAVIER]
    return Measurement(
        values=columns,
        panels=(
            *found.paper_panel(f"test error of {model}", paper),
            *runs.learning_panel(f"training accuracy of {model}"),
        ),
        notes=(
            "the paper gives the mean or median of 5 runs, without their spread",
            "the paper took Xavier's 7.78 from Shang 2017, and a footnote says that it needed more epochs",
        ),
    )


# Table 4: strong regularization

_TABLE4: dict[str, float] = {"Fixup": 2.3, "batch norm": 2.5}


def _wide_rows(scale: Scale) -> dict[str, TrainConfig]:
    small = {**SMALL, "model": "wrn-16-1", "cutout": 7, "epochs": 5} if scale == "quick" else {}
    return {"Fixup": recipe("fixup_wrn", **small), "batch norm": recipe("batchnorm_wrn", **small)}


@rows_claim(
    _wide_rows,
    id="fixup/table4",
    where="Table 4",
    statement="With mixup and Cutout, a WRN-40-10 with Fixup is as good as one with batch norm.",
    paper_value="test error on CIFAR-10: Fixup 2.3 %, batch norm 2.5 %; on SVHN 1.4 % both",
    how="Recipes fixup_wrn and batchnorm_wrn, 200 epochs of CIFAR-10, SVHN being not available (full); WRN-16-1, 5 "
    "epochs of the embedded images with a Cutout of 7 (quick).",
    cost=Cost(quick_seconds=40, full_seconds=7480, device="gpu"),
    checks=(
        printed_error("Fixup", 2.3),
        printed_error("batch norm", 2.5),
        expect("Fixup - batch norm", paper=-0.2, high=0.3, scale="full").reading(
            "Fixup's error is not above batch norm's, in points",
            why=reading(
                "competitive",
                "above by no more than two standard deviations of an error of 2.5 % counted on 10,000 images",
                "above 0.3",
            ),
        ),
        printed_error("Fixup on SVHN", 1.4, lacks="SVHN", images=26_032),
        printed_error("batch norm on SVHN", 1.4, lacks="SVHN", images=26_032),
        _quick_check("WRN-16-1"),
    ),
    departures=("bf16 on a GPU", "schedule and weight decay are those of Zagoruyko & Komodakis 2016"),
    needs_data="CIFAR-10",
)
def table4(runs: Runs, scale: Scale) -> Measurement:
    """Test error of a wide network with mixup and Cutout. Reference: fixup, appendix C.2, Table 4."""
    found = runs.errors()
    model, mark, paper = ("WRN-16-1", "WRN-16-1: ", {}) if scale == "quick" else ("WRN-40-10", "", _TABLE4)
    return Measurement(
        values=found.named(mark + "test error, {}") | found.differences(("Fixup", "batch norm")).named(mark + "{}"),
        panels=(
            *found.paper_panel(f"test error of {model}", paper),
            *runs.learning_panel(f"training accuracy of {model}, on mixed images"),
        ),
        notes=("the rows on SVHN were not run: SVHN is not at hand",),
    )


# Table 2: ImageNet

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


def _imagenet_rows(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        made = {"ResNet-20": recipe("fixup_cifar", **QUICK_SETTINGS, batch_size=32, model="resnet20", epochs=5)}
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


@rows_claim(
    _imagenet_rows,
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
def table2(runs: Runs, scale: Scale) -> Measurement:
    """Test error with and without mixup. Reference: fixup, section 4.2, Table 2."""
    network, chance = ("ResNet-20", CHANCE) if scale == "quick" else ("ResNet-50", 0.1)  # ten classes, and a thousand
    found, fitted = runs.errors(chance), runs.training_accuracies()
    normed, plain = (fitted[f"{network}, {row}"] for row in _PLAIN)
    columns = found.named("test error, {}")
    columns[f"{network}, {_FIXUP} - {_GROUP}"] = found[f"{network}, {_FIXUP}"] - found[f"{network}, {_GROUP}"]
    columns[f"{network}, training error, batch norm - Fixup"] = plain - normed
    if scale == "full":
        columns["ResNet-50, Xavier - Fixup"] = found["ResNet-50, Xavier"] - found["ResNet-50, Fixup"]
    return Measurement(
        values=columns,
        panels=(
            *found.paper_panel("test error", {} if scale == "quick" else _TABLE2),
            *runs.learning_panel("training accuracy, on mixed images where there is mixup", chance),
        ),
    )
