"""Text files turned into a prepared folder: read, given a vocabulary, split into tokens, written with checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normfree.data.text.parallel_text import LONGEST, SPLITS, Odd, Parallel, read_lines, read_parallel
from normfree.data.text.prepared_folder import (
    PAIRS,
    TEXT,
    VOCABULARY,
    Prepared,
    fingerprint,
    open_prepared,
    write_prepared,
)
from normfree.data.text.token_pairs import TokenLines, pack_lines
from normfree.data.text.vocabulary import Vocabulary

LONGEST_TOKENS = 256
Say = Callable[[str], None]


def prepare_pairs(
    folder: str | Path,
    files: Mapping[str, tuple[str | Path, str | Path]],
    *,
    size: int,
    coverage: float = 1.0,
    longest: int = LONGEST,
    longest_tokens: int = LONGEST_TOKENS,
    say: Say | None = None,
) -> Prepared:
    """Turn parallel files of each split into tokens of one vocabulary, trained from both training files.

    A training pair with an empty side, of more than `longest` words or `longest_tokens` tokens is left out and
    reported; valid and test keep every line. A folder that holds just this already is left as it is.

    Raises:
        ValueError: for files that cannot be read, as `read_parallel` says, or a folder that holds something else.
        OSError: if the folder cannot be written.
    """
    settings = {"size": size, "coverage": coverage, "longest": longest, "longest_tokens": longest_tokens}
    folder, inputs = Path(folder), _inputs(files, 2)
    if (found := _already(folder, PAIRS, inputs, settings)) is not None:
        return found
    _tell(say, "reading the text")
    # All files are read before anything is made of the first, so that what is wrong in the last shows at once.
    read = {split: read_parallel(*files[split], longest=longest, whole=split != "train") for split in inputs}
    _tell(say, "training the vocabulary")
    vocabulary = Vocabulary.train((side for pair in read["train"] for side in pair), size, coverage=coverage)
    contents, records = {VOCABULARY: vocabulary.model}, {}
    for split, parallel in read.items():
        _tell(say, f"splitting {split} into tokens")
        source, target = (vocabulary.encode_all([pair[side] for pair in parallel]) for side in (0, 1))
        keep, left_out = list(range(len(parallel))), list(parallel.left_out)
        if split == "train":
            keep = [at for at in keep if max(len(source[at]), len(target[at])) <= longest_tokens]
            left_out += _overlong(parallel, keep, longest_tokens)
        else:
            contents[f"{split}.target.txt"] = "".join(f"{target}\n" for _, target in parallel).encode()
        sides = [TokenLines.of(side[at] for at in keep) for side in (source, target)]
        contents[f"{split}.safetensors"] = pack_lines(dict(zip(PAIRS, sides, strict=True)))
        records[split] = _record(sides, left_out, parallel.kept)
    return write_prepared(folder, contents, PAIRS, vocabulary.size, settings, inputs, records)


def prepare_text(
    folder: str | Path,
    files: Mapping[str, str | Path],
    *,
    size: int,
    coverage: float = 1.0,
    say: Say | None = None,
) -> Prepared:
    """Turn plain text files of each split into tokens of a vocabulary trained from the training file.

    Empty lines are left out and reported. A folder that holds just this already is left as it is.

    Raises:
        ValueError: for files that cannot be read, as `read_lines` says, or a folder that holds something else.
        OSError: if the folder cannot be written.
    """
    settings = {"size": size, "coverage": coverage}
    folder, inputs = Path(folder), _inputs({split: (path,) for split, path in files.items()}, 1)
    if (found := _already(folder, TEXT, inputs, settings)) is not None:
        return found
    _tell(say, "reading the text")
    read = {split: [line.strip() for line in read_lines(files[split])] for split in inputs}
    for split, lines in read.items():
        if not any(lines):
            raise ValueError(f"expected lines of text in '{files[split]}', got none; give another file")
    _tell(say, "training the vocabulary")
    vocabulary = Vocabulary.train(read["train"], size, coverage=coverage)
    contents, records = {VOCABULARY: vocabulary.model}, {}
    for split, lines in read.items():
        _tell(say, f"splitting {split} into tokens")
        empty = tuple(number for number, line in enumerate(lines, start=1) if not line)
        sides = [TokenLines.of(vocabulary.encode_all([line for line in lines if line]))]
        contents[f"{split}.safetensors"] = pack_lines(dict(zip(TEXT, sides, strict=True)))
        records[split] = _record(sides, [Odd(reason="empty", lines=empty)] if empty else [])
    return write_prepared(folder, contents, TEXT, vocabulary.size, settings, inputs, records)


def _tell(say: Say | None, what: str) -> None:
    if say is not None:
        say(what)


def _inputs(files: Mapping[str, Sequence[str | Path]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Name, size and sha256 of the files of each split, in the order of the splits."""
    if "train" not in files or not set(files) <= set(SPLITS) or any(len(paths) != count for paths in files.values()):
        raise ValueError(
            f"expected {count} file{'s' if count > 1 else ''} for train, and for valid and test if there are any, got "
            f"{ {split: len(paths) for split, paths in files.items()} }; name them so"
        )
    inputs: dict[str, list[dict[str, Any]]] = {}
    for split in (split for split in SPLITS if split in files):
        inputs[split] = []
        for path in map(Path, files[split]):
            if not path.is_file():
                raise ValueError(f"expected a text file '{path}', found none; check the name")
            inputs[split].append({"name": path.name, **fingerprint(path.read_bytes())})
    return inputs


def _overlong(parallel: Parallel, keep: Sequence[int], longest: int) -> list[Odd]:
    """The pairs that are not among those to keep, none or one reason."""
    if not keep:
        raise ValueError(f"expected training pairs of at most {longest} tokens, got none; raise longest_tokens")
    lines = sorted(set(parallel.lines) - {parallel.lines[at] for at in keep})
    return [Odd(reason=f"of more than {longest} tokens", lines=tuple(lines))] if lines else []


def _record(sides: Sequence[TokenLines], left_out: Sequence[Odd], kept: Sequence[Odd] = ()) -> dict[str, Any]:
    return {
        "count": len(sides[0]),
        "tokens": [len(side.ids) for side in sides],
        "left_out": list(map(str, left_out)),
        **({"kept": list(map(str, kept))} if kept else {}),
    }


def _already(folder: Path, sides: tuple[str, ...], inputs: Any, settings: Any) -> Prepared | None:
    """What the folder holds, if it is whole and just this; None if it holds nothing whole."""
    try:
        found = open_prepared(folder)
    except ValueError:
        return None
    held = (tuple(found.manifest["sides"]), found.manifest["inputs"], found.manifest["settings"])
    if held == (sides, inputs, settings):
        return found
    raise ValueError(
        f"expected a folder without other prepared data, got '{folder}', which was prepared from other files or with "
        "other settings; choose another folder, or remove this one"
    )
