"""Decoding of a Transformer's translations by beam search."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normfree.models.transformer import DecoderCache, Transformer
from normfree.nn.attention import END, PAD, START
from normfree.nn.model_state import eval_mode

Longest = int | Callable[[int], int]
"""The most tokens of a translation, not counting END: a number, or a function of the length of the source."""

_SPECIAL = (PAD, START, END)
_MOST_PENALTY = 10  # n^penalty stays far below the largest float
_CHECK_EVERY = 8  # steps on a GPU between checks whether all sentences are done; each check waits for the device


def source_plus_50(length: int) -> int:
    """Return the default maximum length of a translation, for a source of `length` tokens.

    Reference: Vaswani 2017, section 6.1.
    """
    return length + 50


@torch.no_grad()
def beam_search(
    model: Transformer,
    source: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    longest: Longest = source_plus_50,
) -> list[list[int]]:
    """Translate by keeping the `beam` best hypotheses at each step; return the best one that ended.

        score(y) = log p(y | x) / n^length_penalty,   n = the number of tokens of y, including END

    With a penalty of 0 the likeliest translation wins, which tends to be short; 1 compares means over tokens; larger
    penalties favour long translations. This is the penalty of fairseq, which made the results of fixup's Table 3. With
    that of Wu 2016, ((5 + n)/6)^α, no α gives a mean over tokens.

    Each step extends every hypothesis that has not ended by every token, including END, and keeps the `beam` best
    scores among the extensions and the hypotheses that ended before. So an ended hypothesis keeps its place only while
    it is among the best, but the best one is remembered. A beam of 1 takes the likeliest token at each step; ties go to
    END, then to the smallest token. A beam as wide as there are sequences finds the best of all. At `longest` tokens
    only END can follow, and its probability counts. A sentence is done when no open hypothesis can pass the best ended
    one any more:

        log p(y | x) / max over later n of n^length_penalty ≤ the best score of an ended hypothesis

    PAD and START never occur in a translation; the probability that the model gives them is lost.

    Differs: fairseq stops after `beam` ended hypotheses, however bad they are. If a model is sure of its words, the
    other places of the beam are left to chance, ended hypotheses fill them, and a long sentence is cut off.

    Args:
        model: The Transformer. It is in evaluation mode meanwhile; the mode of every module is restored.
        source: The tokens of the sentences (N, S), each row ended by END and then padded. A row with END alone is an
            empty sentence, and is translated like any other.
        beam: The number of hypotheses per sentence.
        length_penalty: The exponent of the length in the score.
        longest: The maximum number of tokens of a translation; END counts in the length of the source.

    Returns:
        N lists of tokens without START, END and PAD.

    Reference: Ott 2019, "fairseq", for the penalty; Wu 2016, "Google's neural machine translation system", section 7,
    for the other one.

    Raises:
        ValueError: If an argument is not as described.
    """
    if beam < 1 or not abs(length_penalty) <= _MOST_PENALTY:
        raise ValueError(
            f"expected a beam of 1 or more and a length penalty from -{_MOST_PENALTY} to {_MOST_PENALTY}, got {beam} "
            f"and {length_penalty}; 5 and 1.0 are usual"
        )
    limits = _limits(model, source, longest)
    results: list[list[int]] = [[] for _ in limits]
    if not limits:
        return results
    with eval_mode(model):
        memory = model.encode(source)
        search = _Beams(source.new_tensor(limits), max(limits), beam, length_penalty)
        cache = model.start_cache(memory, max(limits) + 1)
        if beam > 1:
            cache.reorder(torch.arange(len(source), device=source.device).repeat_interleave(beam))
        last, places = source.new_full((len(source) * beam, 1), START), list(range(len(limits)))
        for step in range(max(limits) + 1):
            last, parents = search.extend(model.decode(last, memory, cache)[:, -1], step)
            if beam > 1:
                cache.reorder(parents, memory=False)
            if _checks_at(step, source.device):
                last, places = _drop_done(search, cache, last, places, results)
                if not places:
                    break
    for place, found in zip(places, search.best_tokens(), strict=True):
        results[place] = found
    return results


class _Beams:
    """The hypotheses of N sentences, `beam` per sentence, and the best ended one of each so far."""

    def __init__(self, most: Tensor, room: int, beam: int, penalty: float) -> None:
        rows = len(most)
        # Wide enough that adding to two logits never makes them equal: the order is that of the model.
        dtype = torch.float32 if most.device.type == "mps" else torch.float64
        self.beam = beam
        self.penalty = penalty
        self.special = most.new_tensor(_SPECIAL)
        self.most = most
        self.tokens = most.new_full((rows, beam, room), END)
        self.log_p = torch.full((rows, beam), -math.inf, dtype=dtype, device=most.device)  # -∞ where a hypothesis ended
        self.ended = self.log_p.clone()  # the score where it ended, else -∞
        self.log_p[:, 0] = 0.0  # all hypotheses are one at first
        self.best = self.ended[:, 0]
        self.best_row = self.tokens[:, 0]
        self.done = torch.zeros_like(most, dtype=torch.bool)

    def rows(self, sentences: Tensor) -> Tensor:
        """Return the rows of the hypotheses of sentences: (n,) → (n · beam,)."""
        places = torch.arange(self.beam, device=sentences.device)
        return (sentences.unsqueeze(1) * self.beam + places).view(-1)

    def extend(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Extend all hypotheses, which have `step` tokens.

        Shapes: logits (N · beam, V) → the new tokens (N · beam, 1), and the rows of their hypotheses (N · beam,).
        """
        rows, beam, dtype = len(self.most), self.beam, self.log_p.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        before = self.log_p - logits.logsumexp(1).to(dtype).view(rows, beam)
        end = before + logits[:, END].to(dtype).view(rows, beam)
        # The best words of each hypothesis first, so that no other tensor is as large as the vocabulary.
        highest, words = _largest(logits.index_fill(1, self.special, -math.inf), min(beam, logits.shape[1]))
        count = highest.shape[1]
        going = (before.unsqueeze(2) + highest.to(dtype).view(rows, beam, count)).flatten(1)
        going = going.masked_fill((self.most <= step).unsqueeze(1), -math.inf)

        # Candidates: hypotheses that end now, that ended before, that continue. The first of equal scores wins: END, in
        # a beam of 1.
        divisor = (step + 1) ** self.penalty
        scores, kept = _largest(torch.cat([end / divisor, self.ended, going / divisor], 1), beam)
        word = kept - 2 * beam  # among the words; negative for an end
        parents = torch.where(word < 0, kept % beam, word // count)
        self._remember_best(scores.masked_fill(kept >= beam, -math.inf), parents)
        self.log_p = going.gather(1, word.clamp(min=0)).masked_fill(word < 0, -math.inf)
        self.ended = scores.masked_fill(word >= 0, -math.inf)
        # log p ≤ 0, so the best case is the largest later divisor: that of the next length, or of the longest.
        divisors = ((self.most + 1).to(dtype) ** self.penalty).clamp(min=(step + 2) ** self.penalty)
        self.done = self.done | (self.best >= self.log_p.amax(1) / divisors) | (self.most <= step)

        token = words.view(rows, -1).gather(1, word.clamp(min=0)).masked_fill(word < 0, END)
        self.tokens = self.tokens.gather(1, parents.unsqueeze(2).expand_as(self.tokens))
        if step < self.tokens.shape[2]:
            self.tokens[:, :, step] = token
        first = torch.arange(rows, device=token.device).unsqueeze(1) * beam
        return token.view(-1, 1), (first + parents).view(-1)

    def _remember_best(self, scores: Tensor, parents: Tensor) -> None:
        """Keep the hypotheses that end now and have the best score so far; -∞ is the score of the others."""
        score, which = scores.max(1, keepdim=True)
        row = parents.gather(1, which).unsqueeze(2).expand(-1, 1, self.tokens.shape[2])
        # A sentence that is done does not change: its result must not depend on when that is noticed.
        better = (score > self.best.unsqueeze(1)) & ~self.done.unsqueeze(1)
        self.best_row = torch.where(better, self.tokens.gather(1, row).squeeze(1), self.best_row)
        self.best = torch.where(better, score, self.best.unsqueeze(1)).squeeze(1)

    def keep(self, sentences: Tensor) -> None:
        """Drop all other sentences."""
        for name in ("most", "tokens", "log_p", "ended", "best", "best_row", "done"):
            setattr(self, name, getattr(self, name)[sentences])

    def best_tokens(self) -> list[list[int]]:
        """Return the tokens of the best ended hypotheses."""
        return [row[: row.index(END)] if END in row else row for row in self.best_row.tolist()]


def _drop_done(
    search: _Beams, cache: DecoderCache, last: Tensor, places: list[int], results: list[list[int]]
) -> tuple[Tensor, list[int]]:
    """Once half of the sentences are done, store their results, and continue with the others."""
    left = (~search.done).nonzero().squeeze(1)
    if 2 * len(left) > len(places):
        return last, places
    for place, found in zip(places, search.best_tokens(), strict=True):
        results[place] = found
    rows = search.rows(left)
    search.keep(left)
    cache.reorder(rows)
    return last[rows], [places[row] for row in left.tolist()]


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row in order; if `count` is 1, the first of equals, unlike `topk`."""
    if count == 1:
        highest, index = values.max(1, keepdim=True)
    else:
        highest, index = values.topk(count)
    return highest, index


def _checks_at(step: int, device: torch.device) -> bool:
    return device.type == "cpu" or step % _CHECK_EVERY == _CHECK_EVERY - 1


def _limits(model: Transformer, source: Tensor, longest: Longest) -> list[int]:
    """Check the source and the model, and return the maximum number of tokens of each translation."""
    if not all(hasattr(model, name) for name in ("encode", "decode", "start_cache")):
        raise ValueError(
            f"expected a model that encodes and decodes, got {type(model).__name__}; build 'transformer-E-D-W-I-H'"
        )
    if source.ndim != 2 or source.dtype != torch.int64 or source.shape[1] < 1:
        raise ValueError(
            f"expected a source (N, S) of tokens as int64, got {tuple(source.shape)} of {source.dtype}; an empty "
            "sentence is a row of END"
        )
    lengths = [int(length) for length in (source != PAD).sum(1).tolist()]
    limits = [longest(length) if callable(longest) else longest for length in lengths]
    for limit in limits:
        if not isinstance(limit, int) or limit < 0:
            raise ValueError(f"expected a whole number of tokens, 0 or more, as the longest translation, got {limit!r}")
    return limits
