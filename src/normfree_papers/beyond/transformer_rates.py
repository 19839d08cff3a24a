"""Does the best learning rate of `fixup_bounded` stay the same over depth?

Its first update is Θ(η) at any depth (see fixup/sec4_3), where that of `fixup` grows as L^(2/3). If the first update
decided about training, the best rate of `fixup_bounded` would be the same at any depth, and that of `fixup` would fall.
A rate is chosen by the loss on the validation sentences of seed 0, and judged by BLEU on the test sentences of all
seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from normfree.report.panels import Curve, Panel
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, expect, training_claim
from normfree_papers.claims.made_up_language import made_up_language
from normfree_papers.claims.seed_metrics import EndedRun, Numbers, NumbersByRow, combined

_BOUNDED, _FIXUP, _NORM = "Fixup, bounded", "Fixup", "layer norm"
_METHODS = {_BOUNDED: "fixup_bounded", _FIXUP: "fixup", _NORM: "layernorm"}
_DEPTHS, _RATES = (6, 24, 96), (3e-4, 1e-3, 3e-3)
_QUICK_DEPTHS, _QUICK_RATES = (2, 4), (2e-3, 6e-3)
_TUNED = 0  # the seed by which rates are chosen
Place = tuple[str, int]  # a method and the number of layers


def _config(settings: Settings, label: str, depth: int, rate: float) -> TrainConfig:
    half, method = depth // 2, _METHODS[label]
    if settings.quick:
        data = made_up_language((settings.data or Path(".data")) / "backwards")
        small = {"model": f"transformer-{half}-{half}-32-64-4", "data": data, "batch_size": 1000, "epochs": 20}
        return recipe("translation", method=method, lr=rate, dropout=0.0, warmup=50, **small)
    changes = {"dropout": 0.1, "epochs": 6, "warmup": 300, "beam": 1}
    return recipe("translation", model=f"transformer-{half}-{half}-128-256-4", method=method, lr=rate, **changes)


def _loss(run: EndedRun) -> float:
    """Loss on the validation sentences, by which a rate is chosen."""
    return math.inf if run.diverged else float(run.result["validation"]["loss"])


def _trained(
    settings: Settings, places: Sequence[Place], rates: Sequence[float]
) -> tuple[dict[Place, float], NumbersByRow]:
    """The best rate of every place, and BLEU by seed at this rate and at that of the shallowest network."""
    rows = {(*place, rate): _config(settings, *place, rate) for place in places for rate in rates}
    words = "{}, {} layers, rate {:g}"
    tuned = replace(settings, seeds=(_TUNED,)).train_rows(rows, words)
    best: dict[Place, float] = {}
    for place in places:
        losses = {rate: _loss(run) for rate in rates for run in tuned[*place, rate].values()}
        if len(losses) == len(rates):  # only then is one of them the best
            best[place] = min(losses, key=lambda rate: losses[rate])
    shallowest = min(depth for _, depth in places)
    judged = {place: {best[place], best.get((place[0], shallowest), best[place])} for place in best}
    chosen = {(*place, rate): rows[*place, rate] for place, of in judged.items() for rate in of}
    return best, settings.train_rows(chosen, words).bleu_scores()


_STAYS = (
    "our reading of the word 'same': a loss of more than 1 BLEU to the best of the rates refutes it; it is 0 if the "
    "rate is the same"
)


@training_claim(
    id="beyond/transformer_rates",
    where="Our question on the best rate over depth",
    statement="The best learning rate of a fixup_bounded Transformer is the same at 6, 24 and 96 layers.",
    paper_value="none; it would follow from ‖Δf‖ = Θ(η) at any depth, if the first update decided about training",
    how="Recipe translation on Multi30k, 128 wide, 6 epochs, at 3 rates a factor of 3 apart (3e-4 to 3e-3), with "
    "Fixup, its bounded variant and layer norm before the sum; the loss on the validation sentences of seed 0 chooses "
    "the rate, and BLEU on the test sentences of three seeds judges it (full); two depths and two rates on made-up "
    "sentences (quick).",
    cost=Cost(quick_seconds=120, full_seconds=8500, device="gpu"),
    checks=(
        expect(f"{_BOUNDED}: BLEU lost at 24 layers", high=1.0, scale="full").reading(
            "BLEU at 24 layers that the best rate of 6 layers loses to the best one", why=_STAYS
        ),
        expect(f"{_BOUNDED}: BLEU lost at 96 layers", high=1.0, scale="full").reading(
            "BLEU at 96 layers that the best rate of 6 layers loses to the best one", why=_STAYS
        ),
        expect(f"{_BOUNDED}: lowest BLEU of all depths", low=10.0).reading(
            "BLEU at the best rate, the lowest of all depths: the networks translate",
            why="our reading of the word 'best': below 10 BLEU a network does not translate, and no rate is best",
        ),
        expect(f"{_BOUNDED}: BLEU lost at 4 layers", high=10.0, scale="quick").reading(
            "BLEU at 4 layers that the best rate of 2 layers loses to the best one",
            why="our reading of the word 'same' for made-up sentences: a loss of more than 10 BLEU refutes it",
        ),
        aside(f"{_FIXUP}: BLEU lost at 96 layers", low=1.0, scale="full").derived(
            "the same for Fixup, whose best rate should fall with depth",
            why="the update of 96 layers is 16^(2/3) = 6.3 times that of 6, so that its rate is 1 or 2 steps too "
            "large; Adam may hide it",
        ),
        aside(f"{_BOUNDED} - {_FIXUP} at 96 layers", low=0.0, scale="full").reading(
            "BLEU of the bounded variant less that of Fixup, each at its best rate: the correction pays at depth",
            why="our reading of the word 'correction': it is not worse where it matters most; below 0 refutes it",
        ),
    ),
    seeds=3,
    needs_data="Multi30k",
    departures=(
        "Adam with a warm-up, where the theory is of one step of SGD",
        "rates a factor of 3 apart: a smaller change of the best rate is not seen",
        "layer norm before the sum, where the baseline of fixup's authors has it after the sum",
    ),
)
def transformer_rates(settings: Settings) -> Measurement:
    """The best learning rate of three methods over depth. Reference: ours."""
    depths, rates = (_QUICK_DEPTHS, _QUICK_RATES) if settings.quick else (_DEPTHS, _RATES)
    labels = (_BOUNDED, _FIXUP) if settings.quick else tuple(_METHODS)
    best, scores = _trained(settings, list(product(labels, depths)), rates)

    def score(label: str, depth: int, chosen_at: int) -> Numbers:
        """BLEU by seed at the best rate of another depth."""
        return scores[label, depth, best.get((label, chosen_at))]

    columns: dict[str, Numbers | list[float]] = {}
    curves = []
    for label in labels:
        at_best = {depth: score(label, depth, depth) for depth in depths}
        columns |= {f"{label}: BLEU at {depth} layers": numbers for depth, numbers in at_best.items()}
        columns[f"{label}: lowest BLEU of all depths"] = combined(at_best.values(), min)
        for depth in depths[1:]:
            columns[f"{label}: BLEU lost at {depth} layers"] = at_best[depth] - score(label, depth, depths[0])
        found = {depth: best[label, depth] for depth in depths if (label, depth) in best}
        curves += [Curve(label, tuple(found.values()), tuple(map(float, found)))] if found else []
        if depths[0] in found:
            name = f"{label}: best rate at {{}} layers over that at {depths[0]}"
            columns |= {name.format(depth): [rate / found[depths[0]]] for depth, rate in found.items()}
    for depth in depths:
        ours, theirs = (score(label, depth, depth) for label in (_BOUNDED, _FIXUP))
        columns[f"{_BOUNDED} - {_FIXUP} at {depth} layers"] = ours - theirs
    return Measurement(
        values=columns,
        panels=(Panel("best learning rate", tuple(curves), "rate", "layers", log_x=True),) if curves else (),
        notes=(f"a rate is chosen by the validation loss of seed {_TUNED}; a diverged run counts as 0 BLEU",),
    )
