"""The best rate over depth: what follows from runs, and which runs are asked for."""

from typing import Any

import pytest

from made_up_runs import checks_that, measure
from normfree.train import TrainConfig
from normfree_papers.claims.registry import get
from normfree_papers.claims.seed_metrics import EndedRun

CLAIM = get("beyond/transformer_rates")
LOST = {d: f"Fixup, bounded: BLEU lost at {d} layers" for d in (24, 96)}


def ended(score: float, loss: float) -> EndedRun:
    result = {"status": "finished", "bleu": {"score": score}, "validation": {"loss": loss, "accuracy": 0.5}}
    return EndedRun(result, ({"train_accuracy": 0.5},))


def depth_of(config: TrainConfig) -> int:
    return 2 * int(config.model.split("-")[1])


def with_best(best: dict[str, dict[int, float]], price: float = 3.0) -> Any:
    """Runs whose loss is lowest, and BLEU highest, at the given rate of a method and depth."""

    def make(_name: str, config: TrainConfig) -> EndedRun:
        off = config.lr != best[config.method][depth_of(config)]
        return ended(30.0 + 0.1 * config.seed - price * off, 2.0 + off)

    return make


SAME = {6: 1e-3, 24: 1e-3, 96: 1e-3}
FALLS = {6: 3e-3, 24: 1e-3, 96: 3e-4}


def test_same_rate_at_every_depth_loses_nothing() -> None:
    best = {"fixup_bounded": SAME, "fixup": FALLS, "layernorm": SAME}
    measurement, judgement, runs = measure(CLAIM, with_best(best), seeds=(0, 1, 2))
    assert judgement.status == "holds"
    assert measurement.values[LOST[96]] == [0.0, 0.0, 0.0]
    assert measurement.values["Fixup: BLEU lost at 96 layers"] == pytest.approx([3.0, 3.0, 3.0])
    assert measurement.values["Fixup: best rate at 96 layers over that at 6"] == pytest.approx([0.1])
    # 27 runs to choose; then two more seeds of 9 networks at their best rate, and of two at that of 6 layers
    assert len(runs.asked) == 27 + 2 * (9 + 2)
    assert {config.seed for config in runs.asked.values()} == {0, 1, 2}


def test_rate_that_falls_with_depth_refutes_it() -> None:
    best = dict.fromkeys(("fixup_bounded", "fixup", "layernorm"), FALLS)
    measurement, judgement, _ = measure(CLAIM, with_best(best), seeds=(0, 1, 2))
    assert judgement.status == "fails"
    assert checks_that(judgement, "fails") == set(LOST.values())
    assert measurement.panels[0].curves[0].values == (3e-3, 1e-3, 3e-4)


def test_networks_that_do_not_translate_have_no_best_rate() -> None:
    best = dict.fromkeys(("fixup_bounded", "fixup", "layernorm"), SAME)
    runs = with_best(best)

    def silent(name: str, config: TrainConfig) -> EndedRun:
        return ended(1.0, runs(name, config).result["validation"]["loss"])

    _, judgement, _ = measure(CLAIM, silent, seeds=(0, 1, 2))
    assert judgement.status == "fails"
    assert "Fixup, bounded: lowest BLEU of all depths" in checks_that(judgement, "fails")
    assert not checks_that(judgement, "fails") & set(LOST.values())


def test_missing_rate_leaves_the_choice_open() -> None:
    best = dict.fromkeys(("fixup_bounded", "fixup", "layernorm"), SAME)
    runs = with_best(best)

    def make(name: str, config: TrainConfig) -> EndedRun | None:
        lacks = config.method == "fixup_bounded" and depth_of(config) == 96 and config.lr == 3e-3
        return None if lacks else runs(name, config)

    measurement, judgement, asked = measure(CLAIM, make, seeds=(0, 1, 2))
    assert LOST[96] not in measurement.values
    assert LOST[24] in measurement.values
    assert judgement.status != "holds"
    assert len(asked.missing) == 1


def test_nothing_is_measured_without_runs() -> None:
    measurement, judgement, runs = measure(CLAIM, lambda _n, _c: None, seeds=(0, 1, 2))
    assert (measurement.values, measurement.panels, judgement.status) == ({}, (), "not run")
    assert len(runs.missing) == 27
    assert {depth_of(c) for c in runs.missing.values()} == {6, 24, 96}
    assert {c.weight_decay for c in runs.missing.values()} == {1e-4}
