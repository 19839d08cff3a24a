"""Error messages: unknown names, and extras, whose message names a command that works."""

import re
import tomllib
from pathlib import Path

import pytest

from normfree.errors import EXTRAS, missing_package, unknown_name


def test_of_very_many_names_some_are_listed() -> None:
    message = str(unknown_name("model", "x", [f"{i}" for i in range(1000)]))
    assert message.startswith("unknown model 'x'; expected one of: 0, 1, 2")
    assert message.endswith("38, 39, … (1000 in all)")


def test_close_names_are_suggested_alone_if_the_known_are_many() -> None:
    message = str(unknown_name("model", "resnet2", [f"resnet{i}" for i in range(20, 40)], where=" in 'a.toml'"))
    assert message.startswith("unknown model 'resnet2' in 'a.toml'; did you mean 'resnet")
    assert "expected one of" not in message


_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_PACKAGES = [(extra, package) for extra, packages in EXTRAS.items() for package in packages]


def test_extras_are_those_of_the_project() -> None:
    declared = {
        extra: tuple(re.split("[><=]", requirement)[0] for requirement in requirements)
        for extra, requirements in _PROJECT["optional-dependencies"].items()
        if extra not in ("dev", "docs")  # what only work on the project needs
    }
    assert declared == EXTRAS


@pytest.mark.parametrize(("extra", "package"), _PACKAGES)
def test_message_names_the_package_and_the_command(extra: str, package: str) -> None:
    message = missing_package(package, "this test")
    assert message == (
        f"this test needs {package}, which is not installed; in a clone of normfree, run: pip install '.[{extra}]'"
    )


def test_no_message_installs_from_an_index() -> None:
    sources = (Path(__file__).parents[1] / "src").rglob("*.py")
    assert not [str(path) for path in sources if "normfree[" in path.read_text(encoding="utf-8")]
