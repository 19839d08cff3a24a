"""Runs the examples, and stores their outputs, pictures and notebooks: `make examples`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import time
from pathlib import Path

from example_pages import FOLDER, NAMES, NOTEBOOKS, OUTPUT, fingerprint, index_page, notebook, pictures
from normfree.models.third_party import create_model


def run(name: str, folder: Path) -> tuple[str, float]:
    """Run an example in a folder; return what it printed, and its CPU seconds."""
    printed, home = io.StringIO(), Path.cwd()
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    finally:
        os.chdir(home)
        del os.environ["COLUMNS"]
    return printed.getvalue(), time.process_time() - began


def store(name: str) -> float:
    """Run an example, store what it prints and draws, and return its CPU seconds."""
    OUTPUT.mkdir(exist_ok=True)
    for old in pictures(name):
        old.unlink()
    printed, seconds = run(name, OUTPUT)
    (OUTPUT / f"{name}.txt").write_text(printed, encoding="utf-8")
    path = OUTPUT / "runs.json"
    runs = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    runs[name] = {"sha256": fingerprint(name), "seconds": round(seconds, 1)}
    path.write_text(json.dumps({name: runs[name] for name in NAMES if name in runs}, indent=1) + "\n", encoding="utf-8")
    return seconds


if __name__ == "__main__":
    create_model("torchvision:resnet18")  # makes torchvision load beside a torch without CUDA, which timm needs
    for chosen in sys.argv[1:] or NAMES:
        print(f"{chosen}: {store(chosen):.0f} s")
    for chosen in NOTEBOOKS:
        (FOLDER / f"{chosen}.ipynb").write_text(notebook(chosen), encoding="utf-8")
    (FOLDER / "README.md").write_text(index_page(), encoding="utf-8")
