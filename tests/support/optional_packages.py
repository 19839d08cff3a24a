"""A plugin of pytest: leaves out the files whose optional packages are not installed, and names them.

tests/conftest.py names it. There, `pytest_ignore_collect` would hold below tests/ only, and src/ has doctests.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A file that imports one of these at its top is not collected where the package is not installed.
OPTIONAL = {
    "PIL", "curvlinops", "griffe", "hypothesis", "jinja2", "latex2mathml", "lightning", "matplotlib", "onnx",
    "onnxruntime", "opacus", "optuna", "playwright", "pytorch_lightning", "ray", "sacrebleu", "scipy", "sentencepiece",
    "tensorboard", "timm", "torchvision", "transformers", "zensical",
}  # fmt: skip
ABSENT = {name for name in OPTIONAL if find_spec(name) is None}
_uncollected: list[str] = []


def _missing(statements: list[ast.stmt]) -> set[str]:
    imported = set()
    for node in statements:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    missing = imported & ABSENT
    for node in statements:
        if isinstance(node, ast.Try) and (tried := _missing(node.body)):  # a handler may import another package
            handled = [_missing(handler.body) for handler in node.handlers]
            missing |= tried if all(handled) else set()
    return missing


def missing_packages(path: Path) -> set[str]:
    """Return the optional packages that a file imports at its top and that are not installed."""
    return _missing(ast.parse(path.read_text(encoding="utf-8")).body)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files whose packages are missing, so that `pytest -m gpu` needs only the library's own."""
    if not ABSENT or collection_path.suffix != ".py" or not (missing := missing_packages(collection_path)):
        return None
    name = collection_path.relative_to(ROOT)
    _uncollected.append(f"not collected: {name} (not installed: {', '.join(sorted(missing))})")
    return True


def pytest_report_collectionfinish() -> list[str]:
    """Name the files that were left out."""
    return sorted(_uncollected)
