"""The claims of `fixup` on networks trained on CIFAR-10: depth, ResNet-110, ablations, and strong regularization.

Reference: Zhang, Dauphin, Ma 2019, sections 4.1 and 4.2, appendix C. All accuracies and errors are in per cent.
"""

from __future__ import annotations

from typing import Any

from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, aside, expect
from normfree_papers.claims.registry import claim
from normfree_papers.claims.seed_metrics import (
    CHANCE,
    DEAD,
    EMBEDDED,
    accuracy,
    bars_note,
    by_seed,
    error,
    learning_panel,
    minus,
    paper_panel,
    point_curve,
    train_rows,
    training_accuracy,
    values_of,
)

_SMALL: dict[str, Any] = {**EMBEDDED, "batch_size": 32}  # 188 steps per epoch

# Figure 3: depth

_METHODS = {"Fixup": "fixup", "batch norm": "batchnorm", "LSUV": "lsuv", "√½ scaling": "sqrt_half"}
_DEPTHS: dict[Scale, tuple[int, ...]] = {"quick": (10, 202), "full": (10, 100, 1_000, 10_000)}
_SLOW, _SLOW_FROM = "Fixup with scalars at 10/L", 1_000  # our own variant, tried from this number of layers on


def _depth_rows(scale: Scale) -> dict[tuple[str, int], TrainConfig]:
    rows = {}
    for depth in _DEPTHS[scale]:
        name = "depth_test_10000" if depth == 10_000 else "depth_test"
        small = _SMALL if scale == "quick" else {}
        for method, spelled in _METHODS.items():
            rows[method, depth] = recipe(name, model=f"wrn-{depth}-1", method=spelled, **small)
        if depth >= _SLOW_FROM:
            rows[_SLOW, depth] = rows["Fixup", depth].with_changes(method="fixup:scalar_lr=10/L")
    return rows


def _depth_checks(scale: Scale) -> list[Check]:
    checks = []
    for depth in _DEPTHS[scale]:
        for method in ("Fixup", "batch norm", *([_SLOW] if depth >= _SLOW_FROM else [])):
            checks.append(
                expect(
                    f"accuracy, {method}, {depth:,} layers",
                    paper="a plot; it trains" if method != _SLOW else None,
                    low=25.0,
                    main=method == "Fixup",
                    scale=scale,
                ).says(
                    f"test accuracy of {method} at {depth:,} layers after one epoch, in %: it trains",
                    why="only a plot: well above the 10 % of chance; earlier runs reached 35 to 38 %"
                    + ("; this rate of the scalars is ours" if method == _SLOW else ""),
                )
            )
            if method != "batch norm":
                checks.append(
                    expect(
                        f"{method} - batch norm, {depth:,} layers",
                        paper="matches" if method == "Fixup" else None,
                        low=-10.0,
                        main=method == "Fixup",
                        scale=scale,
                    ).says(
                        f"{method} matches batch norm at {depth:,} layers, in points of accuracy",
                        why="only a plot: at most 10 points below, since accuracies of a first epoch move by points "
                        "from seed to seed",
                    )
                )
        checks += [
            expect(
                f"accuracy, {method}, {depth:,} layers",
                paper="not able to train past 100 layers",
                high=DEAD,
                scale=scale,
            ).says(
                f"test accuracy of {method} at {depth:,} layers, in %: it does not train at this rate",
                why="the text says so; the limit is twice chance",
            )
            for method in ("LSUV", "√½ scaling")
            if depth > 100
        ]
    return checks


