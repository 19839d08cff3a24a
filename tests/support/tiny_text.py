"""Made-up sentences of a few one-letter words, so that a tiny model learns to copy or reverse them in seconds."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from normfree.data.text.prepared_folder import Prepared, prepare_pairs, prepare_text

LETTERS = "abcdefghij"
SIZE = 4 + 1 + 2 * len(LETTERS)  # special ones, the space, each letter alone and at the start of a word
Rewrite = Callable[[Sequence[str], random.Random], Sequence[str]]


def copied(words: Sequence[str], draws: random.Random) -> Sequence[str]:
    """The words as they are."""
    return words


def turned(words: Sequence[str], draws: random.Random) -> Sequence[str]:
    """The words from the last to the first."""
    return words[::-1]


def drawn(words: Sequence[str], draws: random.Random) -> Sequence[str]:
    """As many words of any kind, which the source does not tell."""
    return draws.choices(LETTERS, k=len(words))


def write_pairs(
    folder: Path, rewrite: Rewrite = copied, *, counts: dict[str, int] | None = None, longest: int = 8
) -> dict[str, tuple[Path, Path]]:
    """Parallel files made.<split>.a and .b: sentences of 1 to `longest` words, rewritten on the other side."""
    draws = random.Random(0)
    files = {}
    for split, count in (counts or {"train": 40, "valid": 10, "test": 10}).items():
        sources = [draws.choices(LETTERS, k=draws.randint(1, longest)) for _ in range(count)]
        if split == "train":
            sources[0] = list(LETTERS)  # every word is there, so that the vocabulary has its size
        sides = {"a": sources, "b": [rewrite(words, draws) for words in sources]}
        paths = [folder / f"made.{split}.{name}" for name in sides]
        for path, sentences in zip(paths, sides.values(), strict=True):
            path.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
        files[split] = (paths[0], paths[1])
    return files


def tiny_pairs(folder: Path, rewrite: Rewrite = copied, *, longest: int = 8, **counts: int) -> Prepared:
    """Such files as a prepared folder inside of `folder`, with one token a word."""
    pytest.importorskip("sentencepiece")
    pytest.importorskip("sacrebleu")  # by which a run scores its test split
    folder.mkdir(parents=True, exist_ok=True)
    return prepare_pairs(
        folder / "pairs", write_pairs(folder, rewrite, counts=counts or None, longest=longest), size=SIZE
    )


def write_text(path: Path, lines: int = 60, seed: int = 0) -> Path:
    """Text in which the two words before it determine each word, and all words are about as frequent."""
    draws = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            words = draws.choices(range(len(LETTERS)), k=2)
            while len(words) < 12:
                words.append((words[-1] + 3 * words[-2] + 1) % len(LETTERS))
            file.write(" ".join(LETTERS[word] for word in words) + "\n")
    return path


def tiny_text(folder: Path) -> Prepared:
    """Such text as a prepared folder inside of `folder`, with one token a word."""
    pytest.importorskip("sentencepiece")
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: write_text(folder / f"made.{split}.txt", seed=i) for i, split in enumerate(("train", "test"))}
    return prepare_text(folder / "text", files, size=SIZE)
