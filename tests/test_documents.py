"""The code, commands, links and numbers in the documents are right."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import pickle
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from normfree.methods import get, initialize_, names, unregister
from normfree.models import build

ROOT = Path(__file__).parents[1]


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, flags=re.S | re.M)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, body in blocks]


def test_contributing_example_adds_a_method_that_works() -> None:
    method, initializer = python_blocks("CONTRIBUTING.md")
    module = types.ModuleType("tiny_plugin")
    sys.modules["tiny_plugin"] = module
    try:
        exec(compile(method, "CONTRIBUTING.md", "exec"), module.__dict__)
        exec(compile(initializer, "CONTRIBUTING.md", "exec"), module.__dict__)
        assert "tiny" in names()
        model = build("resmlp-8-16", "tiny:power=2", size=4)
        betas = [block.beta.value.item() for block in model.body[0]]
        assert betas == pytest.approx([1 / 64] * 8)
        assert get("tiny").rule.beta.text == "L^-1"
        assert pickle.loads(pickle.dumps(get("tiny"))) == get("tiny")
        wide = build("resmlp-2-256", "tiny", size=4)
        lecun = replace(get("tiny"), initializer=module.lecun_)
        initialize_(wide, lecun, wide.plan, generator=torch.Generator().manual_seed(0))
        weight = wide.get_submodule(wide.plan.branches[0].layers[0].name).weight
        # The variance of n samples has a relative standard error of √(2/n).
        assert weight.var().item() == pytest.approx(1 / 256, rel=5 * (2 / weight.numel()) ** 0.5)
    finally:
        del sys.modules["tiny_plugin"]
        if "tiny" in names():
            unregister("tiny")


def run_block(source: str, document: str, scope: dict[str, object]) -> None:
    exec(compile(source, document, "exec"), scope)


def require_fixup_start(loss: object) -> None:
    assert isinstance(loss, torch.Tensor)
    assert loss.item() == pytest.approx(2.302585, abs=1e-5)  # ln 10: Fixup starts with zero logits


def without_numbers(text: str) -> str:
    """A text on one line, with # for numbers, curves and places, which depend on the random input."""
    return " ".join(re.sub(r"\d[\d.e]*|[▁-█]+|body[\w.]*", "#", text).split())


def test_readme_example_runs_and_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    (block,) = python_blocks("README.md")
    run_block(block, "README.md", scope)
    require_fixup_start(scope["loss"])
    (shown,) = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S | re.M)
    printed = without_numbers(capsys.readouterr().out)
    assert len(shown.splitlines()) == 5
    for line in shown.splitlines():
        assert without_numbers(line) in printed


def test_readme_numbers_are_those_of_the_results() -> None:
    def stored(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
        return found

    def measured(claim: str, name: str) -> list[float]:
        found: list[float] = stored(f"{claim}.json")["values"][name]["values"]
        return found

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = stored("benchmarks/training-kernels.json")["rows"]
    asked = [row for row in rows if row["what"].startswith("resnet110, ") and row["batch"] == 128]
    speeds = {row["what"]: row["images_per_second"] for row in asked}
    fastest = max(speed for what, speed in speeds.items() if "batchnorm" in what)
    kernels = f"{speeds['resnet110, fixup, stage kernels']:,.0f}"
    compiled = f"{speeds['resnet110, fixup, compiled']:,.0f}"
    assert f"in batches of 128, our CUDA kernels train Fixup's ResNet-110 at {kernels} images/s" in text
    assert f"Compiled PyTorch reaches {compiled} with Fixup and {fastest:,.0f} with batch norm" in text
    (ratio,) = re.findall(r"over three runs the kernels are ([\d.]+ to [\d.]+) times as fast", text)
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    assert f"Over 3 runs, Fixup by the kernels is {ratio} times as fast as the fastest batch norm" in page
    first, second, third = (f"{one:.2f}" for one in measured("fixup/table1", "test error, Fixup"))
    (error,) = measured("fixup/table1", "test error, batch norm")
    assert f"{first}, {second} and {third} % (three seeds, one of which fell to chance)" in text
    assert f"batch norm's is {error:.2f} % (one seed; " in text
    epoch = stored("kernels/first-epoch.json")
    (losses,) = (row["test_loss"] for row in epoch["rows"] if row["path"] == "stage kernels")
    fallen = sum(loss > math.log(10) - 0.01 for loss in losses)
    assert f"{fallen} of {len(losses)} seeds of Fixup's ResNet-110 fall to chance" in text
    proposed = ("IdShort (proposed)", "LearnScalar (proposed)", "ConvShort (proposed)")
    normed, *others = (
        fmean(measured("robust/fig3", f"test accuracy, {name}, ResNet-50")) for name in ("BatchNorm", *proposed)
    )
    assert f"reaches {normed:.1f} % with batch norm, and {max(others):.1f} % with the best method of `robust`" in text


def test_start_example_runs_as_printed() -> None:
    scope: dict[str, object] = {}
    (block,) = python_blocks("docs/start.md")
    run_block(block, "docs/start.md", scope)
    assert isinstance(scope["optimizer"], torch.optim.SGD)


def test_guide_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    build_block, rate_block, own_block, diagnose_block, train_block = python_blocks("docs/guide.md")
    run_block(build_block, "docs/guide.md", scope)
    require_fixup_start(scope["loss"])
    run_block(rate_block, "docs/guide.md", scope)
    assert 1e-6 < scope["found"].suggestion < 10  # type: ignore[attr-defined]

    run_block(own_block, "docs/guide.md", scope)
    assert len(scope["plan"].branches) == 16  # type: ignore[attr-defined]
    converted = scope["converted"]
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in converted.modules())  # type: ignore[attr-defined]
    run_block(diagnose_block, "docs/guide.md", scope)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len((tmp_path / "signal.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    run_block(train_block, "docs/guide.md", scope)
    assert scope["result"].status == "finished"  # type: ignore[attr-defined]
    assert isinstance(scope["model"], torch.nn.Module)


def test_benchmarks_page_is_made_from_the_stored_results() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert stored == module.page(), "docs/benchmarks.md differs from results/; run: make benchmarks-page"


DOCUMENTS = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/guide.md", "docs/design.md", "docs/benchmarks.md",
    "docs/findings.md", "docs/errata.md", "docs/frameworks.md", "docs/kernels.md", "docs/moved.md", "docs/models.md",
    "docs/cluster.md", "docs/reliability.md", "docs/start.md", "SECURITY.md", "benchmarks/README.md",
    "examples/README.md",
]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target


@pytest.mark.parametrize(
    ("document", "least"), [("README.md", 8), ("docs/guide.md", 8), ("docs/start.md", 4), ("docs/cluster.md", 4)]
)
def test_commands_name_verbs_and_options_that_exist(document: str, least: int) -> None:
    import typer

    from normfree.cli.verbs import app

    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"\bnormfree ([a-z]+)((?: +[^`#\n&|]+)?)", text)
    commands = [(verb, words) for verb, words in found if verb in verbs]
    assert len(commands) >= least
    for verb, words in commands:
        command = verbs[verb]
        options = {name for parameter in command.params for name in parameter.opts}
        if verb != "data":
            assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", words)) <= options, (verb, words)


