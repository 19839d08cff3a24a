"""Rules on the source of both packages: import order, names that stand once, and sizes.

A "layer" is a folder or a file right below `src/normfree`.
"""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import normfree

PACKAGE = Path(normfree.__file__).parent
ORDER = (
    "errors", "theory", "storage", "report", "kernels", "plan", "arguments", "nn", "methods", "models", "graph",
    "diagnostics", "conversion", "optim", "frameworks", "data", "train", "comparison", "tuning", "cli",
)  # fmt: skip
ALONE = ("theory", "report")  # these two share one place: neither imports the other
FILES = sorted(PACKAGE.rglob("*.py"))
PAPERS = PACKAGE.parent / "normfree_papers"
PAPER_ROOMS = ("beyond", "claims", "fixup", "wninit", "robust", "normdead")
ALL_FILES = [*FILES, *sorted(PAPERS.rglob("*.py"))]
VERBS = PACKAGE / "cli"
LONGEST_FUNCTION, LONGEST_FILE = 125, 400  # lines, with docstrings


def dotted(path: Path) -> str:
    """The name under which a file of either package is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool) -> list[str]:
    """Every module of both packages that a source imports, relative imports resolved, function bodies included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else int(is_package) - node.level]
                base = ".".join([*parents, base] if base else parents)
            if base == "normfree":
                found += [normfree._PUBLIC.get(alias.name, f"normfree.{alias.name}") for alias in node.names]
            else:
                found.append(base)
    return [name for name in found if name.split(".")[0] in ("normfree", "normfree_papers")]


