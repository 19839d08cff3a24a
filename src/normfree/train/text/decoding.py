"""Translations of a Transformer: the likeliest token each time, or the best that a beam of hypotheses meets."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normfree.models.special_tokens import END, PAD, START
from normfree.models.transformer import Transformer
from normfree.models.transformer_layers import DecoderCache
from normfree.nn.model_state import evaluating

Longest = int | Callable[[int], int]
"""The most tokens of a translation, END not counted: a number, or a function of the source's length."""

_SPECIAL = (PAD, START, END)
_MOST_PENALTY = 10  # n^penalty stays far below the largest float
_STEPS_UNASKED = 8  # on a GPU, steps from one question whether all are done to the next: each waits for the device


def source_plus_50(length: int) -> int:
    """The most tokens of a translation of `length` tokens, unless told otherwise.

    Reference: Vaswani 2017, section 6.1.
    """
    return length + 50


@torch.no_grad()
def greedy(model: Transformer, source: Tensor, *, longest: Longest = source_plus_50) -> list[list[int]]:
    """Translate by taking the likeliest token each time, until it is END or there are `longest`.

    PAD and START are never taken; of equals END is, then the one with the smaller number. The source's END counts in
    its length. The model is in evaluation mode meanwhile, and every module's mode is as before afterwards.

    Shapes: source (N, S) of tokens, each row ended by END and padded behind; a row of END alone is an empty sentence,
    and is translated as any other → N lists of tokens without START, END and PAD.

    Raises:
        ValueError: if the source, the model or `longest` is none of the above.
    """
    limits = _limits(model, source, longest)
    if not limits:
        return []
    with evaluating(model):
        memory = model.encode(source)
        cache = model.start_cache(memory, max(limits) + 1)
        most, special = source.new_tensor(limits), source.new_tensor(_SPECIAL)
        taken = source.new_full((len(source), max(limits)), END)
        last, ended = source.new_full((len(source), 1), START), most < 1
        for step in range(max(limits)):
            logits = model.decode(last, memory, cache)[:, -1]
            highest, word = logits.index_fill(1, special, -math.inf).max(1)
            ended = ended | (logits[:, END] >= highest) | (most <= step)
            taken[:, step] = torch.where(ended, END, word)
            last = word.unsqueeze(1)
            if _asks(step, source.device) and bool(ended.all()):
                break
    return [row[: row.index(END)] if END in row else row for row in taken.tolist()]


