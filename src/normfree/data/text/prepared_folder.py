"""A folder of text turned into tokens, from which a machine without sentencepiece trains and scores.

vocabulary.model                  the subwords, as sentencepiece writes them
<split>.safetensors               the tokens of train and, where given, valid and test
valid.target.txt, test.target.txt the translations as they were, one a line, to score against
prepared.json                     sizes, settings and the sha256 of every file read and written; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normfree.data.download.checksums import Checksum
from normfree.data.text.token_pairs import TokenLines, TokenPairs, unpack_lines
from normfree.data.text.vocabulary import Vocabulary
from normfree.files import explained, replacing

MANIFEST, VOCABULARY = "prepared.json", "vocabulary.model"
_FORMAT = 1
PAIRS, TEXT = ("source", "target"), ("text",)
_REMEDY = "prepare the data again"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared folder whose files are as they were written; what is read of it is compared with its sha256 again.

    `manifest` is the content of prepared.json: "vocabulary" (its size), "settings", "inputs", "splits", "files".
    """

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def splits(self) -> tuple[str, ...]:
        """Those of train, valid and test that are there."""
        return tuple(self.manifest["splits"])

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, the special ones counted."""
        return int(self.manifest["vocabulary"])

    @property
    def digest(self) -> str:
        """The sha256 that stands for all files of the folder."""
        return str(self.manifest["sha256"])

    def vocabulary(self) -> Vocabulary:
        """The subwords; they decode without sentencepiece."""
        return Vocabulary(self._read(VOCABULARY), str(self.folder / VOCABULARY))

    def pairs(self, split: str) -> TokenPairs:
        """The token pairs of a split of parallel text."""
        return TokenPairs(*self._lines(split, PAIRS))

    def text(self, split: str) -> TokenLines:
        """The token lines of a split of plain text."""
        return self._lines(split, TEXT)[0]

    def references(self, split: str) -> list[str]:
        """The translations of valid or test as they were written, one a line of the file."""
        self._require(split, PAIRS)
        if split == "train":
            raise ValueError(f"expected the split valid or test of '{self.folder}', got train, whose text is not kept")
        return self._read(f"{split}.target.txt").decode("utf-8").split("\n")[:-1]

    def report(self) -> list[str]:
        """One sentence a split: what it holds, and the odd lines that were left out of it or kept."""
        sentences = []
        for split, record in self.manifest["splits"].items():
            names = " and ".join(f"'{read['name']}'" for read in self.manifest["inputs"][split])
            odd = f"; left out {' and '.join(record['left_out'])}" if record["left_out"] else ""
            odd += f"; kept {' and '.join(kept)}, as a score is of all lines" if (kept := record.get("kept")) else ""
            tokens = " and ".join(f"{count:,}" for count in record["tokens"])
            sentences.append(f"{split}: {record['count']:,} lines, {tokens} tokens of {names}{odd}")
        return sentences

    def _lines(self, split: str, sides: tuple[str, ...]) -> list[TokenLines]:
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
        if tuple(self.manifest["sides"]) != sides:
            kinds = {PAIRS: "parallel text", TEXT: "plain text"}
            raise ValueError(
                f"expected {kinds[sides]} in '{self.folder}', got {kinds[tuple(self.manifest['sides'])]}; prepare the "
                "other"
            )
        if split not in self.splits:
            raise ValueError(
                f"expected a split {' or '.join(self.splits)} of '{self.folder}', got '{split}'; prepare it with the "
                "folder"
            )

    def _read(self, name: str) -> bytes:
        """The content of a file of the folder, refused if it is missing, truncated or altered."""
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"expected '{path}', found none; {_REMEDY}")
        content, written = path.read_bytes(), self.manifest["files"][name]
        Checksum(sha256=written["sha256"], size=written["bytes"]).check(content, str(path), _REMEDY)
        return content


def open_prepared(folder: str | Path) -> Prepared:
    """A folder that `preparing` has made, every file checked.

    Raises:
        ValueError: if the folder holds nothing prepared, or a file is missing, truncated or altered, by its name.
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
        manifest = json.loads(path.read_bytes())
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest["sha256"] != _digest(body):
            raise ValueError(damaged)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(damaged) from error
    if manifest["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT} in '{path}', got {manifest['format']}; {_REMEDY}")
    prepared = Prepared(folder=folder, manifest=manifest)
    for name in manifest["files"]:
        prepared._read(name)
    return prepared


def write_prepared(
    folder: Path,
    contents: Mapping[str, bytes],
    sides: tuple[str, ...],
    vocabulary: int,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    records: Mapping[str, Any],
) -> Prepared:
    """Write the files and, when all are on the disk, the manifest that makes them a prepared folder."""
    body = {
        "format": _FORMAT,
        "sides": list(sides),
        "vocabulary": vocabulary,
        "settings": dict(settings),
        "inputs": dict(inputs),
        "splits": dict(records),
        "files": {name: fingerprint(content) for name, content in contents.items()},
    }
    manifest = json.dumps({**body, "sha256": _digest(body)}, indent=1, ensure_ascii=False) + "\n"
    with explained("the prepared data", folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, content in {**contents, MANIFEST: manifest.encode()}.items():
            with replacing(folder / name) as temporary:
                temporary.write_bytes(content)
    return open_prepared(folder)


def fingerprint(content: bytes) -> dict[str, Any]:
    """Size and sha256 of the content of a file."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
