"""A stored file that was altered is noticed, whichever byte it was."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from normfree.storage.reading import (
    Checksum,
    check_sealed_text,
    has_checksum,
    parse_json,
    read_limited,
    read_sealed_json,
    warn_without_checksum,
)
from normfree.storage.writing import write_sealed_json, write_sealed_text

RECORD: dict[str, Any] = {"status": "finished", "loss": 0.1, "steps": [1, 2], "none": None, "name": "größer \udcff"}


def flips(raw: bytes) -> list[bytes]:
    """The content with one bit of each byte flipped, one byte at a time."""
    return [raw[:i] + bytes([raw[i] ^ (1 << i % 8)]) + raw[i + 1 :] for i in range(len(raw))]


def test_sealed_json_notices_every_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_sealed_json(path, RECORD)
    found = read_sealed_json(path, "a result", "run it again")
    assert found == {**RECORD, "name": "größer ?"}
    assert "sha256" in json.loads(path.read_bytes())
    assert has_checksum(path)
    accepted, without = [], 0
    for altered in flips(raw := path.read_bytes()):
        path.write_bytes(altered)
        try:
            accepted.append(read_sealed_json(path, "a result", "run it again"))
            without += not has_checksum(path)
        except ValueError as error:
            sentence = str(error)
        assert sentence.startswith("expected a result as it was written")
        assert "\n" not in sentence
    # Harmless are other spaces, and another name of the seal itself, which is said.
    unsealed = [record for record in accepted if record != found]
    assert all(found.items() <= record.items() for record in unsealed)
    assert len(unsealed) == without <= len("sha256")
    assert len(accepted) < len(raw) / 10


def test_sealed_text_notices_every_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    write_sealed_text(path, text := 'lr = 0.1\nname = "ä"\n')
    check_sealed_text(path, "a configuration", "restore it")
    assert has_checksum(path)
    raw = path.read_bytes()
    for i, altered in enumerate(flips(raw)):
        path.write_bytes(altered)
        if i < len(text.encode()):
            with pytest.raises(ValueError, match=r"expected a configuration as it was written, but .* is damaged"):
                check_sealed_text(path, "a configuration", "restore it")
        else:  # the seal itself: refused, or no seal any more, which is said
            try:
                check_sealed_text(path, "a configuration", "restore it")
            except ValueError:
                continue
            assert not has_checksum(path)


def test_file_of_before_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "one.json"
    path.write_text('{"a": 1}')
    assert read_sealed_json(path, "a result", "run it again") == {"a": 1}
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "normfree"):
        warn_without_checksum(path)
    assert "has no checksum" in caplog.text
    caplog.clear()
    write_sealed_json(path, {"a": 1})
    warn_without_checksum(path)
    assert not caplog.records


@pytest.mark.parametrize("depth", [101, 1_000, 5_000, 200_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_deep_json_is_one_sentence(depth: int, pair: str) -> None:
    opening, closing = pair[:-1], pair[-1]
    with pytest.raises(ValueError, match="it is nested more than 100 levels deep"):
        parse_json((opening * depth + "1" + closing * depth).encode())
    assert parse_json((opening * 99 + "1" + closing * 99).encode())


def test_json_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 4,000,000 values"):
        parse_json(b"[" + b"[]," * 4_000_000 + b"1]")
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without a block on the disk
    with pytest.raises(ValueError, match="expected at most 64 MiB"):
        read_limited(path)


@pytest.mark.parametrize("place", ["/dev/zero", "/"])
def test_device_or_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(ValueError, match="got a folder, device or pipe"):
        read_limited(tmp_path / "link")


@pytest.mark.parametrize("record", [None, {}, {"bytes": "3", "sha256": "a"}, {"bytes": 3}, {"sha256": 1, "bytes": 1}])
def test_damaged_checksum_is_one_sentence(record: Any) -> None:
    with pytest.raises(ValueError, match="expected a size and a sha256"):
        Checksum.from_json(record)
    whole = Checksum.of(b"content")
    assert Checksum.from_json(whole.to_json()) == whole
