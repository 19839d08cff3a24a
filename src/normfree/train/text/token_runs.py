"""Runs on tokens: translation from pairs and language models from text, in the place of images and their classes.

The data of such a run is a prepared folder: 'pairs:FOLDER' or 'text:FOLDER'. Its batches have a few shapes, and a batch
size counts target tokens (pairs) or blocks (text), and no more than there are make a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data.text.prepared_folder import Prepared, open_prepared
from normfree.data.text.text_batches import TextBatches
from normfree.data.text.token_batches import TokenBatches
from normfree.methods import get
from normfree.models import build
from normfree.models.special_tokens import PAD
from normfree.models.transformer import Transformer
from normfree.nn.model_state import evaluating
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes
from normfree.train.engine.evaluation import Score
from normfree.train.text.translation import Bleu, as_line, bleu, translate_tokens

PAIRS, TEXT = "pairs:", "text:"


def is_tokens(name: str) -> bool:
    """Whether the name of data means a prepared folder, such as 'pairs:.data/multi30k'."""
    return name.startswith((PAIRS, TEXT))


def open_tokens(name: str) -> Prepared:
    """The prepared folder that a name means. Raises `ValueError` where there is none, or one of the other kind."""
    kind, _, folder = name.partition(":")
    data = open_prepared(folder)
    if (kind == "pairs") != translates(data):
        other = PAIRS if kind == "text" else TEXT
        raise ValueError(f"expected '{name}' to hold {kind}, got the other kind; call it '{other}{folder}'")
    if "train" not in data.splits:
        raise ValueError(f"expected a split train in '{folder}', found {' and '.join(data.splits)}; prepare it again")
    return data


def translates(data: Prepared) -> bool:
    """Whether the data are pairs, for a model that translates."""
    return len(data.manifest["sides"]) == 2


def translates_test(data: Prepared) -> bool:
    """Whether a run on the data ends with a translation of test sentences."""
    return translates(data) and "test" in data.splits


def vouched(data: Prepared) -> dict[str, Any]:
    """What a checkpoint keeps of its data: the size of the vocabulary, and what it and all files are told by."""
    vocabulary = hashlib.sha256(data.vocabulary().model).hexdigest()
    return {"vocabulary": data.vocabulary_size, "vocabulary_sha256": vocabulary, "data_sha256": data.digest}


def require_data(data: Prepared, state: Mapping[str, Any], run: str | Path, *, whole: bool = True) -> None:
    """Raise `ValueError` for other data than a run was trained on, or with another vocabulary unless `whole`."""
    own = vouched(data)
    for key in ("vocabulary", "vocabulary_sha256", *(("data_sha256",) if whole else ())):
        if state.get(key, own[key]) != own[key]:
            what = "data" if key == "data_sha256" else "vocabulary"
            raise ValueError(
                f"expected the {what} of the run in '{run}', got another in '{data.folder}'; prepare it again from the "
                "same files"
            )


def require_bleu(data: Prepared) -> None:
    """Raise `ValueError` where a translation will have to be scored and cannot, before any training."""
    if translates_test(data):
        bleu([""], [""])


def token_model(config: TrainConfig, data: Prepared, generator: torch.Generator) -> nn.Module:
    """The Transformer that a configuration names, for the vocabulary of the data.

    Raises `ValueError` for a model of another kind.
    """
    kind = "transformer-" if translates(data) else "decoder-"
    if not config.model.startswith(kind):
        raise ValueError(
            f"expected a model '{kind}…' for data '{config.data}', got '{config.model}'; see normfree models"
        )
    example = None
    if get(config.method).needs_example:
        *inputs, _, _ = next(token_batches(config, data, "train").once())
        example = tuple(inputs) if len(inputs) > 1 else inputs[0]
    model: nn.Module = build(
        config.model,
        config.method,
        num_classes=data.vocabulary_size,
        dropout=config.dropout,
        form=config.form,
        example=example,
        generator=generator,
    )
    return model


@torch.no_grad()
def require_token_scores(model: nn.Module, config: TrainConfig, data: Prepared) -> None:
    """Refuse a given model that does not score every token of the vocabulary, or translate, before it is trained."""
    kind, size = type(model).__name__, data.vocabulary_size
    expected = f"expected a model that gives every position a score for each of {size} tokens"
    *inputs, labels, _ = next(token_batches(config, data, "train").once())
    weight = next(model.parameters(), None)
    try:
        with evaluating(model):
            scores = model(*(side[:2] if weight is None else side[:2].to(weight.device) for side in inputs))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{expected}, but {kind} stopped: {str(error).splitlines()[0]}; adapt it") from error
    if not isinstance(scores, Tensor) or scores.shape != (*labels[:2].shape, size):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{expected}, got {got} for {tuple(labels[:2].shape)} of them; adapt {kind}")
    if translates_test(data) and not isinstance(model, Transformer):
        raise ValueError(f"expected a Transformer of ours to translate the test split, got {kind}; leave test out")


def token_batches(
    config: TrainConfig,
    data: Prepared,
    split: str,
    *,
    device: torch.device | str = "cpu",
    processes: Processes | None = None,
) -> TokenBatches | TextBatches:
    """The batches of a split, this process's part of each."""
    ranks = processes or Processes()
    shared: dict[str, Any] = {"seed": config.seed, "device": device, "rank": ranks.rank, "world": ranks.world}
    if translates(data):
        return TokenBatches(data.pairs(split), tokens=config.batch_size, split=split, **shared)
    return TextBatches(data.text(split), block=config.block, batch_size=config.batch_size, **shared)


def token_loss(
    forward: Callable[..., Tensor], batch: Any, label_smoothing: float, *, world: int = 1
) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of the target tokens in float32, and the share of those that are predicted.

    Both are over the tokens of all processes: the sum of this one's times their number, which their mean divides out.
    """
    *inputs, labels, tokens = batch
    logits = forward(*inputs).flatten(0, 1).float()
    labels = labels.flatten()
    losses = F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing)
    hits = ((logits.detach().argmax(1) == labels) & (labels != PAD)).sum()
    return losses * world / tokens, hits * world / tokens


@torch.no_grad()
def token_score(
    model: nn.Module, batches: Iterable[Any], *, reduce: Callable[[Tensor], None] | None = None, world: int = 1
) -> Score:
    """Mean cross-entropy a target token, and the share that is predicted, in evaluation mode.

    `reduce` averages a tensor over all `world` processes, in place, where each has a part of every batch.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    with evaluating(model):
        for batch in batches:
            loss, hits = token_loss(model, batch, 0.0, world=world)
            sums += torch.stack((loss, hits, torch.ones_like(loss))).double() * batch.tokens
    if reduce is not None:
        reduce(sums)
    losses, correct, tokens = sums.tolist()
    return Score(losses / tokens, correct / tokens) if tokens else Score(float("nan"), float("nan"))


def translate_test(
    model: nn.Module, config: TrainConfig, data: Prepared, progress: Callable[[int, int], None] | None = None
) -> tuple[list[str], Bleu]:
    """Translate the source of the test split by beam search, and score it against its target."""
    source = data.pairs("test").source
    vocabulary = data.vocabulary()
    found = translate_tokens(
        model,  # type: ignore[arg-type]  # a Transformer, as `token_model` built it
        [source[i] for i in range(len(source))],
        beam=config.beam,
        length_penalty=config.length_penalty,
        progress=progress,
    )
    lines = [as_line(vocabulary, ids) for ids in found]
    return lines, bleu(lines, data.references("test"))
