"""Provenance names the hardware, the versions and the commit of the source, and nothing private."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from normfree import __version__
from normfree.storage import provenance
from normfree.storage.provenance import commit, hardware, versions


def test_commit_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("NORMFREE_COMMIT", raising=False)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(package / "storage" / "provenance.py"))
    assert commit() == "none"  # no repository
    git("init", "-q")
    assert commit() == "none"  # a repository that does not hold the package
    git("add", ".")
    git("commit", "-q", "-m", "x")
    assert len(commit()) == 40
    (tmp_path / "elsewhere").write_text("")
    assert len(commit()) == 40  # what is not source does not count
    (package / "new.py").write_text("")
    assert commit().endswith("+dirty")


def test_commit_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NORMFREE_COMMIT", "0123abcd")
    assert commit() == "0123abcd"  # though there is a repository
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "storage" / "provenance.py"))
    assert commit() == "0123abcd"


def test_versions_and_hardware_name_what_a_number_depends_on() -> None:
    assert set(versions()) == {"python", "torch", "numpy", "normfree"}
    assert versions()["normfree"] == __version__
    found = hardware()
    assert found["cores"] == os.cpu_count()
    assert found["cpu"]
    assert "gpu" not in found


def test_nothing_names_a_folder_user_or_host() -> None:
    text = json.dumps([versions(), hardware()])
    for secret in (str(Path.cwd()), str(Path.home()), os.uname().nodename, "/tmp"):
        assert secret not in text
