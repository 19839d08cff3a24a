import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import normfree
from normfree.cli.verbs import data_app
from normfree.data import names


def run(*arguments: str) -> Result:
    return CliRunner().invoke(data_app, arguments)


def test_list_names_every_data_set(tmp_path: Path) -> None:
    result = run("list", "--data-dir", str(tmp_path))
    assert result.exit_code == 0
    firsts = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
    assert [first for first in firsts if first in names()] == list(names())
    assert "part of the package" in result.stdout


def test_list_json_tells_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"1234")
    result = run("list", "--dir", str(tmp_path), "--json")
    records = {record["name"]: record for record in json.loads(result.stdout)}
    assert tuple(records) == names()
    assert (records["cifar10"]["state"], records["cifar10"]["bytes"]) == ("in part", 4)
    assert records["cifar10"]["folder"] == str(folder)
    assert (records["svhn"]["state"], records["svhn"]["folder"]) == ("no", None)
    assert records["fashion14"]["state"] == "part of the package"


def test_get_fetches_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(name: str, root: Path, *, tarball: Path | None, progress: object) -> Path:
        assert callable(progress)
        progress(5, 10, "https://example.org/a")
        progress(5, 0, "https://example.org/a")
        asked.append((name, root, tarball))
        return root / name

    monkeypatch.setattr("normfree.data.get", get)
    monkeypatch.setattr("normfree.report.terminal.EVERY", 0.0)
    result = run("get", "cifar10", "mnist", "cifar10", "--data-dir", str(tmp_path))
    assert result.exit_code == 0
    assert asked == [("cifar10", tmp_path, None), ("mnist", tmp_path, None)]
    assert result.stdout.splitlines() == [f"{name}: {tmp_path / name}" for name in ("cifar10", "mnist")]
    assert "cifar10, MB: 0 of 0 done after 0 s, from https://example.org/a" in result.stderr


def test_get_of_the_embedded_set_fetches_nothing(tmp_path: Path) -> None:
    result = run("get", "fashion14", "--dir", str(tmp_path / "root"))
    assert result.exit_code == 0
    assert "needs no files" in result.stdout
    assert not (tmp_path / "root").exists()


def test_get_refuses_an_unknown_name_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("normfree.data.data_sets.fetch", lambda *_, **__: pytest.fail("it fetched"))
    result = run("get", "mnist", "cifar11", "--dir", str(tmp_path))
    assert isinstance(result.exception, ValueError)
    assert "got 'cifar11'; did you mean 'cifar10'?" in str(result.exception)


def test_get_takes_one_tarball_for_one_data_set(tmp_path: Path) -> None:
    result = run("get", "mnist", "cifar10", "--tarball", str(tmp_path / "a.tgz"), "--dir", str(tmp_path))
    assert "expected one data set with --tarball, got mnist, cifar10" in str(result.exception)
    result = run("get", "mnist", "--tarball", str(tmp_path / "a.tgz"), "--dir", str(tmp_path))
    assert "expected an archive of MNIST in" in str(result.exception)


def test_verb_is_imported_without_torch() -> None:
    code = "import sys, normfree.cli.data; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_get_refuses_a_file_in_place_of_the_folder_before_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("normfree.data.get", lambda *_, **__: pytest.fail("it fetched"))
    result = run("get", "cifar10", "--dir", str(tmp_path / place))
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith("expected --data-dir to be a folder, but ")
