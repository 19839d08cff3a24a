"""Lines of text in another language, and how near they come to a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from normfree.data.text.vocabulary import Vocabulary
from normfree.extras import missing_package
from normfree.models.special_tokens import END, PAD
from normfree.models.transformer import Transformer
from normfree.train.text.decoding import Longest, beam_search, source_plus_50


class Bleu(NamedTuple):
    """BLEU of a translated corpus, 0 to 100, and sacrebleu's signature, which says how it was computed."""

    score: float
    signature: str


def translate(
    model: Transformer,
    vocabulary: Vocabulary,
    lines: Sequence[str],
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    longest: Longest = source_plus_50,
    sentences: int = 128,
    tokens: int = 8192,
) -> list[str]:
    """Translate lines by `beam_search`; line i of the result belongs to line i of the input.

    A line of nothing but white space gives an empty line, and the model is not asked. A translation is one line,
    whatever is in it. The other arguments are those of `translate_tokens`.

    Raises:
        ValueError: if the vocabulary is not the model's, or sentencepiece is missing.
    """
    require_vocabulary(model, vocabulary)
    found = translate_tokens(
        model,
        [vocabulary.encode(line) if line.strip() else [] for line in lines],
        beam=beam,
        length_penalty=length_penalty,
        longest=longest,
        sentences=sentences,
        tokens=tokens,
    )
    return [as_line(vocabulary, ids) for ids in found]


def as_line(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The text of tokens in one line, whatever is in it."""
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
    """Translate sentences that are tokens already, without START and END, in batches of about one length.

    A sentence without tokens gives one without tokens. A batch has at most `sentences`, and at most `tokens` of the
    source, padding counted, unless one sentence alone has more. The longest come first, so that memory, if it does not
    suffice, fails at once. The result does not depend on the batches, but for the rounding of sums. `progress` is told
    after each how many sentences are done, and of how many.

    Raises:
        ValueError: if a batch is to hold nothing, or for what `beam_search` raises.
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
    """BLEU of translations against one reference each, by sacrebleu as it is by default: cased, tokenizer 13a.

    Reference: Papineni 2002, "BLEU"; Post 2018, "A call for clarity in reporting BLEU scores".

    Raises:
        ValueError: if there are not as many of one as of the other, or none, or sacrebleu is missing.
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
    """Indices of sentences that have tokens, from the longest to the shortest, as many at once as fit."""
    batch: list[int] = []
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        # The first of a batch is its longest, END counted.
        if batch and (len(batch) == sentences or (len(batch) + 1) * (lengths[batch[0]] + 1) > tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def require_vocabulary(model: nn.Module, vocabulary: Vocabulary) -> None:
    """Refuse a vocabulary of another size than the model's, which would read and write other words."""
    for name in ("source_embedding", "embedding"):
        embedding = getattr(model, name, None)
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings != vocabulary.size:
            raise ValueError(
                f"expected a vocabulary of {embedding.num_embeddings} tokens, those of the model's {name}, got "
                f"{vocabulary.size}; use the vocabulary that the model was trained with"
            )
