"""Plain text, one sentence a line, and parallel text, where line n of one file translates line n of the other."""

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
_COMPRESSED = (".xz", ".gz")
_SPELLINGS = {"valid": ("valid", "val", "dev"), "test": ("test",)}
_SHOWN = 5  # line numbers in a report; the rest are counted


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Lines that are odd for one reason, be they left out or kept; they are counted from 1."""

    reason: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        """A part of a sentence, such as "3 empty in 'a.de' (lines 2, 17, 40)"."""
        shown = ", ".join(map(str, self.lines[:_SHOWN])) + (", …" if len(self.lines) > _SHOWN else "")
        return f"{len(self.lines):,} {self.reason} (line{'s' if len(self.lines) > 1 else ''} {shown})"


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Pairs of sentences in the order of the files, the line of each, and odd lines that were left out, or kept."""

    pairs: list[tuple[str, str]]
    lines: list[int]
    left_out: tuple[Odd, ...] = ()
    kept: tuple[Odd, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)


def decoded(stream: Iterable[bytes], where: str) -> Iterator[str]:
    r"""The lines of a stream of UTF-8 without their ends.

    Only "\n" and "\r\n" end a line: other separators of Unicode occur inside of sentences, and would shift the lines
    of one file against those of the other. A byte order mark is skipped.

    Raises:
        ValueError: for a line that is not UTF-8, with `where` it stands ("in 'a.txt'") and its number.
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
    """The lines of a UTF-8 file, also of one compressed as .xz or .gz, as `decoded` has them.

    Raises:
        ValueError: for a file that is missing, damaged or not UTF-8, with the file and the line.
    """
    path = Path(path)
    number = 0
    try:
        with _opened(path) as stream:
            for text in decoded(stream, f"in '{path}'"):
                number += 1
                yield text
    except FileNotFoundError as error:
        raise ValueError(f"expected a text file '{path}', found none; check the name") from error
    except IsADirectoryError as error:
        raise ValueError(f"expected a text file '{path}', found a folder; name a file in it") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"expected a whole {path.suffix} file in '{path}', got one that is damaged behind line {number} "
            f"({error}); copy it again"
        ) from error


def read_parallel(source: str | Path, target: str | Path, *, longest: int = LONGEST, whole: bool = False) -> Parallel:
    """The pairs of two files; a pair with an empty side, or one of more than `longest` words, is left out and told.

    `whole` tells of such pairs and keeps them: a score is of all lines of a test file.

    Raises:
        ValueError: for unequal numbers of lines, for files without any pair, and as `read_lines` does.
    """
    source, target = Path(source), Path(target)
    if longest < 1:
        raise ValueError(f"expected sentences of at least one word, got longest={longest}; raise it")
    alike = source.name == target.name and source != target  # de/train.txt and en/train.txt
    names = ["/".join(path.parts[-2:]) if alike else path.name for path in (source, target)]
    pairs, lines = [], []
    found: dict[str, list[int]] = {}
    counts = [0, 0]
    for number, (one, other) in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        counts = [count + (line is not None) for count, line in zip(counts, (one, other), strict=True)]
        if one is None or other is None:
            continue  # both are read to their ends, so that the error can give both counts
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
    odd = tuple(Odd(reason=reason, lines=tuple(numbers)) for reason, numbers in sorted(found.items()))
    if not pairs:
        why = f", of which {' and '.join(map(str, odd))}" if odd else ""
        raise ValueError(
            f"expected pairs of sentences in '{source}' and '{target}', got {counts[0]} lines{why}; give other files"
        )
    return Parallel(pairs=pairs, lines=lines, left_out=() if whole else odd, kept=odd if whole else ())


def find_parallel(source: str | Path, target: str | Path) -> dict[str, tuple[Path, Path]]:
    """The files of each split, found beside those of the training split by their names.

    'multi30k.train.de.xz' has beside it 'multi30k.valid.de' (or val, or dev) and 'multi30k.test.de', plain or
    compressed. A split of which neither file is there is left out; a name without a part "train" has no others.

    Raises:
        ValueError: if a training file is missing, or only one of the two files of another split is there.
    """
    given = (Path(source), Path(target))
    for path in given:
        if not path.is_file():
            raise ValueError(f"expected a text file '{path}', found none; check the name")
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


def find_one(path: str | Path) -> dict[str, Path]:
    """The file of each split of plain text, found beside that of the training split by its name.

    Raises:
        ValueError: if the training file is missing.
    """
    given = Path(path)
    if not given.is_file():
        raise ValueError(f"expected a text file '{given}', found none; check the name")
    beside = {split: _beside(given, spellings) for split, spellings in _SPELLINGS.items()}
    return {"train": given, **{split: found for split, found in beside.items() if found is not None}}


def _opened(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _beside(path: Path, spellings: tuple[str, ...]) -> Path | None:
    parts = path.name.removesuffix(path.suffix if path.suffix in _COMPRESSED else "").split(".")
    if "train" not in parts:
        return None
    at = parts.index("train")
    for spelling in spellings:
        if found := _existing(path.with_name(".".join([*parts[:at], spelling, *parts[at + 1 :]])), path.suffix):
            return found
    return None


def _existing(path: Path, preferred: str) -> Path | None:
    """The file, plain or compressed; first as its sibling is."""
    endings = sorted(("", *_COMPRESSED), key=lambda ending: ending != preferred)
    return next((found for ending in endings if (found := path.with_name(path.name + ending)).is_file()), None)
