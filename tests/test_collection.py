"""Tests can be collected on a machine that has only the library's own dependencies and pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Python imports this module when it starts, so that the packages look as if they were not installed.
HIDDEN = (
    "PIL", "curvlinops", "griffe", "hypothesis", "jinja2", "latex2mathml", "lightning", "matplotlib", "mkdocstrings",
    "onnx", "onnxruntime", "onnxscript", "opacus", "optuna", "playwright", "pytorch_lightning", "ray", "sacrebleu",
    "scipy", "sentencepiece", "tensorboard", "timm", "torchvision", "transformers", "zensical",
)  # fmt: skip
SITE = f"""
import importlib.machinery, sys

find = importlib.machinery.PathFinder.find_spec

def find_spec(finder, name, path=None, target=None):
    return None if name.split(".")[0] in {HIDDEN} else find(name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""


def collect(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `pytest --collect-only` in a process that does not find the packages in `HIDDEN`."""
    (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", "--collect-only", *plugins, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src")))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_gpu_tests_are_collected_without_development_packages(tmp_path: Path) -> None:
    done = collect(tmp_path, "-m", "gpu")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "<Module test_gpu.py>" in done.stdout
    assert "not collected: tests/test_plan.py (not installed: hypothesis)" in done.stdout
    assert "not collected: tests/frameworks/test_lightning.py (not installed: lightning)" in done.stdout
    assert "not collected: tests/comparison/test_ray_cluster.py (not installed: ray)" in done.stdout
    assert "not collected: tests/tuning/test_tune_runs.py (not installed: optuna)" in done.stdout
