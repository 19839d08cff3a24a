"""torchvision's ResNet-18 converted: its runs, the choice of a rate, and verdicts from made-up runs."""

import pytest

from made_up_runs import checks_that, measure
from normfree_papers.beyond.converted import EPOCHS, METHODS, RATES
from normfree_papers.beyond.equal_time import TUNING_SEED
from normfree_papers.claims.registry import get
from normfree_papers.claims.seed_metrics import EndedRun

CLAIM = get("beyond/converted")
SEEDS = (0, 1, 2)


def run(accuracy, held_out=0.5):
    score = {"accuracy": accuracy, "loss": 1.0}
    return EndedRun({"status": "finished", "test": score, "validation": {"accuracy": held_out}, "steps": 1}, ())


def made(accuracies, best):
    """Every method at its accuracy; the rate that is best on the held-out images."""
    return lambda _, c: run(accuracies[c.method], held_out=0.9 if c.lr == best else 0.5)


BETTER = {"fixup": 0.76, "nf": 0.77, "as built": 0.71}


def test_every_method_gets_four_trials_and_three_seeds_at_the_best_rate():
    measurement, judgement, runs = measure(CLAIM, made(BETTER, 0.1), seeds=SEEDS)
    trials = [c for c in runs.asked.values() if c.seed == TUNING_SEED]
    final = [c for c in runs.asked.values() if c.seed != TUNING_SEED]
    assert {(c.method, c.lr) for c in trials} == {(m, rate) for m in METHODS.values() for rate in RATES}
    assert {(c.method, c.lr, c.seed) for c in final} == {(m, 0.1, s) for m in METHODS.values() for s in SEEDS}
    assert {(c.model, c.epochs, c.validation) for c in runs.asked.values()} == {("torchvision:resnet18", EPOCHS, 0.1)}
    assert judgement.status == "holds"
    assert measurement.values["NF - as built"] == pytest.approx([6.0] * 3)
    assert CLAIM.cost.full_seconds == pytest.approx(len(runs.asked) * (25 + 4.3 * EPOCHS), rel=0.02)


@pytest.mark.parametrize(("best", "edges"), [(0.1, 0), (0.3, 1)])
def test_rate_at_an_edge_of_the_grid_is_said(best, edges):
    notes = measure(CLAIM, made(BETTER, best), seeds=SEEDS)[0].notes
    assert sum("an edge" in note for note in notes) == edges


def test_claim_fails_where_a_converted_model_is_behind():
    _, judgement, _ = measure(CLAIM, made({**BETTER, "fixup": 0.7}, 0.1), seeds=SEEDS)
    assert checks_that(judgement, "fails") == {"Fixup - as built"}


def test_method_without_all_trials_has_no_final_run():
    def make(name, config):
        return None if name == f"tuning, NF, rate 0.3, seed {TUNING_SEED}" else made(BETTER, 0.1)(name, config)

    values = measure(CLAIM, make, seeds=SEEDS)[0].values
    assert "test accuracy, NF" not in values
    assert "Fixup - as built" in values