def layer_of(module: str) -> str:
    """The second part of a dotted name, '' for the package itself."""
    return [*module.split("."), ""][1]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a module of the library that are against the order of the layers, and those of the papers."""
    layer = layer_of(module)
    names = imported(source, module, is_package)
    papers = [name for name in names if name.split(".")[0] == "normfree_papers"]
    if papers and not module.startswith("normfree.cli.reproduce"):
        return [f"{module} imports {name}, but the library does not know the papers" for name in papers]
    if layer in ("", "__main__"):  # the package itself and `python -m normfree` may import every layer
        return []
    if layer not in ORDER:
        return [f"{module} is in no layer"]
    wrong = []
    for name in names:
        if name in papers:
            continue
        target = layer_of(name)
        if target in (layer, "__version__"):
            continue
        if target not in ORDER:
            wrong.append(f"{module} imports {name}, which names no layer")
        elif (layer in ALONE and target in ALONE) or ORDER.index(target) > ORDER.index(layer):
            wrong.append(f"{module} imports {name}, which is not to its left")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_layer_imports_only_earlier_layers(path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), dotted(path), path.name == "__init__.py")


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from normfree.models import build", "normfree.methods.fixup", False),
        ("import normfree.cli", "normfree.train.engine.loop", False),
        ("def f():\n    from normfree.train import fit", "normfree.data.images.image_set", False),
        ("from ..models import build", "normfree.methods.fixup", False),
        ("from ..models.resnet import ResNet", "normfree.nn", True),
        ("from .. import models", "normfree.methods.fixup", False),
        ("from . import graph", "normfree.plan", False),
        ("from normfree import build", "normfree.methods.fixup", False),
        ("import normfree as nf", "normfree.methods.fixup", False),
        ("from normfree.theory import gain", "normfree.report.tables", False),
        ("from normfree.report import Table", "normfree.theory", False),
        ("", "normfree.helpers", False),
        ("import normfree_papers", "normfree.comparison.demo", False),
        ("def f():\n    from normfree_papers.claims import get", "normfree.train.config", False),
        ("from normfree_papers.claims import get", "normfree", True),
    ],
)
def test_order_catches_a_violation(source: str, module: str, is_package: bool) -> None:
    assert len(violations(source, module, is_package)) == 1


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from normfree.plan import ResidualPlan\nimport torch", "normfree.methods.fixup", False),
        ("from .method import Method", "normfree.methods", True),
        ("from .method import Method", "normfree.methods.fixup", False),
        ("from ..plan import ResidualPlan", "normfree.nn", True),
        ("from normfree import __version__", "normfree.cli", True),
        ("from normfree import initialize_", "normfree.models.resnet", False),
        ("from normfree.errors import missing_package", "normfree.report.plots", False),
    ],
)
def test_order_allows_what_is_to_the_left(source: str, module: str, is_package: bool) -> None:
    assert not violations(source, module, is_package)


@pytest.mark.parametrize("path", sorted(PAPERS.iterdir()), ids=lambda path: path.name)
def test_papers_have_one_folder_per_paper_and_one_for_claims(path: Path) -> None:
    if path.name != "__pycache__":
        assert path.name in (*PAPER_ROOMS, "__init__.py")


def paper_imports(path: Path) -> Iterator[str]:
    """The other papers whose modules a module of one paper imports."""
    own = path.relative_to(PAPERS).parts[0]
    for name in imported(path.read_text(encoding="utf-8"), dotted(path), path.name == "__init__.py"):
        parts = name.split(".")
        if parts[0] == "normfree_papers" and len(parts) > 1 and parts[1] not in (own, "claims"):
            yield name


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PAPERS.rglob("*.py")) if path.parent not in (PAPERS, PAPERS / "claims")],
    ids=dotted,
)
def test_paper_imports_no_other_paper(path: Path) -> None:
    assert not list(paper_imports(path))


# Names that stand once


def repeated(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that stand in more than one place, each with its places."""
    places = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def module_names(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """The names of modules with their files; `__init__` and the verbs of the command line aside."""
    for path in files:
        if path.stem != "__init__" and path.parent != VERBS:
            yield path.stem, str(path)


def class_names(source: str, place: str) -> Iterator[tuple[str, str]]:
    """The names of all classes in a source, private ones and those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"{place}:{node.lineno}"


def test_no_module_name_stands_twice_in_the_library() -> None:
    assert not repeated(module_names(FILES))


def test_no_class_name_stands_twice_in_the_library() -> None:
    found = [named for path in FILES for named in class_names(path.read_text(encoding="utf-8"), dotted(path))]
    assert len(found) > 50
    assert not repeated(found)


def test_repeated_names_are_caught() -> None:
    files = [PACKAGE / "data" / "runs.py", PACKAGE / "train" / "run" / "runs.py", PACKAGE / "train" / "fit.py"]
    assert list(repeated(module_names(files))) == ["runs"]
    files = [PACKAGE / "nn" / "__init__.py", PACKAGE / "data" / "__init__.py", VERBS / "convert.py"]
    assert not repeated(module_names(files))
    source = "class Step:\n    pass\n\ndef f():\n    class _Run:\n        pass"
    found = [*class_names(source, "a"), *class_names("class _Run:\n    pass", "b")]
    assert repeated(found) == {"_Run": ["a:5", "b:1"]}


# Sizes


def too_long(source: str) -> list[str]:
    """The functions of a source that are longer than allowed, and 'the file' where that is."""
    lines = source.count("\n")
    found = [f"the file: {lines} lines"] if lines > LONGEST_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1  # without decorators, such as the checks of a claim
            if length > LONGEST_FUNCTION:
                found.append(f"{node.name}: {length} lines")
    return found


@pytest.mark.parametrize("path", ALL_FILES, ids=dotted)
def test_files_and_functions_are_short(path: Path) -> None:
    assert not too_long(path.read_text(encoding="utf-8"))


def test_long_files_and_functions_are_caught() -> None:
    body = "def f():\n" + "    pass\n" * 124
    assert not too_long(body)
    assert too_long(body + "    pass\n") == ["f: 126 lines"]
    assert too_long("x = 1\n" * 401) == ["the file: 401 lines"]


# The public names


@pytest.mark.parametrize("module", ["normfree", "normfree.cli", "normfree.report"])
def test_import_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_import_loads_no_compiler() -> None:
    """`torch._dynamo` takes more than a second, and only a compiled run needs it."""
    code = (
        "import sys, torch; own = 'torch._dynamo' in sys.modules; import normfree as nf; nf.fit, nf.convert; "
        "raise SystemExit(not own and 'torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    loaded = code.replace("nf.fit,", "import torch._dynamo;")  # the control: such an import is noticed
    assert subprocess.run([sys.executable, "-c", loaded], env=environment, check=False).returncode == 1


def test_no_layer_is_named_like_a_public_name() -> None:
    layers = {path.stem for path in PACKAGE.iterdir()}
    assert not layers & set(normfree._PUBLIC)


@pytest.mark.parametrize("name", normfree._PUBLIC)
def test_public_name_is_not_hidden_by_a_module(name: str) -> None:
    layer = normfree._PUBLIC[name]
    for path in FILES:
        if path.stem == name:
            __import__(dotted(path))  # importing a submodule writes its name into the package above
    assert not isinstance(getattr(normfree, name), ModuleType)
    assert getattr(normfree, name) is getattr(sys.modules[layer], name)


def test_public_names_are_listed() -> None:
    assert set(normfree.__all__) == {*normfree._PUBLIC, "__version__"}
    assert set(normfree.__all__) <= set(dir(normfree))


def test_unknown_attribute_lists_the_public_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'biuld'; its public names are .*build"):
        _ = normfree.biuld
