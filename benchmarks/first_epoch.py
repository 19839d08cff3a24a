"""Count how often Fixup's ResNet-110 falls to chance in its first epoch, by the path that trains it.

    python benchmarks/first_epoch.py --data-dir .data --jobs 12 --json results/kernels/first-epoch.json

Every path trains the same seeds for one epoch of CIFAR-10 at the rate of the recipe fixup_cifar. A run has lost its
signal if its loss on the test images is that of guessing. If a path has an error, it loses more runs than the others;
if Fixup is unstable at this rate, all lose about the same share.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from saving import shown_command

from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json
from normfree.train.recipes import recipe
from normfree_papers.claims.judgement import share_interval
from normfree_papers.claims.run_cache import RunCache

PATHS: dict[str, dict[str, Any]] = {
    "stage kernels": {"kernels": "stage"},
    "compiled": {"kernels": "compiled"},
    "compiled, float32": {"kernels": "compiled", "precision": "float32"},
}
GUESSING = math.log(10) - 0.01  # the loss of guessing ten classes; a run that learns is far below it


def measure(path: str, given: argparse.Namespace) -> dict[str, Any]:
    """The test loss of every seed, how many are at chance, and the 95 % interval of their share."""
    changes = {**PATHS[path], "epochs": 1, "schedule": "constant", "model": given.model, "data": given.data}
    wanted = {f"{path}, seed {seed}": recipe("fixup_cifar", seed=seed, **changes) for seed in range(given.seeds)}
    with tempfile.TemporaryDirectory() as folder:
        kept, work = Path(folder) / "kept", Path(folder) / "work"
        runs = RunCache(kept, work, device=given.device, data=given.data_dir, jobs=given.jobs)(wanted)
        losses = [None if run is None or run.diverged else run.result["test"]["loss"] for run in runs.values()]
    lost = [float(loss is None or loss >= GUESSING) for loss in losses]
    interval = share_interval(lost)
    return {
        "path": path,
        "precision": wanted[f"{path}, seed 0"].precision,
        "test_loss": losses,
        "lost": int(sum(lost)),
        "share": [interval.low, interval.high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", choices=list(PATHS), help="default: all, one after another")
    parser.add_argument("--seeds", type=int, default=48)
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path(".data"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    origin = {"command": shown_command("first_epoch.py", sys.argv[1:]), "commit": commit()}
    origin |= {"versions": versions(), "hardware": hardware(given.device), "seeds": list(range(given.seeds))}
    rows = []
    for path in given.path or PATHS:
        rows.append(measure(path, given))
        low, high = rows[-1]["share"]
        print(f"{path}: {rows[-1]['lost']} of {given.seeds} runs at chance, 95 % interval {low:.3f} to {high:.3f}")
        if given.json is not None:
            write_json(given.json, {**origin, "model": given.model, "rows": rows})


if __name__ == "__main__":
    main()
