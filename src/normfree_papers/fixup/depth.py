"""The claim of `fixup` on depth: the accuracy after one epoch, from 10 to 10,000 layers.

Reference: Zhang, Dauphin, Ma 2019, section 4.1, Figure 3. All accuracies are in per cent.
"""

from __future__ import annotations

from normfree.report.panels import Curve, Level, Panel
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, expect
from normfree_papers.claims.registry import claim
from normfree_papers.claims.seed_metrics import (
    CHANCE,
    DEAD,
    EMBEDDED,
    accuracy,
    bars,
    each,
    minus,
    points,
    train_rows,
    values_of,
)

_SMALL = {**EMBEDDED, "batch_size": 32}  # 188 steps an epoch
_METHODS = {"Fixup": "fixup", "batch norm": "batchnorm", "LSUV": "lsuv", "√½ scaling": "sqrt_half"}
_DEPTHS: dict[Scale, tuple[int, ...]] = {"quick": (10, 202), "full": (10, 100, 1_000, 10_000)}
_SLOW, _SLOW_FROM = "Fixup with scalars at 10/L", 1_000  # ours, and the layers from which on it is tried


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
                    f"{method} trains {depth:,} layers in the first epoch, to an accuracy in % of",
                    why="only a plot: well above the 10 % of chance; Fixup reached 35 to 38 % at 100 and 1,000 layers "
                    "before" + ("; this rate of the scalars is ours" if method == _SLOW else ""),
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
                f"{method} does not train {depth:,} layers at this rate, its accuracy in % is",
                why="the text; twice chance",
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
    how="Recipes depth_test and depth_test_10000: WRN-d-1 on CIFAR-10, one epoch at 0.1, batches of 128, at 10,000 "
    "layers of 64, from 1,000 on Fixup also with its scalars at 10/L of the rate instead of a tenth (full); 10 and 202 "
    "layers on the embedded images in batches of 32 (quick).",
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
    found = {row: each(seeds, accuracy) for row, seeds in runs.items()}
    columns = {f"accuracy, {row}": numbers for row, numbers in found.items()}
    for method, depth in rows:
        if method in ("Fixup", _SLOW):
            numbers, normed = (found[f"{name}, {depth:,} layers"] for name in (method, "batch norm"))
            columns[f"{method} - batch norm, {depth:,} layers"] = minus(numbers, normed)
    depths = _DEPTHS[settings.scale]
    curves: list[Curve] = []
    for method in dict.fromkeys(method for method, _ in rows):
        curves += points(method, [found.get(f"{method}, {depth:,} layers", {}) for depth in depths], at=depths)
    title = "test accuracy after one epoch of " + ("the embedded images" if settings.quick else "CIFAR-10")
    note = f"{shown}; points of one seed, or of equal ones, have none" if (shown := bars(curves)) else ""
    chance = (Level("chance", CHANCE),)
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
