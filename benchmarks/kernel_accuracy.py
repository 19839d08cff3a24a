"""Train Fixup ResNet-110 on CIFAR-10 by the stage kernels and by the compiled path, and compare the test errors.

    python benchmarks/kernel_accuracy.py train stage --data-dir .data
    python benchmarks/kernel_accuracy.py train compiled --data-dir .data --jobs 5
    python benchmarks/kernel_accuracy.py compare

`train` makes the runs of one path: 40 epochs of the recipe fixup_cifar, seeds 0 to 4, kept in results/kernels/PATH.
`compare` writes results/kernels/accuracy.json: the test errors by path and seed, and the 95 % interval of the
difference, by pairs of runs with the same seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from normfree.storage.writing import write_json
from normfree.train.recipes import recipe
from normfree_papers.claims.judgement import mean, mean_interval
from normfree_papers.claims.run_cache import RunCache

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "results" / "kernels"
PATHS = ("stage", "compiled")


def train(path: str, seeds: int, data: Path, device: str, jobs: int) -> None:
    runs = RunCache(KEPT / path, ROOT / "runs" / "kernels" / path, device=device, data=data, jobs=jobs)
    found = runs({f"seed {seed}": recipe("fixup_cifar", epochs=40, seed=seed, kernels=path) for seed in range(seeds)})
    for name, run in found.items():
        print(path, name, None if run is None else run.result["test"]["accuracy"])


def compare() -> dict[str, Any]:
    """The errors in per cent by path and seed, and the interval of stage minus compiled."""
    stored = {path: sorted((KEPT / path).glob("*/result.json")) for path in PATHS}
    results = {path: [json.loads(file.read_text(encoding="utf-8")) for file in stored[path]] for path in PATHS}
    errors = {
        path: {run["config"]["seed"]: 100 * (1 - run["test"]["accuracy"]) for run in results[path]} for path in PATHS
    }
    by_kernels, compiled = (errors[path] for path in PATHS)
    if set(by_kernels) != set(compiled) or len(compiled) < 2:
        raise SystemExit(f"expected runs of the same seeds by both paths, got {errors}; use train first")
    wrong = [run["config"]["kernels"] for path in PATHS for run in results[path] if run["config"]["kernels"] != path]
    if wrong:
        raise SystemExit(f"expected each run to use the kernels of its folder, got {wrong}")
    differences = [by_kernels[seed] - compiled[seed] for seed in sorted(compiled)]
    interval = mean_interval(differences)
    assert interval is not None
    first = results["stage"][0]
    return {
        "command": "python benchmarks/kernel_accuracy.py compare",
        "model": first["config"]["model"],
        "method": first["config"]["method"],
        "epochs": first["config"]["epochs"],
        "precision": first["config"]["precision"],
        "seeds": sorted(compiled),
        "commit": ", ".join(sorted({run["commit"] for path in PATHS for run in results[path]})),
        "versions": first["versions"],
        "hardware": first["hardware"],
        "test_error": {path: [errors[path][seed] for seed in sorted(compiled)] for path in PATHS},
        "mean_error": {path: mean(list(errors[path].values())) for path in PATHS},
        "difference": mean(differences),
        "interval": [interval.low, interval.high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "compare"])
    parser.add_argument("path", nargs="?", choices=PATHS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=ROOT / ".data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    if given.what == "train":
        if given.path is None:
            parser.error("expected a path, stage or compiled")
        train(given.path, given.seeds, given.data_dir, given.device, given.jobs)
    else:
        write_json(KEPT / "accuracy.json", compare())
        print((KEPT / "accuracy.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
