"""Text that a decoder writes on from a start, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normfree.data.text.vocabulary import Vocabulary
from normfree.models.special_tokens import END, PAD, START, UNKNOWN
from normfree.models.transformer import Decoder
from normfree.nn.model_state import evaluating
from normfree.train.text.translation import require_vocabulary

_NEVER = (PAD, START, UNKNOWN)


@torch.no_grad()
def continue_tokens(
    model: Decoder,
    start: Sequence[int],
    *,
    longest: int = 100,
    temperature: float = 0.8,
    window: int = 128,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The tokens that a line goes on with after `start`, until it ends or there are `longest`.

    Each token is drawn from softmax(logits / temperature) by `generator` (default: seed 0), or is the likeliest with a
    temperature of 0. The model sees at most `window` tokens, as many as it was trained with, or when these are full the
    latter half of them; the first is END, since a line of a text follows another. Modes are as before afterwards.

    Raises:
        ValueError: for a negative number of tokens or temperature, or a window of less than 2.
    """
    if longest < 0 or not 0 <= temperature < math.inf or window < 2:
        raise ValueError(
            "expected at least 0 tokens, a temperature of at least 0 and a window of at least 2, got "
            f"{longest}, {temperature} and {window}"
        )
    source = generator or torch.Generator().manual_seed(0)
    device = model.classifier.weight.device
    seen = [END, *start]
    fresh = seen[-window:]
    cache = model.start_cache(1, window)
    with evaluating(model):
        while len(seen) <= len(start) + longest:
            if cache.used + len(fresh) > window:
                fresh, cache = seen[-(window // 2) :], model.start_cache(1, window)
            logits = model(torch.tensor([fresh], device=device), cache)[0, -1]
            token = _drawn(logits.cpu().double(), temperature, source)
            if token == END:
                break
            seen.append(token)
            fresh = [token]
    return seen[1 + len(start) :]


def continue_line(
    model: Decoder,
    vocabulary: Vocabulary,
    line: str,
    *,
    longest: int = 100,
    temperature: float = 0.8,
    window: int = 128,
    generator: torch.Generator | None = None,
) -> str:
    """A line as it is, with what the model writes on to it; the rest is as for `continue_tokens`.

    The tokens of the line are not turned into text again: a vocabulary does not know every character and space.

    Raises:
        ValueError: if the vocabulary is not the model's, or sentencepiece is missing.
    """
    require_vocabulary(model, vocabulary)
    start = vocabulary.encode(line) if line.strip() else []
    found = continue_tokens(model, start, longest=longest, temperature=temperature, window=window, generator=generator)
    inside = bool(start) and not line[-1].isspace()
    return line + " ".join(vocabulary.decode(found, after=inside).splitlines())


def _drawn(logits: Tensor, temperature: float, source: torch.Generator) -> int:
    """A token by its probability, or the likeliest."""
    logits = logits.index_fill(0, torch.tensor(_NEVER), -math.inf)
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=source))