def test_moved_modules_lead_to_modules_that_exist() -> None:
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", (ROOT / "docs" / "moved.md").read_text(encoding="utf-8"), flags=re.M)
    assert len(rows) > 50
    for old, new in rows:
        for module in re.findall(r"`(.*?)`", new):
            assert (ROOT / "src" / f"{module.replace('.', '/')}.py").is_file(), (old, module)


def test_documents_name_only_methods_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (`.*) \|$", text, flags=re.M)
    specs = [spec for row in rows for spec in re.findall(r"`([a-z_]+(?::[^`]+)?)`", row)]
    assert len(specs) >= 8
    for spec in specs:
        get(spec)


SOURCES = [
    path.relative_to(ROOT) for top in ("src", "tests", "benchmarks", "website") for path in (ROOT / top).rglob("*.py")
]
PLACEHOLDER = re.compile(r"\bNAME\b|/tiny\.py$")  # of what a contributor adds
NAMES_IN_A_FILE = re.compile(
    r"((?:`\w+`(?:, (?:and )?| and | in | of ))*`\w+`) (?:\(|in |of |in its |of its )`([\w./]+\.py)`"
)


def files_named(path: str) -> list[Path]:
    """The files whose path ends like this."""
    return [ROOT / source for source in SOURCES if f"/{source.as_posix()}".endswith(f"/{path}")]


def defined(path: Path) -> set[str]:
    """The names that a file defines: functions, classes, variables and fields, but no imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def wrong_places(text: str) -> list[str]:
    """The files of a document that do not exist, and the names that stand in none of the files that it gives them."""
    words = " ".join(re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M).split())
    paths = dict.fromkeys(path for path in re.findall(r"`([\w./]+\.py)`", words) if not PLACEHOLDER.search(path))
    wrong = [path for path in paths if not files_named(path)]
    for listed, path in NAMES_IN_A_FILE.findall(words):
        known = {name for file in files_named(path) for name in defined(file)}
        wrong += [f"{name} in {path}" for name in re.findall(r"`(\w+)`", listed) if name not in known]
    return wrong


@pytest.mark.parametrize(("document", "files", "names"), [("CONTRIBUTING.md", 40, 30), ("docs/design.md", 20, 3)])
def test_files_and_names_of_a_document_exist(document: str, files: int, names: int) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert len(re.findall(r"`[\w./]+\.py`", text)) >= files
    assert len(NAMES_IN_A_FILE.findall(" ".join(text.split()))) >= names
    assert wrong_places(text) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`optim/master_weights.py`", []),
        ("`optim/update_rule.py`", ["optim/update_rule.py"]),
        ("`OptimizerName` and `UpdateRule` in `optim/master_weights.py`", []),
        ("`OptimizerName`\nand `UpdateRule` in `optim/learning_rates.py`", ["OptimizerName", "UpdateRule"]),
        ("a `Family` in `FAMILIES` of `models/families.py`", ["models/families.py", "Family", "FAMILIES"]),
        ("`examples/NAME.py`", []),
    ],
)
def test_wrong_places_are_found(text: str, wrong: list[str]) -> None:
    assert [place.partition(" in ")[0] for place in wrong_places(text)] == wrong
