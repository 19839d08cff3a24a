"""Prepare text files: tokenize them into a folder from which a machine without sentencepiece can train and score.

vocabulary.model                  the subwords, in sentencepiece's format
<split>.safetensors               the tokens of train and, if given, valid and test
valid.target.txt, test.target.txt the original translations, one per line, to score against
prepared.json                     sizes, settings, and the sha256 of every file read and written; written last
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normfree.data.text.text_files import (
    LONGEST,
    SPLITS,
    BadLines,
    ParallelText,
    read_lines,
    read_parallel,
    require_file,
)
from normfree.data.text.tokens import TokenLines, TokenPairs, pack_lines, unpack_lines
from normfree.data.text.vocabulary import Vocabulary
from normfree.storage.reading import Checksum, digest_of, has_kinds, list_checksums, parse_json, read_limited
from normfree.storage.writing import explain_os_errors, write_bytes

MANIFEST, VOCABULARY = "prepared.json", "vocabulary.model"
LONGEST_TOKENS = 256
_SPLIT_KINDS: dict[str, Any] = {"count": int, "tokens": list, "left_out": list}
_FORMAT = 1
_PAIRS, _TEXT = ("source", "target"), ("text",)
_REMEDY = "prepare the data again"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared folder; `open_prepared` opens one. Every file is compared with its sha256 when it is read.

    Attributes:
        folder: the folder.
        manifest: the content of prepared.json: "vocabulary" (its size), "settings", "inputs", "splits", "files".
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are there: train and, if given, valid and test."""
        return tuple(self.manifest["splits"])

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, with the special ones."""
        return int(self.manifest["vocabulary"])

    @property
    def digest(self) -> str:
        """The sha256 that identifies all files of the folder."""
        return str(self.manifest["sha256"])

    def vocabulary(self) -> Vocabulary:
        """Read the subwords; they decode without sentencepiece."""
        return Vocabulary(self._read(VOCABULARY), str(self.folder / VOCABULARY))

    def pairs(self, split: str) -> TokenPairs:
        """Read the token pairs of a split of parallel text.

        Raises:
            ValueError: if the folder holds plain text or lacks the split, or a file is missing or altered.
        """
        return TokenPairs(*self._read_sides(split, _PAIRS))

    def text(self, split: str) -> TokenLines:
        """Read the token lines of a split of plain text.

        Raises:
            ValueError: if the folder holds parallel text or lacks the split, or a file is missing or altered.
        """
        return self._read_sides(split, _TEXT)[0]

    def references(self, split: str) -> list[str]:
        """Read the original translations of valid or test, one per line.

        Raises:
            ValueError: as `pairs` does, and for the split train, whose text is not stored.
        """
        self._require(split, _PAIRS)
        if split == "train":
            raise ValueError(
                f"expected the split valid or test of '{self.folder}', got train, whose text is not stored; read the "
                "original file"
            )
        return self._read(f"{split}.target.txt").decode("utf-8").split("\n")[:-1]

    def report(self) -> list[str]:
        """One sentence per split: its size, and the bad lines that were left out or kept."""
        sentences = []
        for split, record in self.manifest["splits"].items():
            names = " and ".join(f"'{read['name']}'" for read in self.manifest["inputs"][split])
            bad = f"; left out {' and '.join(record['left_out'])}" if record["left_out"] else ""
            bad += (
                f"; kept {' and '.join(kept)}, because a score counts all lines" if (kept := record.get("kept")) else ""
            )
            tokens = " and ".join(f"{count:,}" for count in record["tokens"])
            sentences.append(f"{split}: {record['count']:,} lines, {tokens} tokens of {names}{bad}")
        return sentences

    def _read_sides(self, split: str, sides: tuple[str, ...]) -> list[TokenLines]:
        self._require(split, sides)
        name = f"{split}.safetensors"
        found = unpack_lines(self._read(name), sides, str(self.folder / name))
        for lines in found:
            if len(lines.ids) and int(lines.ids.max()) >= self.vocabulary_size:
                raise ValueError(
                    f"expected tokens below {self.vocabulary_size} in '{self.folder / name}', got "
                    f"{int(lines.ids.max())}; {_REMEDY}"
                )
        return found

    def _require(self, split: str, sides: tuple[str, ...]) -> None:
        """Raise `ValueError` if the folder holds the other kind of text, or lacks the split."""
        if tuple(self.manifest["sides"]) != sides:
            kinds = {_PAIRS: "parallel text", _TEXT: "plain text"}
            raise ValueError(
                f"expected {kinds[sides]} in '{self.folder}', got {kinds[tuple(self.manifest['sides'])]}; prepare a "
                "folder of that kind"
            )
        if split not in self.splits:
            raise ValueError(
                f"expected a split {' or '.join(self.splits)} of '{self.folder}', got '{split}'; prepare the "
                "folder with this split"
            )

    def _read(self, name: str) -> bytes:
        """The content of a file of the folder; raises `ValueError` if it is missing, truncated or altered."""
        path = self.folder / name
        if name not in self.manifest["files"] or not path.is_file():
            raise ValueError(f"expected '{path}', found none; {_REMEDY}")
        Checksum.from_json(self.manifest["files"][name]).check(path, str(path), _REMEDY)  # before it fills the memory
        return path.read_bytes()


def open_prepared(folder: str | Path) -> Prepared:
    """Open a prepared folder, and check every file of it.

    Raises:
        ValueError: if the folder is not a prepared one, or a file is missing, truncated or altered.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"expected a prepared folder with '{path}', found none; prepare the data first, with normfree data "
            "prepare, or train with --source and --target, or --text"
        )
    damaged = f"expected '{path}' as it was written, got one that is truncated or altered; {_REMEDY}"
    try:
        manifest = parse_json(read_limited(path))
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest["sha256"] != digest_of(body):
            raise ValueError(damaged)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(damaged) from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"expected format {_FORMAT} in '{path}', got {manifest.get('format')}; {_REMEDY}")
    if not _has_known_kinds(manifest):
        raise ValueError(damaged)
    prepared = Prepared(folder=folder, manifest=manifest)
    for name in manifest["files"]:
        prepared._read(name)
    return prepared


