"""A decoder writes on: against a loop without cache, by its probabilities, and within its window."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

import normfree as nf
from normfree.models.special_tokens import END, PAD, START, UNKNOWN
from normfree.models.transformer import Decoder
from normfree.train.text.generation import continue_line, continue_tokens
from tiny_text import tiny_text

VOCABULARY = 12


def decoder(seed: int = 0, method: str = "layernorm") -> Decoder:
    """Random weights, large enough that tokens differ in probability."""
    model = nf.build("decoder-2-16-32-2", method, num_classes=VOCABULARY, dropout=0.5)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draws))
    return model


def allowed(model: Decoder, context: list[int]) -> torch.Tensor:
    """Logits of what may come next, by one pass over all that is seen."""
    with torch.no_grad():
        logits = model(torch.tensor([context]))[0, -1].double()
    logits[[PAD, START, UNKNOWN]] = -math.inf
    return logits


def slow(model: Decoder, start: list[int], longest: int, window: int) -> list[int]:
    """The likeliest each time, without a cache; what is seen is counted by hand."""
    seen, first = [END, *start], max(0, 1 + len(start) - window)
    while len(seen) <= len(start) + longest:
        if len(seen) - first > window:
            first = len(seen) - window // 2
        token = int(allowed(model, seen[first:]).argmax())
        if token == END:
            break
        seen.append(token)
    return seen[1 + len(start) :]


@pytest.mark.parametrize("window", [2, 5, 8, 128])
@pytest.mark.parametrize("start", [[], [4], [5, 6, 7, 8, 9, 10, 11, 4, 5]])
def test_likeliest_continuation_is_that_of_a_loop_without_cache(start: list[int], window: int) -> None:
    lengths = set()
    for seed in range(6):
        model = decoder(seed).eval()
        found = continue_tokens(model, start, longest=20, temperature=0, window=window)
        assert found == slow(model, start, 20, window)
        lengths.add(len(found))
    assert max(lengths) > window or window > 20  # the window was full at least once


def test_draws_follow_the_probabilities() -> None:
    """Each token's count within 4.5 standard deviations, of 1,000 draws at two temperatures; not those of the other."""
    model, count = decoder(3).eval(), 1000
    expected = {t: torch.softmax(allowed(model, [END, 5]) / t, 0) for t in (0.5, 2.0)}
    for temperature, other in ((0.5, 2.0), (2.0, 0.5)):
        draws = torch.Generator().manual_seed(1)
        firsts = Counter[int]()
        for _ in range(count):
            found = continue_tokens(model, [5], longest=1, temperature=temperature, generator=draws)
            firsts[found[0] if found else END] += 1

        def far(probabilities: torch.Tensor, firsts: Counter[int] = firsts) -> float:
            spread = (count * probabilities * (1 - probabilities)).sqrt().clamp(min=1.0)
            counts = torch.tensor([firsts[token] for token in range(VOCABULARY)]).double()
            return float(((counts - count * probabilities) / spread).abs().max())

        assert far(expected[temperature]) < 4.5 < far(expected[other])
        assert not firsts[PAD] + firsts[START] + firsts[UNKNOWN]


def test_same_seed_writes_the_same_and_leaves_the_model_as_it_was() -> None:
    model = decoder().train()
    model.head.eval()
    state = torch.random.get_rng_state()
    first, second = (continue_tokens(model, [4, 5], longest=30, temperature=1.0) for _ in range(2))
    assert first == second
    draws = [torch.Generator().manual_seed(seed) for seed in range(5)]
    assert len({tuple(continue_tokens(model, [4, 5], longest=30, temperature=2.0, generator=g)) for g in draws}) > 1
    assert model.training
    assert not model.head.training
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("method", ["fixup", "rezero"])
def test_nothing_more_is_written_than_asked_for(method: str) -> None:
    model = decoder(1, method)
    assert continue_tokens(model, [4], longest=0) == []
    assert all(len(continue_tokens(model, [4], longest=n, window=4)) <= n for n in range(1, 9))


def test_line_stays_as_it_was_typed(tmp_path: Path) -> None:
    """What the vocabulary does not know, ligatures and runs of spaces, too; a new word has one space before it."""
    vocabulary = tiny_text(tmp_path).vocabulary()
    draws = torch.Generator().manual_seed(0)
    model = nf.build("decoder-1-16-32-2", "layernorm", num_classes=vocabulary.size, generator=draws)
    for line in ("a  b € 北京", "ﬁ a", "a b  ", "a ⁇ b", ""):
        lines = [
            continue_line(
                model, vocabulary, line, longest=8, temperature=1, generator=torch.Generator().manual_seed(seed)
            )
            for seed in range(20)
        ]
        added = [written.removeprefix(line) for written in lines]
        assert all(written.startswith(line) for written in lines)
        assert any(added)
        assert not any("⁇" in text for text in added)
        assert any(text.startswith(" ") for text in added) == bool(line.strip() == line != "")


@pytest.mark.parametrize("wrong", [{"longest": -1}, {"temperature": -0.1}, {"temperature": math.nan}, {"window": 1}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected at least 0 tokens, a temperature of at least 0"):
        continue_tokens(decoder(), [4], **wrong)
