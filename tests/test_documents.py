"""What the documents print must work as printed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from normfree.methods import get, names, unregister
from normfree.models import build

ROOT = Path(__file__).parents[1]


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, flags=re.S | re.M)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, body in blocks]


def test_contributing_example_adds_a_method_that_works() -> None:
    (source,) = python_blocks("CONTRIBUTING.md")
    module = types.ModuleType("tiny_plugin")
    sys.modules["tiny_plugin"] = module
    try:
        exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
        assert "tiny" in names()
        model = build("resmlp-8-16", "tiny:power=2", size=4)
        betas = [block.beta.value.item() for block in model.body[0]]
        assert betas == pytest.approx([1 / 64] * 8)
        assert get("tiny").rule.beta.text == "L^-1"
    finally:
        del sys.modules["tiny_plugin"]
        if "tiny" in names():
            unregister("tiny")


def test_readme_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    build_block, own_block, diagnose_block, train_block = python_blocks("README.md")
    exec(compile(build_block, "README.md", "exec"), scope)
    loss = scope["loss"]
    assert isinstance(loss, torch.Tensor)
    assert loss.item() == pytest.approx(2.302585, abs=1e-5)  # ln 10: Fixup starts with zero logits

    exec(compile(own_block, "README.md", "exec"), scope)
    assert len(scope["plan"].branches) == 16  # type: ignore[attr-defined]
    converted = scope["converted"]
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in converted.modules())  # type: ignore[attr-defined]
    exec(compile(diagnose_block, "README.md", "exec"), scope)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len((tmp_path / "signal.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    exec(compile(train_block, "README.md", "exec"), scope)
    assert scope["result"].status == "finished"  # type: ignore[attr-defined]
    assert isinstance(scope["model"], torch.nn.Module)


def test_documents_name_only_methods_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (`.*) \|$", text, flags=re.M)
    specs = [spec for row in rows for spec in re.findall(r"`([a-z_]+(?::[^`]+)?)`", row)]
    assert len(specs) >= 8
    for spec in specs:
        get(spec)
