"""Lines are read unchanged, and an error names the file and the line."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.data.text.text_files import find_parallel, read_lines, read_parallel

WRITERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}


def write(path: Path, *lines: str) -> Path:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(WRITERS[path.suffix if path.suffix in WRITERS else ""](content))
    return path


@pytest.mark.parametrize("ending", WRITERS)
def test_lines_are_the_same_however_compressed(tmp_path: Path, ending: str) -> None:
    lines = ["Ein Hund läuft.", "", "  zwei\u2028drei\x85vier\x0cfünf ", "日本語"]
    assert list(read_lines(write(tmp_path / f"text{ending}", *lines))) == lines


@settings(max_examples=50, deadline=None)
@given(content=st.text(alphabet="ab \r\n\u2028\x85\x0b\ufeffä", max_size=30))
def test_lines_end_at_newlines_only(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    expected = content.split("\n")
    if expected[-1] == "":
        expected.pop()
    expected = [line[:-1] if line.endswith("\r") else line for line in expected]
    if expected and expected[0].startswith("\ufeff"):
        expected[0] = expected[0][1:]
    assert list(read_lines(path)) == expected


def test_lines_that_are_not_utf8_are_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "latin1.de"
    path.write_bytes("gut\ngrün\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.de', got the byte 0xfc at byte 3 of line 2;"):
        list(read_lines(path))


@pytest.mark.parametrize("ending", [".xz", ".gz"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "plain"])
def test_lines_of_a_damaged_file_are_refused_by_its_name(tmp_path: Path, ending: str, damage: str) -> None:
    path = write(tmp_path / f"text{ending}", *(f"line {i * i * 7919 % 1009}" for i in range(3000)))
    content = bytearray(path.read_bytes())
    if damage == "altered":
        content[len(content) // 2] ^= 0x55
    path.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    if damage == "plain":
        path.write_bytes(b"just text\n")
    with pytest.raises(ValueError, match=f"'.*text{ending}'"):
        list(read_lines(path))


def test_lines_of_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.de', found none"):
        list(read_lines(tmp_path / "none.de"))
    with pytest.raises(ValueError, match="found a folder"):
        list(read_lines(tmp_path))


def test_parallel_leaves_out_empty_and_overlong_lines_and_says_which(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", "eins", "", "drei", "a b c d", "fünf", " \t", "sieben")
    target = write(tmp_path / "a.en", "one", "two", "  ", "four", "e f g h", "six", " seven ")
    parallel = read_parallel(source, target, longest=3)
    assert list(parallel) == [("eins", "one"), ("sieben", "seven")]
    assert parallel.lines == [1, 7]
    assert [(bad.reason, bad.lines) for bad in parallel.left_out] == [
        ("empty in 'a.de'", (2, 6)),
        ("empty in 'a.en'", (3,)),
        ("of more than 3 words in 'a.de'", (4,)),
        ("of more than 3 words in 'a.en'", (5,)),
    ]
    assert str(parallel.left_out[0]) == "2 empty in 'a.de' (lines 2, 6)"
    whole = read_parallel(source, target, longest=3, whole=True)
    assert (len(whole), whole.left_out, whole.kept) == (7, (), parallel.left_out)
    assert parallel.kept == ()


def test_parallel_files_of_one_name_are_distinguished(tmp_path: Path) -> None:
    for folder in ("de", "en"):
        (tmp_path / folder).mkdir()
    source = write(tmp_path / "de" / "train.txt", "", "zwei", "drei")
    target = write(tmp_path / "en" / "train.txt", "one", "", "three")
    parallel = read_parallel(source, target)
    assert list(parallel) == [("drei", "three")]
    assert [(bad.reason, bad.lines) for bad in parallel.left_out] == [
        ("empty in 'de/train.txt'", (1,)),
        ("empty in 'en/train.txt'", (2,)),
    ]


def test_report_shows_the_first_of_many_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", *[""] * 30, "x")
    (left_out,) = read_parallel(source, write(tmp_path / "a.en", *["y"] * 31)).left_out
    assert str(left_out) == "30 empty in 'a.de' (lines 1, 2, 3, 4, 5, …)"


@pytest.mark.parametrize("lines", [(3, 5), (5, 3)])
def test_parallel_of_unequal_length_is_refused_with_both_counts(tmp_path: Path, lines: tuple[int, int]) -> None:
    source, target = (write(tmp_path / name, *["x"] * n) for name, n in zip(("a.de", "a.en"), lines, strict=True))
    with pytest.raises(ValueError, match=rf"a\.de' as in '.*a\.en', got {lines[0]} and {lines[1]}: line 4 has no"):
        read_parallel(source, target)


def test_parallel_without_pairs_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "e")
    with pytest.raises(ValueError, match="got 0 lines;"):
        read_parallel(empty, empty)
    blank = write(tmp_path / "b", "", "")
    with pytest.raises(ValueError, match=r"got 2 lines, of which 2 empty in 'b' \(lines 1, 2\)"):
        read_parallel(blank, blank)


def test_parallel_names_the_side_that_is_not_utf8(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.de", "x", "y"), tmp_path / "a.en"
    target.write_bytes(b"x\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.en', got the byte 0xff at byte 1 of line 2"):
        read_parallel(source, target)


def test_splits_are_found_beside_the_training_files(tmp_path: Path) -> None:
    for name in ("m.train.de.xz", "m.train.en", "m.dev.de", "m.dev.en.gz", "m.test.de.xz", "m.test.de", "m.test.en"):
        write(tmp_path / name, "x")
    found = find_parallel(tmp_path / "m.train.de.xz", tmp_path / "m.train.en")
    names = {split: tuple(path.name for path in paths) for split, paths in found.items()}
    assert names == {
        "train": ("m.train.de.xz", "m.train.en"),
        "valid": ("m.dev.de", "m.dev.en.gz"),
        "test": ("m.test.de.xz", "m.test.en"),  # compressed as the training file is
    }
    assert set(find_parallel(write(tmp_path / "my.de", "x"), write(tmp_path / "my.en", "x"))) == {"train"}


def test_splits_of_one_side_are_refused(tmp_path: Path) -> None:
    train = tmp_path / "m.train.de", tmp_path / "m.train.en"
    with pytest.raises(ValueError, match=r"m\.train\.de', found none"):
        find_parallel(*train)
    for name in ("m.train.de", "m.train.en", "m.test.en"):
        write(tmp_path / name, "x")
    with pytest.raises(ValueError, match=r"the test file that goes with '.*m\.test\.en' beside '.*m\.train\.de'"):
        find_parallel(*train)
