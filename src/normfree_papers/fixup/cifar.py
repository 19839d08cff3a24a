"""The claims of `fixup` on networks trained to the end on CIFAR-10: ResNet-110, and strong regularization.

Reference: Zhang, Dauphin, Ma 2019, section 4.2, appendix C.2. All accuracies and errors are in per cent.
"""

from __future__ import annotations

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, aside, expect, training_claim
from normfree_papers.claims.readings import does_not_train, printed_error, reading, trains
from normfree_papers.claims.seed_metrics import DEAD, SMALL, accuracy, error, minus, training_accuracy

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


@training_claim(
    id="fixup/table1",
    where="Table 1",
    statement="ResNet-110 with Fixup trains at batch norm's rate to a lower error than Xavier's at a small rate, and a "
    "higher one than batch norm's.",
    paper_value="test error on CIFAR-10: batch norm 6.61 %, Xavier at a small rate 7.78 %, Fixup 7.24 %, of 5 runs",
    how="Recipes fixup_cifar, batchnorm_cifar and xavier_cifar, 200 epochs of CIFAR-10, Xavier's rate of 0.0001 being "
    "chosen as the paper gives none (full); ResNet-20 without Xavier, 5 epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=65, full_seconds=7080, device="gpu"),
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
def table1(settings: Settings) -> Measurement:
    """Test error of ResNet-110 with Fixup, batch norm and Xavier. Reference: fixup, section 4.2, Table 1."""
    runs = settings.train_rows(_resnet_rows(settings.scale))
    found, fitted = runs.numbers(error), runs.numbers(training_accuracy)
    model, mark = ("ResNet-20", "ResNet-20: ") if settings.quick else ("ResNet-110", "")
    columns = {f"{mark}test error, {row}": numbers for row, numbers in found.items() if row != _XAVIER}
    columns[f"{mark}Fixup - batch norm"] = minus(found["Fixup"], found["batch norm"])
    columns[f"{mark}training accuracy, Fixup - batch norm"] = minus(fitted["Fixup"], fitted["batch norm"])
    if not settings.quick:
        columns["Xavier - Fixup"] = minus(found["Xavier, small rate"], found["Fixup"])
        columns[f"accuracy, {_XAVIER}"] = runs.numbers(accuracy)[_XAVIER]
    return Measurement(
        values=columns,
        panels=(
            *found.paper_panel(f"test error of {model}", {} if settings.quick else _TABLE1),
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


@training_claim(
    id="fixup/table4",
    where="Table 4",
    statement="With mixup and Cutout, a WRN-40-10 with Fixup is as good as one with batch norm.",
    paper_value="test error on CIFAR-10: Fixup 2.3 %, batch norm 2.5 %; on SVHN 1.4 % both",
    how="Recipes fixup_wrn and batchnorm_wrn, 200 epochs of CIFAR-10, SVHN being not available (full); WRN-16-1, 5 "
    "epochs of the embedded images with a Cutout of 7 (quick).",
    cost=Cost(quick_seconds=40, full_seconds=7500, device="gpu"),
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
def table4(settings: Settings) -> Measurement:
    """Test error of a wide network with mixup and Cutout. Reference: fixup, appendix C.2, Table 4."""
    runs = settings.train_rows(_wide_rows(settings.scale))
    found = runs.numbers(error)
    model, mark = ("WRN-16-1", "WRN-16-1: ") if settings.quick else ("WRN-40-10", "")
    columns = found.named(mark + "test error, {}") | found.leads(("Fixup", "batch norm")).named(mark + "{}")
    return Measurement(
        values=columns,
        panels=(
            *found.paper_panel(f"test error of {model}", {} if settings.quick else _TABLE4),
            *runs.learning_panel(f"training accuracy of {model}, on mixed images"),
        ),
        notes=("the rows on SVHN were not run: SVHN is not at hand",),
    )
