"""Files that could not be written are refused before anything is measured; noise has the shape that --input gives."""

import os
import sys
from pathlib import Path

import pytest

from normfree.cli import options
from normfree.cli.options import require_output


def test_file_that_can_be_written_passes(tmp_path: Path) -> None:
    require_output(tmp_path / "a.png", (".png", ".svg"))
    (tmp_path / "a.PNG").write_text("earlier")
    require_output(tmp_path / "a.PNG", (".png", ".svg"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.pdf", "expected --out to end in .png, .svg or .html, got 'a.pdf'"),
        ("none/a.png", "expected --out in a folder that exists"),
        ("folder.png", "expected --out to be a file that can be written"),
    ],
)
def test_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=says):
        require_output(tmp_path / name, (".png", ".svg", ".html"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="expected --out to be a file that can be written"):
        require_output(tmp_path / "a.png", (".png", ".svg"))


@pytest.mark.parametrize(("name", "package"), [("a.png", "matplotlib"), ("a.svg", "matplotlib"), ("a.html", "jinja2")])
def test_missing_package_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"needs {package}, which is not installed"):
        require_output(tmp_path / name, (".png", ".svg", ".html"))


def test_length_of_a_sequence_reaches_the_noise_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "name_in_folder", lambda _: "decoder-1-16-32-2")
    monkeypatch.setattr("normfree.train.run.loading.noise_for", lambda _, **given: given)
    given = options.model_inputs("run", tmp_path, "", "7", 2, 3)
    assert given == {"batch": 2, "length": 7, "seed": 3}
    assert options.model_inputs("run", tmp_path, "", "", 2, 3)["length"] is None
