"""A vocabulary of subwords: byte pair encoding by sentencepiece; only training and encoding need sentencepiece."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from normfree.errors import missing_package
from normfree.nn.attention import END, PAD, SPECIAL, START, UNKNOWN
from normfree.storage.writing import explain_os_errors, write_bytes

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # kinds of pieces in a sentencepiece model
_SPACE = "\u2581"
_SURFACE = " \u2047 "  # how sentencepiece writes an unknown token
_LONGEST_LINE = 1 << 20  # bytes; sentencepiece silently skips longer lines


class Vocabulary:
    """Subwords and their numbers: PAD = 0, UNKNOWN = 1, START = 2, END = 3, then the subwords of the text.

    Only `train` and `encode` need sentencepiece: a machine without it can decode and score.

    Args:
        model: the content of a sentencepiece file.
        name: its name in errors.

    Reference: Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword units", ACL 2016;
    Kudo and Richardson, "SentencePiece", EMNLP 2018.

    Raises:
        ValueError: if `model` is not the content of a sentencepiece file with these special tokens.
    """

    def __init__(self, model: bytes, name: str = "vocabulary") -> None:
        self.model, self.name = bytes(model), name
        try:
            self._pieces = list(_pieces(self.model))
        except (IndexError, ValueError) as error:
            raise ValueError(
                f"expected a sentencepiece model in '{name}', got {len(model)} bytes of something else; prepare the "
                "data again"
            ) from error
        kinds = [kind for _, kind in self._pieces[:SPECIAL]]
        if kinds != [_CONTROL, _UNKNOWN, _CONTROL, _CONTROL]:
            raise ValueError(
                f"expected pad, unknown, start and end as tokens 0 to 3 of '{name}', got "
                f"{[piece for piece, _ in self._pieces[:SPECIAL]]}; train it with pad_id=0, unk_id=1, bos_id=2 and "
                "eos_id=3"
            )
        self._processor: Any = None

    @property
    def size(self) -> int:
        """The number of tokens, with the special ones."""
        return len(self._pieces)

    def __len__(self) -> int:
        return self.size

    @classmethod
    def train(cls, lines: Iterable[str], size: int, *, coverage: float = 1.0) -> Vocabulary:
        """Merge the most frequent pairs of subwords until there are `size` tokens.

        Args:
            lines: the text; the same lines give the same vocabulary.
            size: the number of tokens, with the special ones.
            coverage: the share of characters that become tokens; the others become UNKNOWN. Lower it for scripts with
                thousands of characters.

        Raises:
            ValueError: if the text has too few subwords or too many characters for the size, or sentencepiece is not
                installed.
        """
        sentencepiece = _sentencepiece("training a vocabulary")
        if size <= SPECIAL or not 0 < coverage <= 1:
            raise ValueError(f"expected more than {SPECIAL} tokens and a coverage in (0, 1], got {size} and {coverage}")
        text = [line for line in lines if line.strip()]
        if not text:
            raise ValueError("expected lines of text to train a vocabulary from, got none; check the files")
        written = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text),
                model_writer=written,
                model_type="bpe",
                vocab_size=size,
                character_coverage=coverage,
                max_sentence_length=_LONGEST_LINE,
                pad_id=PAD,
                unk_id=UNKNOWN,
                bos_id=START,
                eos_id=END,
                num_threads=1,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(_training_error(str(error), size)) from error
        return cls(written.getvalue())

    def save(self, path: str | Path) -> None:
        """Write a file that sentencepiece can read, atomically."""
        path = Path(path)
        with explain_os_errors("the vocabulary", path):
            write_bytes(path, self.model)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a file written by `save`, or by sentencepiece with the same special tokens.

        Raises:
            ValueError: if the file is missing, or not such a model.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"expected a sentencepiece model '{path}', found none; prepare the data first")
        return cls(path.read_bytes(), str(path))

    def encode(self, text: str) -> list[int]:
        """Split a text into tokens, without START and END."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Split each text into tokens.

        Raises:
            ValueError: if sentencepiece is not installed.
        """
        if self._processor is None:
            self._processor = _sentencepiece("splitting text into tokens").SentencePieceProcessor(
                model_proto=self.model
            )
        return [list(ids) for ids in self._processor.encode(list(texts), num_threads=1)]

    def decode(self, ids: Iterable[int], *, after: bool = False) -> str:
        """Join tokens into text, up to the first END; PAD and START are skipped.

        Args:
            ids: the numbers of the tokens.
            after: keep a space at the start, for text that continues another.

        Raises:
            ValueError: for a number outside the vocabulary.
        """
        text, raw = [], bytearray()
        for number in ids:
            if number == END:
                break
            if not 0 <= number < self.size:
                raise ValueError(
                    f"expected tokens from 0 to {self.size - 1}, got {number}; the tokens may belong to a "
                    "different vocabulary"
                )
            piece, kind = self._pieces[number]
            if kind == _BYTE:
                raw.append(int(piece[1:-1], 16))
                continue
            if raw:
                text.append(raw.decode("utf-8", errors="replace"))
                raw.clear()
            text.append("" if kind == _CONTROL else _SURFACE if kind == _UNKNOWN else piece.replace(_SPACE, " "))
        text.append(raw.decode("utf-8", errors="replace"))
        joined = "".join(text).rstrip(" ")
        return joined if after else joined.lstrip(" ")


def _sentencepiece(purpose: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        remedy = "or train from a folder that was prepared elsewhere"
        raise ValueError(f"{missing_package('sentencepiece', purpose)}, {remedy}") from error
    return sentencepiece


def _training_error(reason: str, size: int) -> str:
    """Rewrite an error of sentencepiece's training, if it is a known one."""
    if most := re.search(r"value <= (\d+)", reason):
        return f"expected a vocabulary of at most {most[1]} tokens from this text, got {size}; lower it (--vocabulary)"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        return (
            f"expected a vocabulary of more than {least[1]} tokens, one per character of this text, got {size}; raise "
            "the size or lower the coverage"
        )
    return f"expected text that sentencepiece can train {size} tokens from, got: {reason.strip()}"


def _pieces(model: bytes) -> Iterator[tuple[str, int]]:
    """The pieces of a sentencepiece model and their kinds.

    A model is a protocol buffer. Its repeated field 1 is a piece, in which field 1 is the text and field 3 the kind.
    """
    for number, piece in _fields(model):
        if number == 1 and isinstance(piece, bytes):
            parts = dict(_fields(piece))
            text, kind = parts.get(1), parts.get(3, _NORMAL)
            if not isinstance(text, bytes) or not isinstance(kind, int):
                raise ValueError("a piece has no text")
            yield text.decode("utf-8"), kind


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and value of each field of a protocol buffer message, in order."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + length > len(message):
            raise ValueError("the last field is cut off")
        yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