@claim(
    id="fixup/fig3",
    where="Figure 3",
    statement="After one epoch Fixup is as accurate as batch norm from 10 to 10,000 layers, where LSUV and √½ scaling "
    "cannot be trained at the same rate past 100.",
    paper_value="a plot of test accuracy over depth; Fixup matches batch norm, LSUV and √½ fail past 100 layers",
    how="Recipes depth_test and depth_test_10000: WRN-d-1 on CIFAR-10, one epoch at 0.1, batches of 128 (64 at 10,000 "
    "layers), from 1,000 layers on Fixup also with its scalars at 10/L of the rate instead of a tenth (full); 10 and "
    "202 layers on the embedded images in batches of 32 (quick).",
    cost=Cost(quick_seconds=300, full_seconds=2106, device="gpu"),
    checks=(*_depth_checks("full"), *_depth_checks("quick")),
    seeds=1,
    needs_data="CIFAR-10",
    needs_training=True,
)
def fig3(settings: Settings) -> Measurement:
    """Test accuracy after the first epoch over depth. Reference: fixup, section 4.1, Figure 3."""
    rows = _depth_rows(settings.scale)
    runs = train_rows(settings, {f"{method}, {depth:,} layers": config for (method, depth), config in rows.items()})
    found = {row: by_seed(seeds, accuracy) for row, seeds in runs.items()}
    columns = {f"accuracy, {row}": numbers for row, numbers in found.items()}
    for method, depth in rows:
        if method in ("Fixup", _SLOW):
            numbers, normed = (found[f"{name}, {depth:,} layers"] for name in (method, "batch norm"))
            columns[f"{method} - batch norm, {depth:,} layers"] = minus(numbers, normed)
    depths = _DEPTHS[settings.scale]
    curves: list[Curve] = []
    for method in dict.fromkeys(method for method, _ in rows):
        curves += point_curve(method, [found.get(f"{method}, {depth:,} layers", {}) for depth in depths], at=depths)
    title = "test accuracy after one epoch of " + ("the embedded images" if settings.quick else "CIFAR-10")
    note = f"{shown}; points of one seed, or of equal ones, have none" if (shown := bars_note(curves)) else ""
    chance = (ReferenceLine("chance", CHANCE),)
    panels: tuple[Panel, ...] = ()
    if curves:
        panels = (Panel(title, tuple(curves), "%", "layers", log_y=False, log_x=True, note=note, levels=chance),)
    return Measurement(
        values=values_of(columns),
        panels=panels,
        notes=(
            "a diverged run counts as chance; the paper prints no numbers for this figure",
            "the paper gives no rate for the scalars here; a tenth is that of the authors' code, and of the text where "
            "regularization is strong",
        ),
    )


# Table 1: ResNet-110

_TABLE1: dict[str, float] = {"batch norm": 6.61, "Fixup": 7.24, "Xavier, small rate": 7.78}
_XAVIER = "Xavier, rate 0.01"


def _resnet_rows(scale: Scale) -> dict[str, TrainConfig]:
    rows = {"Fixup": "fixup_cifar", "batch norm": "batchnorm_cifar"}
    if scale == "quick":  # no Xavier: ResNet-20 is too shallow to need a small rate, and would lose by it
        return {row: recipe(name, **_SMALL, model="resnet20", epochs=5) for row, name in rows.items()}
    made = {row: recipe(name) for row, name in {**rows, "Xavier, small rate": "xavier_cifar"}.items()}
    return {**made, _XAVIER: recipe("xavier_cifar", lr=0.01)}


def _printed_check(row: str, paper: float, slack: float, why: str, *, main: bool = True) -> Check:
    return expect(
        f"test error, {row}",
        paper=paper,
        low=round(paper - slack, 2),
        high=round(paper + slack, 2),
        main=main,
        scale="full",
    ).says(f"test error of {row}, in %", why=why)


def _quick_checks(model: str, statement: str, paper: str) -> tuple[Check, Check]:
    """Fixup is near batch norm, and it trains: otherwise two networks that both fail would count as equally good."""
    return (
        expect(f"{model}: test error, Fixup", paper="trains", high=100 - DEAD, scale="quick").says(
            "test error of Fixup, in %: it trains", why="more than twice chance in accuracy"
        ),
        expect(f"{model}: Fixup - batch norm", paper=paper, high=5.0, scale="quick").says(
            statement, why="chosen for a run of 5 epochs on 6,000 images"
        ),
    )


_TWO_SIGMA = "no spread is printed; two standard deviations of an error counted on 10,000 images are"


