"""A prepared folder holds the text of the files, needs no sentencepiece, and is refused if anything in it changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from normfree.data.text import prepared_folder as prepared_module
from normfree.data.text.prepared_folder import MANIFEST, Prepared, open_prepared, prepare_pairs, prepare_text
from normfree.storage.writing import write_bytes

SOURCE = [f"der {a} {n} ist {v}" for a in ("rote", "alte") for n in ("Ball", "Hund", "Baum") for v in ("hier", "dort")]
TARGET = [f"the {a} {n} is {v}" for a in ("red", "old") for n in ("ball", "dog", "tree") for v in ("here", "there")]
FILES = ("vocabulary.model", "train.safetensors", "valid.safetensors", "test.safetensors", "valid.target.txt")


def write(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def corpus(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Three splits; training has an empty line and an overlong one, the test split an empty one."""
    sides = {
        "train": ([*SOURCE, "", "der " * 40], [*TARGET, "empty", "the"]),
        "valid": (SOURCE[:3], TARGET[:3]),
        "test": ([*SOURCE[3:5], ""], [*TARGET[3:5], "nothing"]),
    }
    return {
        split: (write(folder, f"a.{split}.de", source), write(folder, f"a.{split}.en", target))
        for split, (source, target) in sides.items()
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    pytest.importorskip("sentencepiece")
    return corpus(tmp_path)


@pytest.fixture
def made(tmp_path: Path, files: dict[str, tuple[Path, Path]]) -> Prepared:
    return prepare_pairs(tmp_path / "out", files, size=70, longest_tokens=30)


def test_folder_holds_the_tokens_of_the_files(made: Prepared) -> None:
    vocabulary = made.vocabulary()
    assert made.splits == ("train", "valid", "test")
    assert made.vocabulary_size == vocabulary.size == 70
    train = made.pairs("train")
    assert [tuple(map(vocabulary.decode, train[i])) for i in range(len(train))] == list(
        zip(SOURCE, TARGET, strict=True)
    )
    assert made.references("valid") == TARGET[:3]
    assert made.references("test") == [*TARGET[3:5], "nothing"]  # a score counts every line
    assert made.pairs("test")[2][0] == []
    first = made.report()[0]
    assert first.startswith("train: 12 lines,")
    assert first.endswith(
        "of 'a.train.de' and 'a.train.en'; left out 1 empty in 'a.train.de' (line 13) and 1 of more than 30 "
        "tokens (line 14)"
    )
    assert made.report()[2].endswith("; kept 1 empty in 'a.test.de' (line 3), because a score counts all lines")
    assert "kept" not in made.report()[1]


def test_folder_opens_without_sentencepiece(made: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    again = open_prepared(made.folder)
    assert again.vocabulary().decode(again.pairs("valid")[0][1]) == TARGET[0]
    assert again.digest == made.digest


def test_folder_names_no_place_of_the_machine(made: Prepared, tmp_path: Path) -> None:
    assert str(tmp_path) not in (made.folder / MANIFEST).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "altered", "longer", "missing", "empty"])
def test_folder_with_a_damaged_file_is_refused_by_its_name(made: Prepared, name: str, damage: str) -> None:
    path = made.folder / name
    content = path.read_bytes()
    half = len(content) // 2
    damaged = {
        "truncated": content[:half],
        "altered": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        "longer": content + b"x",
        "empty": b"",
    }
    path.unlink()
    if damage != "missing":
        path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf"'.*out/{name}'"):
        open_prepared(made.folder)
    if name != MANIFEST:  # opened before the damage
        reading = {"vocabulary.model": made.vocabulary, "valid.target.txt": lambda: made.references("valid")}
        with pytest.raises(ValueError, match=rf"'.*out/{name}'"):
            reading.get(name, lambda: made.pairs(name.split(".")[0]))()


def test_folder_with_an_edited_manifest_is_refused(made: Prepared) -> None:
    path = made.folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["vocabulary"] = 71
    for wrong in (manifest, [], {"sha256": 5}, "text"):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(ValueError, match=r"prepared\.json' as it was written, got one that is truncated or alter"):
            open_prepared(made.folder)


def test_preparing_again_does_nothing_and_repairs_what_is_damaged(
    made: Prepared, files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    stamp = (made.folder / MANIFEST).stat().st_mtime_ns
    said: list[str] = []
    again = prepare_pairs(made.folder, files, size=70, longest_tokens=30, say=said.append)
    assert (again.digest, said) == (made.digest, [])
    assert (made.folder / MANIFEST).stat().st_mtime_ns == stamp
    (made.folder / "train.safetensors").write_bytes(b"broken")
    assert prepare_pairs(made.folder, files, size=70, longest_tokens=30).digest == made.digest
    with pytest.raises(ValueError, match="prepared from other files or with other settings; choose another"):
        prepare_pairs(made.folder, files, size=71, longest_tokens=30)
    write(tmp_path, "a.train.de", [*SOURCE, "neu", "neu"])
    with pytest.raises(ValueError, match="prepared from other files"):
        prepare_pairs(made.folder, files, size=70, longest_tokens=30)


def test_preparing_that_breaks_off_leaves_no_prepared_folder(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, content: bytes) -> None:
        if path.name == "test.safetensors":
            raise OSError(28, "No space left on device")
        write_bytes(path, content)

    monkeypatch.setattr(prepared_module, "write_bytes", failing)
    with pytest.raises(OSError, match=r"could not write the prepared data '.*': No space left"):
        prepare_pairs(tmp_path / "out", files, size=70)
    with pytest.raises(ValueError, match="found none; prepare the data first"):
        open_prepared(tmp_path / "out")


def test_preparing_refuses_what_it_cannot_read(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 2 files for train"):
        prepare_pairs(tmp_path / "out", {"valid": files["valid"]}, size=70)
    with pytest.raises(ValueError, match="at most 2 tokens, got none; raise longest_tokens"):
        prepare_pairs(tmp_path / "out", files, size=70, longest_tokens=2)
    files["test"][1].unlink()
    with pytest.raises(ValueError, match=r"a\.test\.en', found none"):
        prepare_pairs(tmp_path / "out", files, size=70)
    assert not (tmp_path / "out").exists()


def test_splits_and_kinds_that_are_not_there_are_refused(made: Prepared, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train or valid or test of '.*', got 'dev'"):
        made.pairs("dev")
    with pytest.raises(ValueError, match=r"expected plain text in '.*', got parallel text"):
        made.text("train")
    with pytest.raises(ValueError, match="whose text is not stored"):
        made.references("train")


def test_plain_text_is_prepared_without_its_empty_lines(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    train = write(tmp_path, "t.txt", ["", *TARGET, " "])
    valid = write(tmp_path, "v.txt", TARGET[:2])
    made = prepare_text(tmp_path / "out", {"train": train, "valid": valid}, size=50)
    vocabulary = made.vocabulary()
    assert [vocabulary.decode(line) for line in made.text("train")] == TARGET  # type: ignore[attr-defined]
    assert made.report()[0].endswith("of 't.txt'; left out 2 empty (lines 1, 14)")
    assert open_prepared(tmp_path / "out").splits == ("train", "valid")
    with pytest.raises(ValueError, match="expected parallel text"):
        made.pairs("train")
    with pytest.raises(ValueError, match=r"e\.txt', got none"):
        prepare_text(tmp_path / "o2", {"train": write(tmp_path, "e.txt", ["", ""])}, size=50)