def _has_known_kinds(manifest: dict[str, Any]) -> bool:
    """Whether a manifest, which may be forged, has the entries that are read, and names no file elsewhere."""
    kinds = {"sides": list, "vocabulary": int, "settings": dict, "inputs": dict, "splits": dict, "files": dict}
    if not kinds.keys() <= manifest.keys() or not has_kinds(manifest, kinds):
        return False
    splits, inputs, files = manifest["splits"], manifest["inputs"], manifest["files"]
    return (
        tuple(manifest["sides"]) in (_PAIRS, _TEXT)
        and {VOCABULARY, *(f"{split}.safetensors" for split in splits)} <= files.keys()
        and all(Path(name).name == name for name in files)
        and all(isinstance(inputs.get(split), list) for split in splits)
        and all(has_kinds(record, {"name": str}) and "name" in record for split in splits for record in inputs[split])
        and all(has_kinds(record, _SPLIT_KINDS) and _SPLIT_KINDS.keys() <= record.keys() for record in splits.values())
        and all(isinstance(count, int) for record in splits.values() for count in record["tokens"])
        and all(isinstance(line, str) for record in splits.values() for line in record["left_out"])
    )


def prepare_pairs(
    folder: str | Path,
    files: Mapping[str, tuple[str | Path, str | Path]],
    *,
    size: int,
    coverage: float = 1.0,
    longest: int = LONGEST,
    longest_tokens: int = LONGEST_TOKENS,
    say: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenize parallel files with one vocabulary, trained on both training files.

    Training pairs with an empty or overlong side are left out and reported; valid and test keep every line.

    Args:
        folder: where to write; a folder that holds the same data already is left as it is.
        files: the two files of train and, if you have them, of valid and test; see `find_parallel`.
        size: the number of subwords, with the special ones.
        coverage: the share of characters that become subwords; see `Vocabulary.train`.
        longest: the maximum number of words in a sentence of a training pair.
        longest_tokens: the maximum number of tokens in a sentence of a training pair.
        say: called with one line at the start of each stage.

    Raises:
        ValueError: for files that cannot be read, as `read_parallel` does, or a folder that holds other data.
        OSError: if the folder cannot be written.
    """
    settings = {"size": size, "coverage": coverage, "longest": longest, "longest_tokens": longest_tokens}
    folder, inputs = Path(folder), _inputs(files, 2)
    if (found := _already_prepared(folder, _PAIRS, inputs, settings)) is not None:
        return found
    report = say or _silent
    report("reading the text")
    # All files are read before the first is tokenized, so that an error in the last shows at once.
    read = {split: read_parallel(*files[split], longest=longest, whole=split != "train") for split in inputs}
    report("training the vocabulary")
    vocabulary = Vocabulary.train((side for pair in read["train"] for side in pair), size, coverage=coverage)
    contents, records = {VOCABULARY: vocabulary.model}, {}
    for split, parallel in read.items():
        report(f"splitting {split} into tokens")
        source, target = (vocabulary.encode_all([pair[side] for pair in parallel]) for side in (0, 1))
        keep, left_out = list(range(len(parallel))), list(parallel.left_out)
        if split == "train":
            keep = [at for at in keep if max(len(source[at]), len(target[at])) <= longest_tokens]
            left_out += _overlong(parallel, keep, longest_tokens)
        else:
            contents[f"{split}.target.txt"] = "".join(f"{target}\n" for _, target in parallel).encode()
        sides = [TokenLines.of(side[at] for at in keep) for side in (source, target)]
        contents[f"{split}.safetensors"] = pack_lines(dict(zip(_PAIRS, sides, strict=True)))
        records[split] = _record(sides, left_out, parallel.kept)
    return _write(folder, contents, _PAIRS, vocabulary.size, settings, inputs, records)


def prepare_text(
    folder: str | Path,
    files: Mapping[str, str | Path],
    *,
    size: int,
    coverage: float = 1.0,
    say: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenize plain text files with a vocabulary trained on the training file; empty lines are left out and reported.

    Args:
        folder: where to write; a folder that holds the same data already is left as it is.
        files: the file of train and, if you have them, of valid and test; see `find_splits`.
        size: the number of subwords, with the special ones.
        coverage: the share of characters that become subwords; see `Vocabulary.train`.
        say: called with one line at the start of each stage.

    Raises:
        ValueError: for files that cannot be read, as `read_lines` does, or a folder that holds other data.
        OSError: if the folder cannot be written.
    """
    settings = {"size": size, "coverage": coverage}
    folder, inputs = Path(folder), _inputs({split: (path,) for split, path in files.items()}, 1)
    if (found := _already_prepared(folder, _TEXT, inputs, settings)) is not None:
        return found
    report = say or _silent
    report("reading the text")
    read = {split: [line.strip() for line in read_lines(files[split])] for split in inputs}
    for split, lines in read.items():
        if not any(lines):
            raise ValueError(f"expected lines of text in '{files[split]}', got none; give another file")
    report("training the vocabulary")
    vocabulary = Vocabulary.train(read["train"], size, coverage=coverage)
    contents, records = {VOCABULARY: vocabulary.model}, {}
    for split, lines in read.items():
        report(f"splitting {split} into tokens")
        empty = tuple(number for number, line in enumerate(lines, start=1) if not line)
        sides = [TokenLines.of(vocabulary.encode_all([line for line in lines if line]))]
        contents[f"{split}.safetensors"] = pack_lines(dict(zip(_TEXT, sides, strict=True)))
        records[split] = _record(sides, [BadLines(reason="empty", lines=empty)] if empty else [])
    return _write(folder, contents, _TEXT, vocabulary.size, settings, inputs, records)


def _silent(text: str) -> None:
    pass


def _inputs(files: Mapping[str, Sequence[str | Path]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Name, size and sha256 of the files of each split, in the order of the splits."""
    if "train" not in files or not set(files) <= set(SPLITS) or any(len(paths) != count for paths in files.values()):
        raise ValueError(
            f"expected {count} file{'s' if count > 1 else ''} for train, and for valid and test if there are any, got "
            f"{ {split: len(paths) for split, paths in files.items()} }; name the splits train, valid and test"
        )
    inputs: dict[str, list[dict[str, Any]]] = {}
    for split in (split for split in SPLITS if split in files):
        inputs[split] = []
        for path in map(Path, files[split]):
            require_file(path)
            inputs[split].append({"name": path.name, **Checksum.of(path).to_json()})
    return inputs


def _overlong(parallel: ParallelText, keep: Sequence[int], longest: int) -> list[BadLines]:
    """The lines of the pairs that have too many tokens to keep."""
    if not keep:
        raise ValueError(f"expected training pairs of at most {longest} tokens, got none; raise longest_tokens")
    lines = sorted(set(parallel.lines) - {parallel.lines[at] for at in keep})
    return [BadLines(reason=f"of more than {longest} tokens", lines=tuple(lines))] if lines else []


def _record(sides: Sequence[TokenLines], left_out: Sequence[BadLines], kept: Sequence[BadLines] = ()) -> dict[str, Any]:
    return {
        "count": len(sides[0]),
        "tokens": [len(side.ids) for side in sides],
        "left_out": list(map(str, left_out)),
        **({"kept": list(map(str, kept))} if kept else {}),
    }


def _already_prepared(folder: Path, sides: tuple[str, ...], inputs: Any, settings: Any) -> Prepared | None:
    """The prepared folder, if it holds exactly this data; None if it is not a complete prepared folder."""
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


def _write(
    folder: Path,
    contents: Mapping[str, bytes],
    sides: tuple[str, ...],
    vocabulary: int,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    records: Mapping[str, Any],
) -> Prepared:
    """Write the files, then the manifest, without which the folder is not a prepared one."""
    body = {
        "format": _FORMAT,
        "sides": list(sides),
        "vocabulary": vocabulary,
        "settings": dict(settings),
        "inputs": dict(inputs),
        "splits": dict(records),
        "files": list_checksums(contents),
    }
    manifest = json.dumps({**body, "sha256": digest_of(body)}, indent=1, ensure_ascii=False) + "\n"
    with explain_os_errors("the prepared data", folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, content in {**contents, MANIFEST: manifest.encode()}.items():
            write_bytes(folder / name, content)
    return open_prepared(folder)
