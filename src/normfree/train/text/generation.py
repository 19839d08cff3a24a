"""A Transformer translates lines, and a decoder continues them; BLEU of translations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normfree.data.text.vocabulary import Vocabulary
from normfree.errors import missing_package
from normfree.models.transformer import Decoder, Transformer
from normfree.nn.attention import END, PAD, START, UNKNOWN
from normfree.nn.model_state import eval_mode
from normfree.train.text.decoding import Longest, beam_search, source_plus_50


class Bleu(NamedTuple):
    """BLEU of a translated corpus.

    Attributes:
        score: The score, 0 to 100.
        signature: The signature of sacrebleu, which states how the score was computed.
    """

    score: float
    signature: str


def translate(model: Transformer, vocabulary: Vocabulary, lines: Sequence[str], **options: Any) -> list[str]:
    """Translate lines by `beam_search`; line i of the result belongs to line i of the input.

    A blank line gives an empty line; the model is not called. A translation is always one line.

    Args:
        model: The Transformer.
        vocabulary: The vocabulary that it was trained with.
        lines: The lines to translate.
        **options: Those of `translate_tokens`, such as the beam.

    Returns:
        The translations.

    Raises:
        ValueError: If the vocabulary is not the model's, or sentencepiece is not installed.
    """
    require_vocabulary(model, vocabulary)
    encoded = [vocabulary.encode(line) if line.strip() else [] for line in lines]
    found = translate_tokens(model, encoded, **options)
    return [as_line(vocabulary, ids) for ids in found]


def as_line(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Decode tokens into one line."""
    return " ".join(vocabulary.decode(ids).splitlines())


def translate_tokens(
    model: Transformer,
    lines: Sequence[Sequence[int]],
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    longest: Longest = source_plus_50,
    sentences: int = 128,
    tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Translate tokenized sentences in batches of similar length.

    The longest sentences come first, so that a lack of memory shows at once. The result does not depend on the batches
    except for the rounding of sums.

    Args:
        model: The Transformer.
        lines: The tokens of each sentence, without START and END; an empty sentence gives an empty translation.
        beam: The number of hypotheses per sentence.
        length_penalty: The exponent of the length in the score.
        longest: The maximum number of tokens of a translation.
        sentences: The maximum number of sentences per batch.
        tokens: The maximum number of source tokens per batch, including padding; a longer sentence is a batch of
            its own.
        progress: Called after each batch with the number of sentences done, and of all.

    Returns:
        The tokens of the translations.

    Raises:
        ValueError: If a batch could hold nothing, or an argument is not as `beam_search` expects.
    """
    if sentences < 1 or tokens < 1:
        raise ValueError(f"expected batches of 1 or more sentences and tokens, got {sentences} and {tokens}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    results: list[list[int]] = [[] for _ in lines]
    done = sum(not line for line in lines)
    for batch in _batches([len(line) for line in lines], sentences, tokens):
        width = max(len(lines[index]) for index in batch) + 1
        rows = [[*lines[index], END, *[PAD] * (width - len(lines[index]) - 1)] for index in batch]
        source = torch.tensor(rows, dtype=torch.int64).to(device)
        found = beam_search(model, source, beam=beam, length_penalty=length_penalty, longest=longest)
        for index, ids in zip(batch, found, strict=True):
            results[index] = ids
        done += len(batch)
        if progress is not None:
            progress(done, len(lines))
    return results


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """Compute BLEU of translations against one reference each, with the defaults of sacrebleu: cased, tokenizer 13a.

    Reference: Papineni 2002, "BLEU"; Post 2018, "A call for clarity in reporting BLEU scores".

    Raises:
        ValueError: If the numbers of translations and references differ or are zero, or sacrebleu is not installed.
    """
    if len(hypotheses) != len(references) or not len(references):
        raise ValueError(
            f"expected a reference for each translation, and at least one, got {len(hypotheses)} translations and "
            f"{len(references)} references; give both files of one test set"
        )
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ValueError(missing_package("sacrebleu", "computing BLEU")) from error
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(float(score), str(metric.get_signature()))


def _batches(lengths: Sequence[int], sentences: int, tokens: int) -> Iterator[list[int]]:
    """Yield batches of the indices of sentences that have tokens, from the longest to the shortest."""
    batch: list[int] = []
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        # The first sentence of a batch is its longest; END counts.
        if batch and (len(batch) == sentences or (len(batch) + 1) * (lengths[batch[0]] + 1) > tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def require_vocabulary(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Raise `ValueError` if the vocabulary and the model differ in size: tokens would stand for other words."""
    for name in ("source_embedding", "embedding"):
        embedding = getattr(model, name, None)
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings != vocabulary.size:
            raise ValueError(
                f"expected a vocabulary of {embedding.num_embeddings} tokens, those of the model's {name}, got "
                f"{vocabulary.size}; use the vocabulary that the model was trained with"
            )


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


def continue_line(model: Decoder, vocabulary: Vocabulary, line: str, **options: Any) -> str:
    """Continue a line of text.

    The line itself is returned unchanged, not decoded from its tokens, because encoding
    loses unknown characters and some spaces.

    Args:
        model: The decoder.
        vocabulary: The vocabulary that it was trained with.
        line: The beginning of the line.
        **options: Those of `continue_tokens`, such as the temperature.

    Returns:
        The whole line.

    Raises:
        ValueError: If the vocabulary is not the model's, or sentencepiece is not installed.
    """
    require_vocabulary(model, vocabulary)
    start = vocabulary.encode(line) if line.strip() else []
    found = continue_tokens(model, start, **options)
    inside = bool(start) and not line[-1].isspace()
    return line + " ".join(vocabulary.decode(found, after=inside).splitlines())


def _drawn(logits: Tensor, temperature: float, source: torch.Generator) -> int:
    """Draw a token by its probability, or take the likeliest."""
    logits = logits.index_fill(0, torch.tensor(_NEVER), -math.inf)
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=source))
