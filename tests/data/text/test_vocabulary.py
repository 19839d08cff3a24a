"""A vocabulary encodes and decodes as sentencepiece does, and decodes without it."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from normfree.data.text.vocabulary import Vocabulary
from normfree.nn.attention import END, PAD, START, UNKNOWN

LINES = [
    f"{article} {adjective} {noun} {verb} {'über' if number % 2 else 'unter'} die {other}."
    for number, article in enumerate(["Der", "Ein", "Kein", "Jeder"])
    for adjective in ["kleine", "große", "müde"]
    for noun in ["Hund", "Läufer", "Vogel"]
    for verb in ["springt", "läuft"]
    for other in ["Straße", "Brücke"]
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    pytest.importorskip("sentencepiece")
    return Vocabulary.train(LINES, 120)


def processor(vocabulary: Vocabulary) -> Any:
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=vocabulary.model)


def test_vocabulary_has_the_special_tokens_at_their_places(vocabulary: Vocabulary) -> None:
    other = processor(vocabulary)
    assert (PAD, UNKNOWN, START, END) == (0, 1, 2, 3)
    assert (other.pad_id(), other.unk_id(), other.bos_id(), other.eos_id()) == (PAD, UNKNOWN, START, END)
    assert len(vocabulary) == vocabulary.size == other.vocab_size() == 120


def test_text_survives_encoding_and_decoding(vocabulary: Vocabulary) -> None:
    for line in LINES:
        ids = vocabulary.encode(line)
        assert vocabulary.decode(ids) == line
        assert min(ids) > END
    assert vocabulary.encode_all(LINES) == [vocabulary.encode(line) for line in LINES]
    assert vocabulary.encode("") == []
    assert vocabulary.decode([]) == ""


def test_text_that_looks_like_a_special_token_is_text(vocabulary: Vocabulary) -> None:
    for text in ("<pad>", "<s>", "</s> Hund", "<unk>", "日本"):
        assert not {PAD, START, END} & set(vocabulary.encode(text))


def with_bytes() -> Vocabulary:
    """A vocabulary whose unknown characters are spelled in bytes."""
    written = io.BytesIO()
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=380, model_type="bpe", byte_fallback=True,
        pad_id=PAD, unk_id=UNKNOWN, bos_id=START, eos_id=END, minloglevel=2,
    )  # fmt: skip
    return Vocabulary(written.getvalue())


@pytest.mark.parametrize("kind", ["plain", "bytes"])
def test_decoding_is_that_of_sentencepiece(vocabulary: Vocabulary, kind: str) -> None:
    vocabulary = with_bytes() if kind == "bytes" else vocabulary
    other, draw = processor(vocabulary), random.Random(0)
    texts = [*LINES[:20], "Hund 日本 über", "naïve \U0001f600 Vögel"]
    cases = [vocabulary.encode(text) for text in texts]
    tokens = [token for token in range(vocabulary.size) if token != END]
    if kind == "bytes":
        tokens = [token for token in tokens if not other.is_byte(token)]  # sentencepiece replaces bad bytes one by one
    cases += [draw.choices(tokens, k=draw.randrange(10)) for _ in range(500)]
    for ids in cases:
        assert vocabulary.decode(ids) == other.decode(ids).strip(" ")


def test_decoding_ends_at_the_first_end(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("Der Hund")
    assert vocabulary.decode([START, *ids, END, *ids, PAD]) == "Der Hund"
    for wrong in (-1, 120):
        with pytest.raises(ValueError, match=f"from 0 to 119, got {wrong}"):
            vocabulary.decode([wrong])


def test_training_is_repeatable_and_survives_the_disk(vocabulary: Vocabulary, tmp_path: Path) -> None:
    assert Vocabulary.train(LINES, 120).model == vocabulary.model
    assert Vocabulary.train(LINES[:30], 60).model != vocabulary.model
    vocabulary.save(tmp_path / "v.model")
    assert Vocabulary.load(tmp_path / "v.model").model == vocabulary.model


def test_training_refuses_sizes_the_text_does_not_have() -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(ValueError, match=r"at most \d+ tokens from this text, got 9000; lower"):
        Vocabulary.train(LINES, 9000)
    with pytest.raises(ValueError, match=r"more than \d+ tokens, one per character of this text, got 9; raise"):
        Vocabulary.train(LINES, 9)
    with pytest.raises(ValueError, match="more than 4 tokens"):
        Vocabulary.train(LINES, 4)
    with pytest.raises(ValueError, match="got none"):
        Vocabulary.train(["", " "], 100)


def test_without_sentencepiece_only_decoding_works(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = vocabulary.encode(LINES[0])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    bare = Vocabulary(vocabulary.model)
    assert bare.decode(ids) == LINES[0]
    with pytest.raises(ValueError, match=r"^splitting text .* needs sentencepiece.*pip install '\.\[text\]'"):
        bare.encode("Hund")
    with pytest.raises(ValueError, match=r"^training a vocabulary needs sentencepiece.*'\.\[text\]'"):
        Vocabulary.train(LINES, 120)


def test_files_that_are_no_vocabulary_are_refused_by_name(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "v.model"
    with pytest.raises(ValueError, match=r"v\.model', found none"):
        Vocabulary.load(path)
    for content in (b"", b"text\n", b"\xff" * 50, vocabulary.model[:20], vocabulary.model[:-1], bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"in '.*v\.model'|of '.*v\.model'"):
            Vocabulary.load(path)


def test_vocabularies_with_other_special_tokens_are_refused() -> None:
    written = io.BytesIO()
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=120, model_type="bpe", minloglevel=2
    )
    with pytest.raises(ValueError, match=r"got \['<unk>', '<s>', '</s>'.*; train it with pad_id=0"):
        Vocabulary(written.getvalue())