@claim(
    id="fixup/table1",
    where="Table 1",
    statement="ResNet-110 with Fixup trains at batch norm's rate to a lower error than Xavier's at a small rate, and a "
    "higher one than batch norm's.",
    paper_value="test error on CIFAR-10: batch norm 6.61 %, Xavier at a small rate 7.78 %, Fixup 7.24 %, of 5 runs",
    how="Recipes fixup_cifar, batchnorm_cifar and xavier_cifar, 200 epochs of CIFAR-10, Xavier's rate of 0.0001 being "
    "chosen as the paper gives none (full); ResNet-20 without Xavier, 5 epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=65, full_seconds=2360, device="gpu"),
    checks=(
        _printed_check("Fixup", 7.24, 0.5, f"{_TWO_SIGMA} 0.5"),
        _printed_check("batch norm", 6.61, 0.5, f"{_TWO_SIGMA} 0.5"),
        expect("Fixup - batch norm", paper=0.63, low=0.0, scale="full").says(
            "Fixup's error lies above batch norm's, in points", why="the order of the table"
        ),
        _printed_check(
            "Xavier, small rate", 7.78, 1.0, "twice that of the others, as the rate is not given", main=False
        ),
        aside("Xavier - Fixup", paper=0.54, low=0.0, scale="full").says(
            "Xavier's error at a small rate lies above Fixup's, in points",
            why="the order of the table; the rate is chosen, so an aside",
        ),
        aside("accuracy, Xavier, rate 0.01", paper="fails to train", high=DEAD, scale="full").says(
            "test accuracy of Xavier at a tenth of the rate, in %: it does not train",
            why="section 4.2 says so; the limit is twice chance",
        ),
        aside(
            "training accuracy, Fixup - batch norm",
            paper="the gap is due to regularization rather than optimization",
            low=-0.5,
            scale="full",
        ).says(
            "Fixup fits the training images as well as batch norm, in points",
            why="section 4.2 says so; half a point of slack",
        ),
        *_quick_checks(
            "ResNet-20",
            "test error of Fixup above batch norm's at the same rate, in points",
            "trained with the same rate, as fast",
        ),
    ),
    seeds=1,
    needs_data="CIFAR-10",
    needs_training=True,
)
def table1(settings: Settings) -> Measurement:
    """Test error of ResNet-110 with Fixup, batch norm and Xavier. Reference: fixup, section 4.2, Table 1."""
    runs = train_rows(settings, _resnet_rows(settings.scale))
    found = {row: by_seed(seeds, error) for row, seeds in runs.items()}
    model, mark = ("ResNet-20", "ResNet-20: ") if settings.quick else ("ResNet-110", "")
    columns = {f"{mark}test error, {row}": numbers for row, numbers in found.items() if row != _XAVIER}
    columns[f"{mark}Fixup - batch norm"] = minus(found["Fixup"], found["batch norm"])
    columns[f"{mark}training accuracy, Fixup - batch norm"] = minus(
        by_seed(runs["Fixup"], training_accuracy), by_seed(runs["batch norm"], training_accuracy)
    )
    if not settings.quick:
        columns["Xavier - Fixup"] = minus(found["Xavier, small rate"], found["Fixup"])
        columns[f"accuracy, {_XAVIER}"] = by_seed(runs[_XAVIER], accuracy)
    return Measurement(
        values=values_of(columns),
        panels=(
            *paper_panel(f"test error of {model}", found, {} if settings.quick else _TABLE1),
            *learning_panel(f"training accuracy of {model}", runs),
        ),
        notes=(
            "the paper gives the mean or median of 5 runs, without their spread",
            "the paper took Xavier's 7.78 from Shang 2017, and a footnote says that it needed more epochs",
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
    ("Fixup", "no bias"): "biases help",
    ("no bias", "0.1 × scale, no bias"): "a smaller scale slows down learning",
    ("no bias", "no branches"): "removing the branches slows down learning",
}


def _ablation_rows(scale: Scale) -> dict[str, TrainConfig]:
    small = {**_SMALL, "model": "resnet20"} if scale == "quick" else {}
    return {row: recipe("fixup_ablation", method=method, **small) for row, method in _ABLATIONS.items()}


@claim(
    id="fixup/fig4",
    where="Figure 4",
    statement="Without biases, with a smaller scale or without branches ResNet-110 learns more slowly in its first 3 "
    "epochs than with all of Fixup, and with a larger scale it fails.",
    paper_value="a plot of the training accuracy of six configurations over 3 epochs",
    how="Recipe fixup_ablation: ResNet-110, 3 epochs of CIFAR-10 at 0.1, the training accuracy being the mean over the "
    "third epoch instead of a moving one over 10 steps (full); ResNet-20 on the embedded images (quick).",
    cost=Cost(quick_seconds=85, full_seconds=290, device="gpu"),
    checks=(
        *(
            expect(f"{better} - {worse}", paper="a plot; above 0", low=2.0).says(
                f"{words}: training accuracy of {better} less that of {worse}, in points",
                why="only a plot: nine times the sampling error of a share of 50,000 images, three times that of 6,000",
            )
            for (better, worse), words in _LOSES.items()
        ),
        expect("training accuracy, 10 × scale, no bias", paper="fails", high=DEAD).says(
            "training accuracy at 10 times the scale, in %: it does not train",
            why="appendix C.1 says so; the limit is twice chance",
        ),
        aside("Fixup - batch norm", paper="converges as fast", low=-10.0).says(
            "Fixup learns as fast as batch norm, in points of training accuracy",
            why="section 4.2 says so; the limit is 10 points below in a third epoch",
        ),
    ),
    seeds=1,
    needs_data="CIFAR-10",
    needs_training=True,
)
def fig4(settings: Settings) -> Measurement:
    """Training accuracy in the first three epochs without parts of Fixup. Reference: fixup, appendix C.1, Figure 4.

    Differs: the mean over the third epoch, since runs log once per epoch.
    """
    runs = train_rows(settings, _ablation_rows(settings.scale))
    found = {row: by_seed(seeds, training_accuracy) for row, seeds in runs.items()}
    columns = {f"training accuracy, {row}": numbers for row, numbers in found.items()}
    columns |= {f"{a} - {b}": minus(found[a], found[b]) for a, b in (*_LOSES, ("Fixup", "batch norm"))}
    return Measurement(
        values=values_of(columns),
        panels=learning_panel(f"training accuracy of {'ResNet-20' if settings.quick else 'ResNet-110'}", runs),
        notes=("a diverged run counts as chance",),
    )


# Table 4: strong regularization

_TABLE4: dict[str, float] = {"Fixup": 2.3, "batch norm": 2.5}


def _wide_rows(scale: Scale) -> dict[str, TrainConfig]:
    small = {**_SMALL, "model": "wrn-16-1", "cutout": 7, "epochs": 5} if scale == "quick" else {}
    return {"Fixup": recipe("fixup_wrn", **small), "batch norm": recipe("batchnorm_wrn", **small)}


@claim(
    id="fixup/table4",
    where="Table 4",
    statement="With mixup and Cutout, a WRN-40-10 with Fixup is as good as one with batch norm.",
    paper_value="test error on CIFAR-10: Fixup 2.3 %, batch norm 2.5 %; on SVHN 1.4 % both",
    how="Recipes fixup_wrn and batchnorm_wrn, 200 epochs of CIFAR-10, SVHN being not available (full); WRN-16-1, 5 "
    "epochs of the embedded images with a Cutout of 7 (quick).",
    cost=Cost(quick_seconds=40, full_seconds=2500, device="gpu"),
    checks=(
        _printed_check("Fixup", 2.3, 0.3, f"{_TWO_SIGMA} 0.3"),
        _printed_check("batch norm", 2.5, 0.3, f"{_TWO_SIGMA} 0.3"),
        expect("Fixup - batch norm", paper=-0.2, high=0.3, scale="full").says(
            "Fixup's error is not above batch norm's, in points",
            why="the text says competitive; the limit is two standard deviations of an error counted on 10,000 images",
        ),
        expect("SVHN: Fixup - batch norm", paper=0.0, high=0.2).says(
            "on SVHN with WRN-16-12 Fixup's error is not above batch norm's, in points",
            why="both print 1.4 %; two standard deviations of an error counted on 26,000 images",
            lacks="SVHN",
        ),
        *_quick_checks("WRN-16-1", "Fixup's error is not far above batch norm's, in points", "competitive"),
    ),
    seeds=1,
    needs_data="CIFAR-10",
    needs_training=True,
)
def table4(settings: Settings) -> Measurement:
    """Test error of a wide network with mixup and Cutout. Reference: fixup, appendix C.2, Table 4."""
    runs = train_rows(settings, _wide_rows(settings.scale))
    found = {row: by_seed(seeds, error) for row, seeds in runs.items()}
    model, mark = ("WRN-16-1", "WRN-16-1: ") if settings.quick else ("WRN-40-10", "")
    columns = {f"{mark}test error, {row}": numbers for row, numbers in found.items()}
    columns[f"{mark}Fixup - batch norm"] = minus(found["Fixup"], found["batch norm"])
    return Measurement(
        values=values_of(columns),
        panels=(
            *paper_panel(f"test error of {model}", found, {} if settings.quick else _TABLE4),
            *learning_panel(f"training accuracy of {model}, on mixed images", runs),
        ),
        notes=("the rows on SVHN were not run: SVHN is not at hand",),
    )
