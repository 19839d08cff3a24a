"""Read text files, one sentence per line, and parallel files, where line n of one translates line n of the other."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, cast

LONGEST = 250  # words of a sentence; Moses' usual limits are 80 to 250
SPLITS = ("train", "valid", "test")
_LONGEST_LINE = 1 << 26  # bytes
_COMPRESSED = (".xz", ".gz")
_SPELLINGS = {"valid": ("valid", "val", "dev"), "test": ("test",)}
_SHOWN = 5  # line numbers in a report; the others are only counted


@dataclass(frozen=True, kw_only=True)
class BadLines:
    """Lines that are empty or too long, left out or kept.

    Attributes:
        reason: such as "empty in 'a.de'".
        lines: their numbers, counted from 1.
    """

    reason: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        """A part of a sentence, such as "3 empty in 'a.de' (lines 2, 17, 40)"."""
        shown = ", ".join(map(str, self.lines[:_SHOWN])) + (", …" if len(self.lines) > _SHOWN else "")
        return f"{len(self.lines):,} {self.reason} (line{'s' if len(self.lines) > 1 else ''} {shown})"


@dataclass(frozen=True, kw_only=True)
class ParallelText:
    """Pairs of sentences from two files.

    Attributes:
        pairs: in the order of the files.
        lines: the line number of each pair.
        left_out: the bad lines that are not among the pairs.
        kept: the bad lines that are among the pairs.
    """

    pairs: list[tuple[str, str]]
    lines: list[int]
    left_out: tuple[BadLines, ...] = ()
    kept: tuple[BadLines, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)


def decode_lines(stream: Iterable[bytes], where: str) -> Iterator[str]:
    r"""Decode the lines of a UTF-8 stream, without their line ends.

    Only "\n" and "\r\n" end a line. Other separators of Unicode occur inside sentences and would shift the lines of one
    file against those of the other. A byte order mark is skipped.

    Args:
        stream: the raw lines.
        where: the place in errors, such as "in 'a.txt'".

    Raises:
        ValueError: for a line that is not UTF-8, with its place and number.
    """
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"expected UTF-8 {where}, got the byte 0x{raw[error.start]:02x} at byte {error.start + 1} of line "
                f"{number}; convert it, for example with iconv"
            ) from error
        yield text.removeprefix("\ufeff") if number == 1 else text


def read_lines(path: str | Path) -> Iterator[str]:
    """Read the lines of a UTF-8 file, plain or compressed as .xz or .gz; see `decode_lines`.

    Raises:
        ValueError: for a file that is missing, damaged or not UTF-8, with the file and the line.
    """
    path = Path(path)
    number = 0
    try:
        with _open(path) as stream:
            for text in decode_lines(_limited_lines(stream, path), f"in '{path}'"):
                number += 1
                yield text
    except FileNotFoundError as error:
        raise ValueError(f"expected a text file '{path}', found none; check the name") from error
    except IsADirectoryError as error:
        raise ValueError(f"expected a text file '{path}', found a folder; name a file in it") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"expected a whole {path.suffix} file in '{path}', got one that is damaged after line {number} "
            f"({error}); copy it again"
        ) from error


def read_parallel(
    source: str | Path, target: str | Path, *, longest: int = LONGEST, whole: bool = False
) -> ParallelText:
    """Read the pairs of two parallel files, without those that have an empty or overlong side.

    Args:
        source: the file of sentences.
        target: the file of their translations.
        longest: the maximum number of words in a sentence.
        whole: keep all pairs and only report the bad ones, because a score counts all lines of a test file.

    Raises:
        ValueError: for different numbers of lines, for files without any pair, and as `read_lines` does.
    """
    source, target = Path(source), Path(target)
    if longest < 1:
        raise ValueError(f"expected sentences of at least one word, got longest={longest}; raise it")
    same_name = source.name == target.name and source != target  # de/train.txt and en/train.txt
    names = ["/".join(path.parts[-2:]) if same_name else path.name for path in (source, target)]
    pairs, lines = [], []
    found: dict[str, list[int]] = {}
    counts = [0, 0]
    for number, (one, other) in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        counts = [count + (line is not None) for count, line in zip(counts, (one, other), strict=True)]
        if one is None or other is None:
            continue  # read both to the end, so that the error gives both counts
        words = list(zip(names, (len(one.split()), len(other.split())), strict=True))
        reasons = {f"empty in '{name}'" for name, count in words if not count}
        reasons = reasons or {f"of more than {longest} words in '{name}'" for name, count in words if count > longest}
        for reason in reasons:
            found.setdefault(reason, []).append(number)
        if whole or not reasons:
            pairs.append((one.strip(), other.strip()))
            lines.append(number)
    if counts[0] != counts[1]:
        raise ValueError(
            f"expected as many lines in '{source}' as in '{target}', got {counts[0]:,} and {counts[1]:,}: line "
            f"{min(counts) + 1} has no partner; give files that were aligned line by line"
        )
    bad = tuple(BadLines(reason=reason, lines=tuple(numbers)) for reason, numbers in sorted(found.items()))
    if not pairs:
        why = f", of which {' and '.join(map(str, bad))}" if bad else ""
        raise ValueError(
            f"expected pairs of sentences in '{source}' and '{target}', got {counts[0]} lines{why}; give other files"
        )
    return ParallelText(pairs=pairs, lines=lines, left_out=() if whole else bad, kept=bad if whole else ())


def find_parallel(source: str | Path, target: str | Path) -> dict[str, tuple[Path, Path]]:
    """Find the parallel files of validation and test beside those of training, by their names.

    'multi30k.train.de.xz' has 'multi30k.valid.de' (or val, or dev) and 'multi30k.test.de' beside it, plain or
    compressed. If the name has no part 'train', there are no other splits.

    Returns:
        The two files of each split that is there.

    Raises:
        ValueError: if a training file is missing, or only one of the two files of another split is there.
    """
    given = (Path(source), Path(target))
    for path in given:
        require_file(path)
    found = {"train": given}
    for split, spellings in _SPELLINGS.items():
        one, other = (_beside(path, spellings) for path in given)
        if one and other:
            found[split] = (one, other)
        elif one or other:
            there, lacking = (one, given[1]) if one else (other, given[0])
            raise ValueError(
                f"expected the {split} file that goes with '{there}' beside '{lacking}', found none; add it, or move "
                f"'{there}' away"
            )
    return found


def find_splits(path: str | Path) -> dict[str, Path]:
    """Find the files of validation and test beside the training file of plain text, by their names.

    Returns:
        The file of each split that is there.

    Raises:
        ValueError: if the training file is missing.
    """
    given = Path(path)
    require_file(given)
    beside = {split: _beside(given, spellings) for split, spellings in _SPELLINGS.items()}
    return {"train": given, **{split: found for split, found in beside.items() if found is not None}}


def require_file(path: Path) -> None:
    """Raise `ValueError` if there is no such text file."""
    if not path.is_file():
        raise ValueError(f"expected a text file '{path}', found none; check the name")


def _limited_lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """The raw lines of a stream; a compressed line of gigabytes would fill the memory."""
    while line := stream.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"expected lines of at most {_LONGEST_LINE >> 20} MiB in '{path}', got more; split them")
        yield line


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _beside(path: Path, spellings: tuple[str, ...]) -> Path | None:
    """The file of another split, under one of its spellings in place of "train"."""
    parts = path.name.removesuffix(path.suffix if path.suffix in _COMPRESSED else "").split(".")
    if "train" not in parts:
        return None
    at = parts.index("train")
    for spelling in spellings:
        if found := _existing(path.with_name(".".join([*parts[:at], spelling, *parts[at + 1 :]])), path.suffix):
            return found
    return None


def _existing(path: Path, preferred: str) -> Path | None:
    """The file, plain or compressed; the preferred suffix is tried first."""
    endings = sorted(("", *_COMPRESSED), key=lambda ending: ending != preferred)
    return next((found for ending in endings if (found := path.with_name(path.name + ending)).is_file()), None)
