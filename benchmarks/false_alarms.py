"""Diagnose models of timm that a seeded shuffle picks, one per family, with random weights: each alarm is a false one.

    python benchmarks/false_alarms.py --seed 2029 --json results/benchmarks/false-alarms.json

The models of the stored lists (tests/support/networks) are left out, and so are models with more than 45 million
parameters. Nobody chose the models, and a seed that was not used before picks models that no rule was written with.
`--json` keeps the scores of other seeds that the file has.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normfree.diagnostics import diagnose
from normfree.models.third_party import create_model
from normfree.storage.provenance import commit, versions

SUPPORT = Path(__file__).parents[1] / "tests" / "support" / "networks"
MOST_PARAMETERS = 45e6
CLASSES, IMAGES, SIDE = 100, 4, 224


def picked(seed: int) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Models that take small images, in random order, one per family: the letters that a name begins with."""
    import timm

    stored = "".join(path.read_text(encoding="utf-8") for path in SUPPORT.glob("healthy*.py"))
    names = [name for name in timm.list_models() if name not in stored]
    random.Random(seed).shuffle(names)
    families: set[str] = set()
    for name in names:
        family = re.split(r"[^a-z]", name)[0]
        if family in families:
            continue
        try:
            with torch.device("meta"):
                if sum(p.numel() for p in timm.create_model(name).parameters()) > MOST_PARAMETERS:
                    continue
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=CLASSES)
            channels, height, width = model.default_cfg["input_size"]
            images = torch.randn(IMAGES, channels, min(height, SIDE), min(width, SIDE))
            model.train()(images)  # timm leaves pruned models in evaluation mode
        except Exception:  # needs another package, another input or more classes
            continue
        families.add(family)
        yield name, model, images


def measure(seed: int, count: int) -> list[dict[str, Any]]:
    """Diagnose `count` models."""
    rows: list[dict[str, Any]] = []
    for name, model, images in picked(seed):
        verdict = diagnose(model, images, torch.arange(IMAGES)).verdict
        alarm = bool(verdict.outliers) or any(finding.status != "drifting" for finding in verdict.findings)
        rows.append({"name": name, "word": verdict.word, "alarm": alarm})
        print(f"{len(rows)} of {count}: {name}: {verdict.word}{' (alarm)' * alarm}", flush=True)
        if len(rows) == count:
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the shuffle")
    parser.add_argument("--count", type=int, default=60, help="the number of models")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    create_model("torchvision:resnet18")  # declares the operators that torchvision lacks beside a torch for the CPU
    made_with = commit()  # another commit may be made meanwhile
    rows = measure(options.seed, options.count)
    print(f"{sum(row['alarm'] for row in rows)} false alarms in {len(rows)} models")
    if options.json:
        before = json.loads(options.json.read_text(encoding="utf-8"))["seeds"] if options.json.exists() else {}
        command = shlex.join(["python", "benchmarks/false_alarms.py", *sys.argv[1:]])
        found = {"commit": made_with, "versions": versions(), "command": command, "models": rows}
        record = {"seeds": {**before, str(options.seed): found}}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
