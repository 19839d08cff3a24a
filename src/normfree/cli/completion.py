"""Names that a shell completes: recipes, methods, models, data sets and claims.

They are read from the source, because importing torch for the registries takes longer than a reader waits for a key.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
Complete = Callable[[str], list[str]]


def _completing(names: Callable[[], Iterator[str]]) -> Complete:
    """Return a function from the beginning of a name to the names that begin so."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in dict.fromkeys(names()) if name.startswith(incomplete)]

    return complete


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _calls(path: Path, name: str) -> Iterator[ast.Call]:
    """Yield the calls of a function in a file."""
    for node in _nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def _recipes() -> Iterator[str]:
    from normfree.train.recipes import recipes

    yield from recipes()


def _methods() -> Iterator[str]:
    for path in sorted((_PACKAGE / "methods").glob("*.py")):
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef) and "register" in map(ast.unparse, node.decorator_list):
                yield node.name


def _models() -> Iterator[str]:
    for call in _calls(_PACKAGE / "models" / "model_registry.py", "Family"):
        yield from ast.literal_eval(call.args[3])  # the examples of the family


def _data() -> Iterator[str]:
    from normfree.train.recipes import recipes

    yield from (recipe.config.data for recipe in recipes().values() if ":" not in recipe.config.data)
    for call in _calls(_PACKAGE / "data" / "download" / "catalog.py", "DataSet"):
        yield from (ast.literal_eval(word.value) for word in call.keywords if word.arg == "name")


def _claims() -> Iterator[str]:
    found = find_spec("normfree_papers")
    if found is None or not found.submodule_search_locations:
        return
    for node in _nodes(Path(found.submodule_search_locations[0], "claims", "registry.py")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES":
            for module, claims in ast.literal_eval(node.value).items():
                yield from (f"{module.partition('.')[0]}/{claim}" for claim in claims)


complete_recipe = _completing(_recipes)
complete_method = _completing(_methods)
complete_model = _completing(_models)
complete_data = _completing(_data)
complete_claim = _completing(_claims)
