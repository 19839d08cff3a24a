"""The page of a run: verdicts in words, the right curves and numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normfree.report.page import render_page
from normfree.train.run.run_page import judge_run, run_page
from watched_folders import RUNNING, records

GUESS = math.log(10)
SIGNAL: dict[str, Any] = {
    "step": 0, "epoch": 0, "status": "preserved", "sentence": "the signal is preserved", "forward": [1.0, 1.1, 1.2],
    "backward": [1.0, 0.9, 0.8], "forward_in_all": 1.2, "backward_in_all": 0.8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rating", "headline"),
    [
        ({}, "good", "learning"),
        ({"validation": (GUESS, 0.1)}, "warn", "not learning so far"),
        ({"validation": (GUESS, 0.1), "epoch": 0.5}, "info", "too early to tell"),
        ({"validation": (GUESS, 0.5)}, "good", "learning"),  # many are right, and a few are very wrong
        ({"validation": (GUESS, 0.5), "unit": "tokens"}, "warn", "not learning so far"),
        ({"validation": None, "loss": GUESS, "accuracy": 0.1}, "warn", "not learning so far"),
        ({"classes": 0, "validation": (99.0, 0.0)}, "good", "learning"),  # a guess is not known
        ({"state": "starting", "epoch": None, "loss": None}, "info", "starting"),
        ({"state": "running", "loss": None}, "info", "running"),
        ({"state": "finished"}, "good", "finished"),
        ({"state": "finished", "test": (GUESS, 0.1)}, "warn", "finished at chance"),
        ({"state": "diverged", "loss": math.nan}, "bad", "diverged"),
        ({"state": "stopped"}, "warn", "stopped"),
        ({"state": "damaged", "note": "why"}, "bad", "damaged"),
    ],
)
def test_verdict_is_in_words(changes: dict[str, Any], rating: str, headline: str) -> None:
    assert judge_run(replace(RUNNING, **changes))[:2] == (rating, headline)


def test_verdict_says_how_to_continue_if_the_run_has_ended() -> None:
    stopped = judge_run(replace(RUNNING, state="stopped", folder=Path("runs/a b")))
    assert stopped[2] == "Continue it with: normfree train --resume 'runs/a b'"
    assert "--resume" not in judge_run(replace(RUNNING, state="unknown"))[2]


def test_verdict_names_the_guess_beside_the_loss() -> None:
    assert judge_run(RUNNING)[2] == "The validation loss is 1.2; a guess among 10 classes has 2.303."
    assert "tokens" in judge_run(replace(RUNNING, unit="tokens", classes=8000))[2]


def test_page_of_a_running_run_loads_itself_again_and_shows_the_epoch_so_far() -> None:
    page = run_page(RUNNING, "a", records(2), [SIGNAL])
    assert page.refresh > 0
    loss, accuracy, _ = page.panels
    assert [curve.name for curve in loss.curves] == ["training", "validation"]
    assert (loss.curves[0].x, loss.curves[0].values) == ((1.0, 2.0, 2.5), (2.0, 1.0, 0.7))
    assert loss.curves[1].x == (1.0, 2.0)
    assert accuracy.curves[0].values[-1] == pytest.approx(71.0)
    cards = {card.name: card for card in page.cards}
    assert cards["verdict"].headline == "running: learning"
    assert cards["progress"].headline == "epoch 2.5 of 4"
    assert cards["progress"].text == "about 1 min 0 s left, 5 s so far, 800 images/s"
    assert cards["validation"].headline == "40.00 %"
    assert cards["signal"].headline == "preserved at the start"


def test_page_of_a_finished_run_does_not_load_itself_again() -> None:
    page = run_page(replace(RUNNING, state="finished", epoch=2.0, left=None), "a", records(2))
    assert page.refresh == 0
    assert page.panels[0].curves[0].x == (1.0, 2.0)
    text = render_page(page)
    assert 'http-equiv="refresh"' not in text
    assert 'http-equiv="refresh"' in render_page(replace(page, refresh=5))


def test_page_before_the_first_step_has_no_curves_and_says_so() -> None:
    page = run_page(replace(RUNNING, state="starting", epoch=None, loss=None, accuracy=None, validation=None), "a", [])
    assert not page.panels
    assert page.notes == ("The curves begin when training does.",)
    render_page(page)
    assert run_page(replace(RUNNING, state="diverged"), "a", []).notes == (
        "There are no curves, because no epoch ended.",
    )


def test_page_of_a_diverged_run_can_be_drawn() -> None:
    bad = [{**records(1)[0], "train_loss": math.nan, "validation_loss": math.inf}]
    run = replace(RUNNING, state="diverged", loss=math.nan, accuracy=0.1, validation=(math.inf, 0.1), left=None)
    text = render_page(run_page(run, "a", bad))
    assert "diverged" in text
    assert "loss nan" in text


def test_page_of_a_text_run_has_perplexity_and_bleu() -> None:
    run = replace(RUNNING, state="finished", unit="tokens", test=(1.0, 0.6), bleu=31.456)
    cards = {card.name: card for card in run_page(run, "a", records(1)).cards}
    assert cards["test"].text == "loss 1, perplexity 2.72, BLEU 31.46"
    assert cards["validation"].text == "loss 1.2, perplexity 3.32"
    assert "perplexity" not in cards["training"].text


def test_signal_is_drawn_at_a_few_moments_the_first_and_the_last_among_them() -> None:
    signals = [{**SIGNAL, "step": 10 * e, "epoch": e, "forward": [1.0, 1.0 + e]} for e in (0, 1, 2, 4, 8, 16, 32, 64)]
    signals.append({**signals[2], "forward": [5.0, 5.0]})  # measured again by a resumed run
    (section,) = run_page(RUNNING, "a", [], signals).sections
    forward, backward = section.panels
    names = [curve.name for curve in forward.curves]
    assert (names[0], names[-1], len(names)) == ("at the start", "epoch 64", 5)
    assert [curve.name for curve in backward.curves] == names
    assert next(curve for curve in forward.curves if curve.name == "epoch 2").values == (5.0, 5.0)
    card = next(card for card in run_page(RUNNING, "a", [], signals).cards if card.name == "signal")
    assert card.text.startswith("After epoch ")


def test_markup_in_names_is_text() -> None:
    evil = "<script>alert(1)</script>"
    text = render_page(run_page(replace(RUNNING, model=evil, method=evil, data=evil), evil, records(1)))
    assert evil not in text
