"""Does the best learning rate of `fixup_bounded` stay the same over depth?

Its first update is Θ(η) at any depth (see fixup/sec4_3), where that of `fixup` grows as L^(2/3). If the first update
decided about training, the best rate of `fixup_bounded` would be the same at any depth, and that of `fixup` would fall.
A rate is chosen by the loss on the validation sentences of seed 0, and judged by BLEU on the test sentences of all
seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from normfree.report.panels import Curve, Panel
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, expect, training_claim
from normfree_papers.claims.seed_metrics import Numbers, Trained, bleu, combined, minus
from normfree_papers.claims.translation_runs import made_up_language

_BOUNDED, _FIXUP, _NORM = "Fixup, bounded", "Fixup", "layer norm"
_METHODS = {_BOUNDED: "fixup_bounded", _FIXUP: "fixup", _NORM: "layernorm"}
_DEPTHS, _RATES = (6, 24, 96), (3e-4, 1e-3, 3e-3)
_QUICK_DEPTHS, _QUICK_RATES = (2, 4), (2e-3, 6e-3)
_TUNED = 0  # the seed by which rates are chosen


class _Place(NamedTuple):
    """A method at a depth."""

    label: str
    depth: int


def _run(settings: Settings, place: _Place, rate: float, seed: int) -> TrainConfig:
    half, method = place.depth // 2, _METHODS[place.label]
    if settings.quick:
        data = made_up_language((settings.data or Path(".data")) / "backwards")
        small = {"model": f"transformer-{half}-{half}-32-64-4", "data": data, "batch_size": 1000, "epochs": 20}
        return recipe("translation", method=method, lr=rate, seed=seed, dropout=0.0, warmup=50, **small)
    model = f"transformer-{half}-{half}-128-256-4"
    changes = {"dropout": 0.1, "epochs": 6, "warmup": 300, "beam": 1}
    return recipe("translation", model=model, method=method, lr=rate, seed=seed, **changes)


def _loss(run: Trained) -> float:
    """Loss on the validation sentences, by which a rate is chosen."""
    return math.inf if run.diverged else float(run.result["validation"]["loss"])


class _Rates:
    """The runs of all methods, depths and rates that are needed, in two rounds: choose the rates, then judge them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.depths: tuple[int, ...] = _QUICK_DEPTHS if settings.quick else _DEPTHS
        rates = _QUICK_RATES if settings.quick else _RATES
        self.labels = (_BOUNDED, _FIXUP) if settings.quick else tuple(_METHODS)
        places = [_Place(label, depth) for label in self.labels for depth in self.depths]
        self.tried = self._train([(place, rate, _TUNED) for place in places for rate in rates])
        self.best: dict[_Place, float] = {}
        for place in places:
            losses = {rate: _loss(self.tried[place, rate, _TUNED]) for rate in rates if self._has(place, rate)}
            if len(losses) == len(rates):  # only then is one of them the best
                self.best[place] = min(losses, key=lambda rate: losses[rate])
        wanted = [(place, rate) for place in self.best for rate in self._judged(place)]
        self.tried |= self._train([(place, rate, seed) for place, rate in wanted for seed in settings.seeds])

    def _has(self, place: _Place, rate: float) -> bool:
        return (place, rate, _TUNED) in self.tried

    def _judged(self, place: _Place) -> tuple[float, ...]:
        """The best rate of this depth, and that of the shallowest network."""
        shallow = self.best.get(_Place(place.label, self.depths[0]))
        return tuple({self.best[place], *([] if shallow is None else [shallow])})

    def _train(self, wanted: list[tuple[_Place, float, int]]) -> dict[tuple[_Place, float, int], Trained]:
        names = {key: f"{key[0].label}, {key[0].depth} layers, rate {key[1]:g}, seed {key[2]}" for key in wanted}
        found = self.settings.train({name: _run(self.settings, *key) for key, name in names.items()})
        return {key: run for key, name in names.items() if (run := found[name]) is not None}

    def scores(self, place: _Place, rate: float) -> Numbers:
        """BLEU by seed."""
        keys = {seed: (place, rate, seed) for seed in self.settings.seeds}
        return {seed: bleu(self.tried[key]) for seed, key in keys.items() if key in self.tried}

    def at_best(self, place: _Place) -> Numbers:
        """BLEU by seed, at the best rate of this depth."""
        return self.scores(place, self.best[place]) if place in self.best else {}

    def lost(self, place: _Place) -> Numbers:
        """BLEU that the best rate of the shallowest network loses at this depth, by seed."""
        shallow = _Place(place.label, self.depths[0])
        if shallow not in self.best:
            return {}
        return minus(self.at_best(place), self.scores(place, self.best[shallow]))

    def columns(self) -> Mapping[str, Numbers]:
        """The numbers of all checks."""
        out: dict[str, Numbers] = {}
        for label in self.labels:
            at_best = [self.at_best(_Place(label, depth)) for depth in self.depths]
            out |= {f"{label}: BLEU at {d} layers": n for d, n in zip(self.depths, at_best, strict=True)}
            out[f"{label}: lowest BLEU of all depths"] = combined(at_best, min)
            out |= {f"{label}: BLEU lost at {d} layers": self.lost(_Place(label, d)) for d in self.depths[1:]}
        for depth in self.depths:
            ours, theirs = (self.at_best(_Place(label, depth)) for label in (_BOUNDED, _FIXUP))
            out[f"{_BOUNDED} - {_FIXUP} at {depth} layers"] = minus(ours, theirs)
        return out

    def panel(self) -> tuple[Panel, ...]:
        """The best rate over depth."""
        curves = []
        for label in self.labels:
            found = {float(d): self.best[_Place(label, d)] for d in self.depths if _Place(label, d) in self.best}
            curves += [Curve(label, tuple(found.values()), tuple(found))] if found else []
        return (Panel("best learning rate", tuple(curves), "rate", "layers", log_x=True),) if curves else ()


_STAYS = (
    "our reading of the word 'same': a loss of more than 1 BLEU to the best of the rates refutes it; it is 0 if the "
    "rate is the same"
)


@training_claim(
    id="beyond/transformer_rates",
    where="Item C: the best rate over depth",
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
        "layer norm before the sum, where the baseline of fixup's authors has it behind",
    ),
)
def transformer_rates(settings: Settings) -> Measurement:
    """The best learning rate of three methods over depth. Reference: ours."""
    rates = _Rates(settings)
    ratios = {
        f"{place.label}: best rate at {place.depth} layers over that at {rates.depths[0]}": [rate / shallow]
        for place, rate in rates.best.items()
        if (shallow := rates.best.get(_Place(place.label, rates.depths[0]))) is not None
    }
    note = f"a rate is chosen by the validation loss of seed {_TUNED}; a diverged run counts as 0 BLEU"
    return Measurement(values={**rates.columns(), **ratios}, panels=rates.panel(), notes=(note,))
