"""The pages and notebooks of the examples, from their scripts and stored outputs."""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
OUTPUT = FOLDER / "output"
TITLES = {
    "debug_training": "Debug a network that does not train",
    "convert_timm": "Convert a timm model",
    "convert_gpt2": "Convert a GPT-2",
    "thousand_layers": "1,000 layers",
    "private_training": "Private training",
    "add_a_method": "Add a method",
    "training_loop": "A training loop of your own",
    "cluster_sweep": "A sweep on a cluster",
}
NAMES = tuple(TITLES)
NOTEBOOKS = NAMES[:3]


def source(name: str) -> str:
    """Return the script of an example."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def fingerprint(name: str) -> str:
    """Return the sha256 of the script of an example."""
    return hashlib.sha256(source(name).encode()).hexdigest()


def summary(name: str) -> str:
    """Return the sentence with which an example begins."""
    text = ast.get_docstring(ast.parse(source(name)))
    assert text is not None
    return text


def pictures(name: str) -> list[Path]:
    """Return the stored pictures of an example, in the order in which the script writes them."""
    return sorted(OUTPUT.glob(f"{name}*.png"), key=lambda path: source(name).find(path.name))


def example_page(name: str) -> str:
    """Return the page of an example: its code, output and pictures."""
    stored = (OUTPUT / f"{name}.txt").read_text(encoding="utf-8")
    lines = [f"# {TITLES[name]}", "", summary(name), ""]
    lines += [f"Run it from the clone: `python examples/{name}.py`", ""]
    if name in NOTEBOOKS:
        lines += [f"[The same as a notebook]({name}.ipynb)", ""]
    lines += ["## Code", "", "```python", source(name).rstrip(), "```", ""]
    lines += ["## Output", "", "``` { .text .output }", stored.rstrip(), "```", ""]
    for picture in pictures(name):
        lines += [f"![{picture.stem.replace('_', ' ')}](output/{picture.name})", ""]
    return "\n".join(lines)


def index_page() -> str:
    """Return the page that lists the examples, examples/README.md."""
    times = json.loads((OUTPUT / "runs.json").read_text(encoding="utf-8"))
    lines = [
        "# Examples",
        "",
        "Each is a script of at most 80 lines that runs on a CPU and uses public names only. The tests run them, and",
        "compare what they print with the stored output. `make examples` writes outputs, pictures, notebooks and this"
        " page.",
        "",
        "| example | what it shows | CPU seconds |",
        "| --- | --- | ---: |",
    ]
    lines += [f"| [{TITLES[name]}]({name}.py) | {summary(name)} | {times[name]['seconds']:.0f} |" for name in NAMES]
    lines += [
        "",
        "They show how to use the library, and do not rank methods: each has one or two seeds, and a task, a size and",
        "a rate that were chosen after some tries so that it trains in seconds. At 1,000 layers Fixup did not learn",
        "two other tasks in as few steps; the converted GPT-2 diverged at twice its rate, the original did not; the",
        "ResNet-32 of the training loop did not learn without clipping. The time of the sweep is that of its driver;",
        "with the runs in other processes it takes half a minute on two cores.",
    ]
    return "\n".join([*lines, ""])


def notebook_cells(script: str) -> list[tuple[str, str]]:
    """Return a script as pairs of 'markdown' or 'code' and a text.

    The docstring is a Markdown cell, the definitions are one code cell. In the body of `main` a comment after a blank
    line starts a new cell: the comment is Markdown, and the lines below it are code.
    """
    tree = ast.parse(script)
    lines = script.splitlines()
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    start = tree.body[1].lineno - 1
    before = lines[start : main.lineno - 1]
    between = lines[main.end_lineno : guard.lineno - 1]  # functions that stand below main
    definitions = "\n".join([*before, *between]).strip()
    cells = [("markdown", ast.get_docstring(tree) or ""), ("code", definitions)]
    body = textwrap.dedent("\n".join(lines[main.lineno : main.end_lineno]))
    paragraph: list[str] = []
    parts = [paragraph]
    for line in body.splitlines():
        if line.startswith("# ") and (not paragraph or not paragraph[-1]):
            paragraph = []
            parts.append(paragraph)
        paragraph.append(line)
    for part in filter(None, parts):
        comment = [line.removeprefix("# ") for line in part if line.startswith("# ")]
        code = [line for line in part if not line.startswith("# ")]
        cells.append(("markdown", "\n".join(comment)))
        cells.append(("code", "\n".join(code).strip()))
    return [(kind, text) for kind, text in cells if text]


def notebook(name: str) -> str:
    """Return the notebook of an example, in version 4.5 of Jupyter's format, without outputs."""
    cells: list[dict[str, Any]] = []
    for index, (kind, text) in enumerate(notebook_cells(source(name))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"{name}-{index}".replace("_", "-"), "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
