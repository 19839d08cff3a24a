"""The order of the rooms, read from the source."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import normfree

PACKAGE = Path(normfree.__file__).parent
ORDER = (
    "extras", "theory", "report", "files", "provenance", "plan", "nn", "methods", "models", "graph", "diagnostics",
    "conversion", "optim", "data", "train", "comparison", "cli",
)  # fmt: skip
ALONE = ("theory", "report")  # these two share one place: neither imports the other
FILES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """The name under which a file of the package is imported."""
    parts = ["normfree", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool) -> list[str]:
    """Every module of the package that a source imports, relative imports resolved, function bodies included."""
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
    return [name for name in found if name.split(".")[0] == "normfree"]


def room_of(module: str) -> str:
    """The second part of a dotted name, '' for the package itself."""
    return [*module.split("."), ""][1]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports against the order of the rooms."""
    room = room_of(module)
    if room in ("", "__main__"):  # the package's face and its entry may see everything
        return []
    if room not in ORDER:
        return [f"{module} is in no room"]
    wrong = []
    for name in imported(source, module, is_package):
        target = room_of(name)
        if target in (room, "__version__"):
            continue
        if target not in ORDER:
            wrong.append(f"{module} imports {name}, which names no room")
        elif (room in ALONE and target in ALONE) or ORDER.index(target) > ORDER.index(room):
            wrong.append(f"{module} imports {name}, which is not to its left")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_room_imports_only_rooms_to_its_left(path: Path) -> None:
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
    ],
)
def test_order_catches_a_violation(source: str, module: str, is_package: bool) -> None:
    assert len(violations(source, module, is_package)) == 1


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from normfree.plan import ResidualPlan\nimport torch", "normfree.methods.fixup", False),
        ("from .record import Method", "normfree.methods", True),
        ("from .record import Method", "normfree.methods.fixup", False),
        ("from ..plan import ResidualPlan", "normfree.nn", True),
        ("from normfree import __version__", "normfree.cli", True),
        ("from normfree import initialize_", "normfree.models.resnet", False),
        ("from normfree.extras import missing_package", "normfree.report.plots", False),
    ],
)
def test_order_allows_what_is_to_the_left(source: str, module: str, is_package: bool) -> None:
    assert not violations(source, module, is_package)


@pytest.mark.parametrize("module", ["normfree", "normfree.cli", "normfree.report"])
def test_import_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_no_room_is_named_like_a_public_name() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir()}
    assert not rooms & set(normfree._PUBLIC)


@pytest.mark.parametrize("name", normfree._PUBLIC)
def test_public_name_is_not_hidden_by_a_module(name: str) -> None:
    room = normfree._PUBLIC[name]
    for path in FILES:
        if path.stem == name:
            __import__(dotted(path))  # importing a submodule writes its name into the package above
    assert not isinstance(getattr(normfree, name), ModuleType)
    assert getattr(normfree, name) is getattr(sys.modules[room], name)


def test_public_names_are_listed() -> None:
    assert set(normfree.__all__) == {*normfree._PUBLIC, "__version__"}
    assert set(normfree.__all__) <= set(dir(normfree))


def test_unknown_attribute_lists_the_public_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'biuld'; its public names are .*build"):
        _ = normfree.biuld
