"""A decoder writes on: against a loop without cache, by its probabilities, and within its window.

Translation: lines in, lines out, in the order given; BLEU with its signature.
"""

from __future__ import annotations

import builtins
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normfree.models.transformer import Decoder, Memory
from normfree.nn.attention import END, PAD, SPECIAL, START, UNKNOWN
from normfree.train.text import generation as translating
from normfree.train.text.generation import bleu, continue_line, continue_tokens, translate, translate_tokens
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
    """Each token's count within 4.5 standard deviations, of 300 draws at two temperatures; not those of the other."""
    model, count = decoder(3).eval(), 300
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


ALPHABET = "abcdefgh \n"


class Letters:
    """A vocabulary of single letters."""

    size = SPECIAL + len(ALPHABET)

    def encode(self, text: str) -> list[int]:
        return [SPECIAL + ALPHABET.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        assert not {PAD, START, END} & set(ids)
        return "".join(ALPHABET[number - SPECIAL] for number in ids)


class Mirror(nn.Module):
    """A model that is sure of the source's tokens, from the last to the first, and then of END."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def encode(self, source: Tensor) -> Memory:
        self.shapes.append((source.shape[0], source.shape[1]))
        assert ((source == END).sum(1) == 1).all()
        assert ((source == PAD).long().diff(dim=1) >= 0).all(), "padding stands at the end"
        return Memory(source.unsqueeze(2).double(), source != PAD)

    def start_cache(self, memory: Memory, length: int) -> Mirror.Place:
        return Mirror.Place(memory)

    def decode(self, target: Tensor, memory: Memory, cache: Mirror.Place) -> Tensor:
        source = cache.memory.states.squeeze(2).long()
        words = (source != PAD).sum(1) - 1
        at = words - 1 - cache.step
        next_ = torch.where(at < 0, END, source.gather(1, at.clamp(min=0).unsqueeze(1)).squeeze(1))
        cache.step += 1
        return 20.0 * nn.functional.one_hot(next_, Letters.size).double().unsqueeze(1)

    class Place:
        def __init__(self, memory: Memory) -> None:
            self.memory, self.step = memory, 0

        def reorder(self, index: Tensor, *, memory: bool = True) -> None:
            if memory:
                self.memory = Memory(self.memory.states[index], self.memory.real[index])


def some_lines(count: int, longest: int = 30) -> Iterator[str]:
    draw = random.Random(3)
    for _ in range(count):
        yield "".join(draw.choice("abcdefgh") for _ in range(draw.randint(0, longest)))


@pytest.mark.parametrize("beam", [1, 5])
def test_translations_stand_in_the_order_of_the_lines(beam: int) -> None:
    lines = list(some_lines(60))
    model = Mirror()
    found = translate(model, Letters(), lines, beam=beam, sentences=7, tokens=100)
    assert found == [line[::-1] for line in lines]
    assert all(rows <= 7 and (rows == 1 or rows * width <= 100) for rows, width in model.shapes)
    assert [width for _, width in model.shapes] == sorted((width for _, width in model.shapes), reverse=True)
    real = sum(len(line) + 1 for line in lines if line)
    assert real > 0.9 * sum(rows * width for rows, width in model.shapes), "sorted by length, little is padded"


def test_an_empty_line_gives_an_empty_line() -> None:
    model = Mirror()
    assert translate(model, Letters(), ["", "abc", "  ", "\n", "d"]) == ["", "cba", "", "", "d"]
    assert model.shapes == [(2, 4)]
    assert translate(model, Letters(), [""]) == [""]
    assert translate(model, Letters(), []) == []
    assert len(model.shapes) == 1, "the model is not asked"


def test_a_translation_is_one_line() -> None:
    assert translate(Mirror(), Letters(), ["ab\ncd"]) == ["dc ba"]


def test_a_long_sentence_has_a_batch_of_its_own() -> None:
    model = Mirror()
    assert translate(model, Letters(), ["a" * 50, "b"], tokens=10) == ["a" * 50, "b"]
    assert model.shapes == [(1, 51), (1, 2)]


def test_batches_do_not_change_a_translation() -> None:
    torch.manual_seed(0)
    model = nf.build("transformer-1-1-8-16-2", method="layernorm", num_classes=Letters.size, dropout=0.3).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0 if "cross" in name else 2.0)
    lines = list(some_lines(25, 9))
    alone = translate(model, Letters(), lines, sentences=1, beam=3, longest=9)
    assert translate(model, Letters(), lines, sentences=10, beam=3, longest=9) == alone
    assert translate(model, Letters(), lines[::-1], beam=3, longest=9) == alone[::-1]
    assert len(set(alone)) > 5, "all are the same: the test shows nothing"
    assert [translate(model, Letters(), [line], beam=3, longest=9)[0] for line in lines] == alone
    assert model.training


def test_tokens_need_no_vocabulary() -> None:
    assert translate_tokens(Mirror(), [[5, 6, 7], [], [8]]) == [[7, 6, 5], [], [8]]


def test_another_vocabulary_is_refused() -> None:
    model = nf.build("transformer-1-1-8-16-2", method="fixup", num_classes=Letters.size + 1)
    with pytest.raises(ValueError, match=r"expected a vocabulary of 15 tokens, those of the model's embedding, got 14"):
        translate(model, Letters(), ["a"])


@pytest.mark.parametrize("bad", [{"sentences": 0}, {"tokens": 0}])
def test_empty_batches_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected batches of 1 or more sentences and tokens"):
        translate(Mirror(), Letters(), ["a"], **bad)


def test_bleu_is_that_of_sacrebleu() -> None:
    pytest.importorskip("sacrebleu")
    references = ["the cat sat on the mat today", "a dog runs", "two men are cooking in a kitchen ."]
    score, signature = bleu(references, references)
    assert score == pytest.approx(100.0)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    # One line by hand: 6 of 7 words, and 4 of 6, 2 of 5 and 1 of 4 runs of two, three and four.
    one = bleu(["the cat sat on a mat today"], ["the cat sat on the mat today"]).score
    assert one == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    assert bleu(["The cat sat on the mat today"], ["the cat sat on the mat today"]).score < 100
    assert bleu(["", "", ""], references).score == 0


def test_bleu_refuses_unequal_counts() -> None:
    with pytest.raises(ValueError, match="got 1 translations and 2 references"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="at least one, got 0"):
        bleu([], [])


def test_bleu_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *rest: object, **options: object) -> object:
        if name.startswith("sacrebleu"):
            raise ImportError(name)
        return load(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"needs sacrebleu.*pip install '\.\[text\]'"):
        translating.bleu(["a"], ["a"])
