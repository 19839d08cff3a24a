"""Text generation: a decoder continues a line, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normfree.data.text.vocabulary import Vocabulary
from normfree.models.special_tokens import END, PAD, START, UNKNOWN
from normfree.models.transformer import Decoder
from normfree.nn.model_state import eval_mode
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
    """Continue a line after the tokens `start`, until it ends.

    Each token is drawn from softmax(logits / temperature). The model reads END first, as before every line
    of the training text but the first. The mode of every module is restored.

    Args:
        model: The decoder.
        start: The first tokens of the line.
        longest: The maximum number of tokens to add.
        temperature: The temperature; 0 takes the likeliest token.
        window: The maximum number of tokens that the model reads, as many as it was trained with. When they are
            full, it continues with the latter half.
        generator: The source of random numbers; seed 0 if None.

    Returns:
        The new tokens.

    Raises:
        ValueError: If the number of tokens or the temperature is negative, or the window is smaller than 2.
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
    with eval_mode(model):
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
    """Continue a line of text.

    The line itself is returned unchanged, not decoded from its tokens, because encoding
    loses unknown characters and some spaces.

    Args:
        model: The decoder.
        vocabulary: The vocabulary that it was trained with.
        line: The beginning of the line.
        longest: The maximum number of tokens to add.
        temperature: The temperature; 0 takes the likeliest token.
        window: The maximum number of tokens that the model reads.
        generator: The source of random numbers; seed 0 if None.

    Returns:
        The whole line.

    Raises:
        ValueError: If the vocabulary is not the model's, or sentencepiece is not installed.
    """
    require_vocabulary(model, vocabulary)
    start = vocabulary.encode(line) if line.strip() else []
    found = continue_tokens(model, start, longest=longest, temperature=temperature, window=window, generator=generator)
    inside = bool(start) and not line[-1].isspace()
    return line + " ".join(vocabulary.decode(found, after=inside).splitlines())


def _drawn(logits: Tensor, temperature: float, source: torch.Generator) -> int:
    """Draw a token by its probability, or take the likeliest."""
    logits = logits.index_fill(0, torch.tensor(_NEVER), -math.inf)
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=source))