@torch.no_grad()
def beam_search(
    model: Transformer,
    source: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    longest: Longest = source_plus_50,
) -> list[list[int]]:
    """Translate by keeping the `beam` best hypotheses each time; the best that ended is the result.

        score(y) = log p(y | x) / n^length_penalty,   n = the number of tokens of y, END counted

    With a penalty of 0 the likeliest translation wins, which tends to be short; 1 compares means over tokens, and more
    favours long ones. This is the penalty of fairseq, with which the results of fixup's Table 3 were made; with that
    of Wu 2016, ((5 + n)/6)^α, no α makes a mean over tokens.

    In each step every hypothesis that has not ended is extended by each token, END among them, and the `beam` best
    scores are kept: those of the extensions, and those of hypotheses that ended before. So an end keeps its place only
    as long as it is among the best (the best end is remembered all the same), a width of 1 is `greedy`, and a beam as
    wide as there are sequences finds the best of all. At `longest` tokens only END is left, and its probability counts.
    A sentence is done when nothing that has not ended can pass the best end any more, which loses nothing:

        log p(y | x) / max over n to come of n^length_penalty ≤ the best score of an end

    PAD and START have no place in a translation; the probability that the model gives them is lost. Modes and shapes
    are those of `greedy`.

    Differs: fairseq ends after `beam` ends, however bad. A model that is sure of its words leaves the other places of
    the beam to chance, ends fill them, and a long sentence is cut off.

    Reference: Ott 2019, "fairseq", for the penalty; Wu 2016, "Google's neural machine translation system", section 7,
    for the other one.

    Raises:
        ValueError: if the source, the model, the beam, the penalty or `longest` is none of the above.
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
    with evaluating(model):
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
            if _asks(step, source.device):
                last, places = _put_aside(search, cache, last, places, results)
                if not places:
                    break
    for place, found in zip(places, search.best_tokens(), strict=True):
        results[place] = found
    return results


class _Beams:
    """The hypotheses of N sentences, `beam` of each, and the best end of each so far."""

    def __init__(self, most: Tensor, room: int, beam: int, penalty: float) -> None:
        rows = len(most)
        # Wide enough that two logits never become equal by what is added to them: order is that of the model.
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
        """The rows of the hypotheses of sentences: (n,) → (n · beam,)."""
        places = torch.arange(self.beam, device=sentences.device)
        return (sentences.unsqueeze(1) * self.beam + places).view(-1)

    def extend(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Go on from `step` tokens.

        Shapes: logits (N · beam, V) → the new tokens (N · beam, 1), and the rows that they continue (N · beam,).
        """
        rows, beam, dtype = len(self.most), self.beam, self.log_p.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        before = self.log_p - logits.logsumexp(1).to(dtype).view(rows, beam)
        end = before + logits[:, END].to(dtype).view(rows, beam)
        # The best words of each hypothesis first, so that nothing else is as large as the vocabulary.
        highest, words = _largest(logits.index_fill(1, self.special, -math.inf), min(beam, logits.shape[1]))
        count = highest.shape[1]
        going = (before.unsqueeze(2) + highest.to(dtype).view(rows, beam, count)).flatten(1)
        going = going.masked_fill((self.most <= step).unsqueeze(1), -math.inf)

        # What ends, what ended, what goes on: of equals the first is kept, so that END is the one of width 1.
        divisor = (step + 1) ** self.penalty
        scores, kept = _largest(torch.cat([end / divisor, self.ended, going / divisor], 1), beam)
        word = kept - 2 * beam  # among the words; negative for an end
        parents = torch.where(word < 0, kept % beam, word // count)
        self._remember_best(scores.masked_fill(kept >= beam, -math.inf), parents)
        self.log_p = going.gather(1, word.clamp(min=0)).masked_fill(word < 0, -math.inf)
        self.ended = scores.masked_fill(word >= 0, -math.inf)
        # A logarithm is at most 0, so the largest divisor to come is the best case: that of the next n, or the last.
        divisors = ((self.most + 1).to(dtype) ** self.penalty).clamp(min=(step + 2) ** self.penalty)
        self.done = self.done | (self.best >= self.log_p.amax(1) / divisors) | (self.most <= step)

        token = words.view(rows, -1).gather(1, word.clamp(min=0)).masked_fill(word < 0, END)
        self.tokens = self.tokens.gather(1, parents.unsqueeze(2).expand_as(self.tokens))
        if step < self.tokens.shape[2]:
            self.tokens[:, :, step] = token
        first = torch.arange(rows, device=token.device).unsqueeze(1) * beam
        return token.view(-1, 1), (first + parents).view(-1)

    def _remember_best(self, scores: Tensor, parents: Tensor) -> None:
        """Keep what ends now where its score is the best so far; -∞ stands for what does not end."""
        score, which = scores.max(1, keepdim=True)
        row = parents.gather(1, which).unsqueeze(2).expand(-1, 1, self.tokens.shape[2])
        # What is done stays as it is: a result must not depend, even by rounding, on when the end is noticed.
        better = (score > self.best.unsqueeze(1)) & ~self.done.unsqueeze(1)
        self.best_row = torch.where(better, self.tokens.gather(1, row).squeeze(1), self.best_row)
        self.best = torch.where(better, score, self.best.unsqueeze(1)).squeeze(1)

    def keep(self, sentences: Tensor) -> None:
        """Leave all but some of the sentences."""
        for name in ("most", "tokens", "log_p", "ended", "best", "best_row", "done"):
            setattr(self, name, getattr(self, name)[sentences])

    def best_tokens(self) -> list[list[int]]:
        """The tokens of the best ends."""
        return [row[: row.index(END)] if END in row else row for row in self.best_row.tolist()]


def _put_aside(
    search: _Beams, cache: DecoderCache, last: Tensor, places: list[int], results: list[list[int]]
) -> tuple[Tensor, list[int]]:
    """Write down what is done once it is half of the sentences, and go on with the others."""
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
    """The largest values of each row, in order; of one, the first of equals, as `max` has it and `topk` does not."""
    if count == 1:
        highest, index = values.max(1, keepdim=True)
    else:
        highest, index = values.topk(count)
    return highest, index


def _asks(step: int, device: torch.device) -> bool:
    return device.type == "cpu" or step % _STEPS_UNASKED == _STEPS_UNASKED - 1


def _limits(model: Transformer, source: Tensor, longest: Longest) -> list[int]:
    """The most tokens of each translation, the source and the model checked."""
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
