"""The examples: short, with public names only, importable, run as printed, and shown with the output that they give.

`make examples` runs them, and stores outputs, pictures and notebooks.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import normfree
from example_pages import FOLDER, NAMES, NOTEBOOKS, OUTPUT, fingerprint, index_page, notebook, pictures, source
from example_runs import run
from normfree.methods import names, unregister

ALLOWED = {"normfree", "torch", "collections", "inspect", "math", "tempfile"}
FRAMEWORK = {"convert_timm": "timm", "convert_gpt2": "transformers", "private_training": "opacus",
             "cluster_sweep": "ray"}  # fmt: skip
# What an example shows: a pattern for a number, and the range of the number. Chance is 10 to 25 %, or 8 bits per byte;
# a linear classifier has 75 % of the points of thousand_layers.
SHOWN = {
    "debug_training": (r"mended: (\d+)% of the points", 85, 100),
    "convert_timm": (r"fixup: +(\d+)% after", 85, 100),
    "convert_gpt2": (r"fixup: .* ([\d.]+) over the last", 1, 4),
    "thousand_layers": (r"fixup(?s:.*)accuracy (\d+)%", 85, 100),
    "private_training": (r"epoch 5: accuracy (\d+)%", 85, 100),
    "add_a_method": (r"2 epochs: ([\d.]+)%", 70, 100),
    "training_loop": (r"accuracy (\d+)%;", 85, 100),
    "cluster_sweep": (r"fixup with 50 layers: (\d+)% at", 70, 100),
}
SECONDS = 120


@pytest.fixture
def own_methods_removed() -> Iterator[None]:
    before = set(names())
    yield
    for name in set(names()) - before:
        unregister(name)


def without_numbers(text: str) -> str:
    """Numbers and curves differ between processors, and so do the places at which lines break."""
    text = re.sub(r"\d[\d,.]*(?:e[-+]?\d+)?", "#", text)
    return " ".join(re.sub(r"[▁-█]+", "~", text).replace("─", "").split())


def require_shown(name: str, printed: str) -> None:
    pattern, low, high = SHOWN[name]
    found = re.search(pattern, printed)
    assert found is not None
    assert low <= float(found.group(1)) <= high


def test_every_script_is_shown() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES) == set(SHOWN)


@pytest.mark.parametrize("name", NAMES)
def test_example_is_short_and_uses_public_names(name: str) -> None:
    script = source(name)
    assert len(script.splitlines()) <= 80
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {node.module or ""}
        else:
            modules = set()
        if name == "add_a_method":
            modules -= {"normfree.methods"}  # where CONTRIBUTING.md says that the records of a method are
        assert not any(module.startswith("normfree.") for module in modules), modules
        assert {module.split(".")[0] for module in modules} <= {*ALLOWED, FRAMEWORK.get(name, "torch")}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nf":
            assert node.attr in normfree.__all__


@pytest.mark.usefixtures("own_methods_removed")
@pytest.mark.parametrize("name", NAMES)
def test_example_does_nothing_when_it_is_imported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[name])
    scope = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="example")
    assert callable(scope["main"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", NAMES)
def test_stored_output_is_that_of_the_script(name: str) -> None:
    runs = json.loads((OUTPUT / "runs.json").read_text(encoding="utf-8"))
    assert runs[name]["sha256"] == fingerprint(name), "run: make examples"
    assert runs[name]["seconds"] < SECONDS
    require_shown(name, (OUTPUT / f"{name}.txt").read_text(encoding="utf-8"))
    assert {path.name for path in pictures(name)} == set(re.findall(r'save\("(.*?)"\)', source(name)))


def test_list_of_examples_is_up_to_date() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == index_page(), "run: make examples"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_the_script(name: str) -> None:
    stored = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert stored == notebook(name), "run: make examples"
    cells = json.loads(stored)["cells"]
    code = [line for cell in cells if cell["cell_type"] == "code" for line in ["".join(cell["source"]), "\n"]]
    tree = ast.parse(source(name))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    expected = [node for node in tree.body[1:-1] if node is not main] + main.body
    assert ast.dump(ast.parse("".join(code))) == ast.dump(ast.Module(expected, []))
    assert [cell["cell_type"] for cell in cells].count("markdown") >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_methods_removed")
@pytest.mark.parametrize("name", NAMES)
def test_example_runs_as_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[name])
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a cluster of its own, even if another one runs here
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # Ray would write a token into the home folder
    printed, seconds = run(name, tmp_path)
    assert without_numbers(printed) == without_numbers((OUTPUT / f"{name}.txt").read_text(encoding="utf-8"))
    require_shown(name, printed)
    assert seconds < SECONDS
    for picture in pictures(name):
        assert (tmp_path / picture.name).read_bytes().startswith(b"\x89PNG")


def test_sweep_says_in_one_sentence_that_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.errors.find_spec", lambda name: None)
    scope = runpy.run_path(str(FOLDER / "cluster_sweep.py"), run_name="example")
    with pytest.raises(SystemExit, match=r"^a run on a cluster needs ray, which is not installed; in a clone of"):
        scope["main"]()
