"""A shell completes the names that the registries know, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import normfree
from normfree.cli import completion
from normfree.data import names as data_names
from normfree.methods import names as method_names
from normfree.models import catalog
from normfree.train.recipes import recipes
from normfree_papers.claims.registry import MODULES

SOURCE = str(Path(normfree.__file__).parents[1])


def test_names_are_those_of_the_registries() -> None:
    assert completion.complete_recipe("") == list(recipes())
    assert set(completion.complete_method("")) == set(method_names())
    assert set(completion.complete_model("")) == {name for family in catalog() for name in family.examples}
    assert set(completion.complete_data("")) == set(data_names())
    claims = {f"{module.split('.')[0]}/{name}" for module, names in MODULES.items() for name in names}
    assert set(completion.complete_claim("")) == claims


def test_beginning_selects_the_names() -> None:
    assert completion.complete_recipe("spi") == ["spirals"]
    assert completion.complete_method("fixup_") == ["fixup_bounded"]
    assert completion.complete_claim("nothing") == []


def test_claims_without_the_papers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "find_spec", lambda _: None)
    assert completion.complete_claim("") == []


def completed(*words: str) -> list[str]:
    """What bash gets for a command line whose last word is incomplete."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "_NORMFREE_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": " ".join(("normfree", *words)), "COMP_CWORD": str(len(words))}
    code = (
        "import sys\nfrom normfree.cli import main\ntry:\n    main()\nfinally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == "False\n"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("wat",), ["watch"]),
        (("train", "spi"), ["spirals"]),
        (("train", "--dry"), ["--dry-run"]),
        (("tune", "spi"), ["spirals"]),
        (("train", "--method", "fixup_"), ["fixup_bounded"]),
        (("diagnose", "resnet20", "-m", "fixup_"), ["fixup_bounded"]),
        (("train", "--model", "wrn-40"), ["wrn-40-10"]),
        (("data", "get", "sv"), ["svhn"]),
        (("reproduce", "robust/table"), ["robust/table1"]),
        (("train", "--lr", "1", "--lr", "2", "--dry"), ["--dry-run"]),  # wrong, but not finished
    ],
)
def test_bash_completes_a_command(words: tuple[str, ...], found: list[str]) -> None:
    assert completed(*words) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_is_printed(shell: str) -> None:
    command = [sys.executable, "-m", "normfree", "--show-completion", shell]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": SOURCE, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_NORMFREE_COMPLETE" in done.stdout
