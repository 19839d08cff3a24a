import io
import tarfile
from pathlib import Path

import pytest

from normfree.data.download.archives import read_members


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def archive(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


GOOD = (entry("folder/good"), b"good")


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_members_are_read_by_name(mode: str) -> None:
    content = archive(GOOD, (entry("folder", tarfile.DIRTYPE), b""), (entry("folder/other"), b"other"), mode=mode)
    assert read_members(content, ["folder/good"], "a.tar") == {"folder/good": b"good"}


@pytest.mark.parametrize(
    "member",
    [
        entry("../evil"),
        entry("folder/../../evil"),
        entry("/evil"),
        entry("..\\evil"),
        entry("folder/link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("folder/link", tarfile.SYMTYPE, "good"),
        entry("folder/link", tarfile.LNKTYPE, "../evil"),
        entry("folder/pipe", tarfile.FIFOTYPE),
        entry("folder/device", tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_archives_that_point_outside_are_refused(
    member: tarfile.TarInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    content = archive(GOOD, (member, b""))
    with pytest.raises(ValueError, match=r"archive 'a\.tar', got '.*do not trust this archive"):
        read_members(content, ["folder/good"], "a.tar")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damaged_archives_are_refused_by_name() -> None:
    good = archive(GOOD, (entry("folder/more"), bytes(range(256)) * 100))
    for bad in (b"", b"no archive", good[: len(good) // 2], good[:40] + b"\0" + good[41:]):
        with pytest.raises(ValueError, match=r"'a\.tar'"):
            read_members(bad, ["folder/good", "folder/more"], "a.tar")


def test_missing_member_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected 'folder/gone' in 'a\.tar', which lacks it"):
        read_members(archive(GOOD), ["folder/good", "folder/gone"], "a.tar")


def test_member_that_is_a_folder_is_missing() -> None:
    with pytest.raises(ValueError, match="lacks it"):
        read_members(archive((entry("folder", tarfile.DIRTYPE), b"")), ["folder"], "a.tar")
