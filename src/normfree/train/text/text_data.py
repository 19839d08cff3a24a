"""Training data that are text: pairs of sentences for translation, or running text for a language model.

Such data is a prepared folder, and its name is 'pairs:FOLDER' or 'text:FOLDER'. Its batches have a few shapes.
`batch_size` is the maximum number of tokens on either side of a batch, padding included (pairs), or the number of
blocks (text); a batch is never larger than the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data.text.pair_batches import PairBatches
from normfree.data.text.prepared_folder import VOCABULARY, Prepared, open_prepared
from normfree.data.text.text_batches import TextBatches
from normfree.methods import get
from normfree.models import build
from normfree.models.transformer import Transformer
from normfree.nn.attention import PAD
from normfree.plan import ResidualPlan
from normfree.storage.writing import explain_os_errors, write_bytes
from normfree.train.config import TrainConfig
from normfree.train.engine.data_interface import PAIRS, TEXT, Data, EvalBatches, Inputs, try_model
from normfree.train.engine.distributed import Processes
from normfree.train.text.generation import Bleu, as_line, bleu, translate_tokens


def open_text(name: str) -> TextData:
    """Open the prepared folder of a name. Raises `ValueError` if there is none, or one of the other kind."""
    kind, _, folder = name.partition(":")
    data = TextData(open_prepared(folder))
    if (kind == "pairs") != data.is_pairs:
        other = PAIRS if kind == "text" else TEXT
        raise ValueError(f"expected '{name}' to hold {kind}, got the other kind; use the name '{other}{folder}'")
    splits = data.prepared.splits
    if "train" not in splits:
        raise ValueError(f"expected a split train in '{folder}', found {' and '.join(splits)}; prepare it again")
    return data


class TextData(Data):
    """A prepared folder of text."""

    kind = "text"
    unit = "tokens"
    unused_settings: tuple[str, ...] = (
        "crop", "flip", "cutout", "mixup", "randaugment", "validation", "eval_batch_size"
    )  # fmt: skip

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.is_pairs = len(prepared.manifest["sides"]) == 2
        self.name, self.num_classes = f"{PAIRS if self.is_pairs else TEXT}{prepared.folder}", prepared.vocabulary_size
        self.translates_test = self.is_pairs and "test" in prepared.splits
        self.source_files = prepared.manifest["inputs"]

    def require_usable(self) -> None:
        """Raise `ValueError` if the run ends with a translation, and sacrebleu is not installed to score it."""
        if self.translates_test:
            bleu([""], [""])

    def missing_validation(self, config: TrainConfig) -> str | None:
        """Return the remedy if the folder has no split 'valid'."""
        if "valid" in self.prepared.splits:
            return None
        folder = self.prepared.folder
        return f"got '{folder}' without one; put a file such as book.valid.txt beside book.train.txt and prepare it"

    def build_model(self, config: TrainConfig) -> tuple[nn.Module, ResidualPlan | None]:
        """Build the Transformer that a configuration names, for the vocabulary of the data.

        Raises `ValueError` for a model of another kind.
        """
        kind = "transformer-" if self.is_pairs else "decoder-"
        if not config.model.startswith(kind):
            raise ValueError(
                f"expected a model '{kind}…' for data '{config.data}', got '{config.model}'; see normfree models"
            )
        example = None
        if get(config.method).needs_example:
            *inputs, _, _ = self._first_batch(config)
            example = tuple(inputs) if len(inputs) > 1 else inputs[0]
        model: nn.Module = build(
            config.model,
            config.method,
            num_classes=self.num_classes,
            dropout=config.dropout,
            inner_dropout=config.inner_dropout,
            form=config.form,
            example=example,
            generator=torch.Generator().manual_seed(config.seed),
        )
        return model, None

    def require_scores(self, model: nn.Module, config: TrainConfig) -> None:
        """Raise `ValueError` if a model does not score every token of the vocabulary, or cannot translate."""
        kind = type(model).__name__
        expected = f"expected a model that gives every position a score for each of {self.num_classes} tokens"
        *inputs, labels, _ = self._first_batch(config)
        scores = try_model(model, (side[:2] for side in inputs), expected, "adapt it")
        if not isinstance(scores, Tensor) or scores.shape != (*labels[:2].shape, self.num_classes):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"{expected}, got {got} for tokens of shape {tuple(labels[:2].shape)}; adapt {kind}")
        if self.translates_test and not isinstance(model, Transformer):
            raise ValueError(
                f"expected a normfree Transformer to translate the test split, got {kind}; "
                "prepare the data without a test split"
            )

    def example(self, config: TrainConfig, count: int = 64) -> tuple[Tensor, ...]:
        """Return the first training sequences, as the model reads them."""
        *inputs, _, _ = self._first_batch(config)
        return tuple(side[:count] for side in inputs)

    def batches(
        self,
        config: TrainConfig,
        split: str,
        *,
        device: torch.device | str = "cpu",
        processes: Processes | None = None,
    ) -> PairBatches | TextBatches:
        """Return this process's part of the batches of a split."""
        ranks = processes or Processes()
        shared: dict[str, Any] = {"seed": config.seed, "device": device, "rank": ranks.rank, "world": ranks.world}
        if self.is_pairs:
            return PairBatches(self.prepared.pairs(split), tokens=config.batch_size, split=split, **shared)
        return TextBatches(self.prepared.text(split), block=config.block, batch_size=config.batch_size, **shared)

    def inputs(self, config: TrainConfig, *, device: torch.device, dtype: torch.dtype, processes: Processes) -> Inputs:
        """Return the batches of the splits. Raises `ValueError` for micro-batches."""
        if config.accumulate > 1:
            raise ValueError(f"expected accumulate=1 for tokens, got {config.accumulate}; make batch_size smaller")

        def scored(split: str) -> EvalBatches | None:
            if split not in self.prepared.splits:
                return None
            return self.batches(config, split, device=device, processes=processes).once

        feed = self.batches(config, "train", device=device, processes=processes)
        return Inputs(
            feed=feed,
            validation=scored("valid"),
            test=scored("test"),
            items_per_step=feed.mean_tokens if isinstance(feed, PairBatches) else feed.batch_size * config.block,
            loss=partial(token_loss, world=processes.world),
            sums=partial(token_sums, world=processes.world),
        )

    def label_fingerprint(self) -> dict[str, Any]:
        """Return the size and the digest of the vocabulary."""
        digest = hashlib.sha256(self.prepared.vocabulary().model).hexdigest()
        return {"vocabulary": self.num_classes, "vocabulary_sha256": digest}

    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """Return the size and the digest of the vocabulary, and the digest of all files."""
        return {**self.label_fingerprint(), "data_sha256": self.prepared.digest}

    def translate_test(
        self, model: nn.Module, config: TrainConfig, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[str], Bleu]:
        """Translate the test sentences by beam search; return the lines and their BLEU."""
        source = self.prepared.pairs("test").source
        vocabulary = self.prepared.vocabulary()
        found = translate_tokens(
            model,  # type: ignore[arg-type]  # a Transformer, as `build_model` built it
            [source[i] for i in range(len(source))],
            beam=config.beam,
            length_penalty=config.length_penalty,
            progress=progress,
        )
        lines = [as_line(vocabulary, ids) for ids in found]
        return lines, bleu(lines, self.prepared.references("test"))

    def write_files(self, folder: Path) -> None:
        """Write the vocabulary, which `load_vocabulary` reads."""
        with explain_os_errors("the vocabulary", folder / VOCABULARY):
            write_bytes(folder / VOCABULARY, self.prepared.vocabulary().model)

    def _first_batch(self, config: TrainConfig) -> Any:
        return next(self.batches(config, "train").once())


def token_loss(
    forward: Callable[..., Tensor], batch: Any, label_smoothing: float, *, world: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the target tokens in float32, and the share that is predicted.

    Both are means over the tokens of all `world` processes: this process's sum times `world`, so that the average over
    the processes is right.
    """
    *inputs, labels, tokens = batch
    logits = forward(*inputs).flatten(0, 1).float()
    labels = labels.flatten()
    losses = F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing)
    hits = ((logits.detach().argmax(1) == labels) & (labels != PAD)).sum()
    return losses * world / tokens, hits * world / tokens


def token_sums(model: nn.Module, batch: Any, *, world: int = 1) -> Tensor:
    """Return the summed cross-entropy and hits of this process, times `world`, and the target tokens of all processes.

    The average over the processes is the total.
    """
    loss, hits = token_loss(model, batch, 0.0, world=world)
    sums: Tensor = torch.stack((loss, hits, torch.ones_like(loss))).double() * batch.tokens
    return sums
