"""Measure the throughput of training with a checkpoint every ten seconds beside that without, in one run on one GPU.

    python benchmarks/saving.py --data-dir .data --json results/benchmarks/saving.json

Both train Fixup's ResNet-110 on CIFAR-10 by the stage kernels, in turn: without, with, with, without, and so on. The
throughput is that of the clock from the end of the first epoch to the end of the last one, so it includes the time in
which a save stops the training. The checkpoints of a run are counted on the disk.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import normfree as nf
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json
from normfree.train import RunFolder
from normfree.train.recipes import recipe
from normfree_papers.claims.judgement import mean, mean_interval

WITHOUT, WITH = "without", "with"


def measure(saves: bool, given: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the images per second and the number of checkpoints before the last one."""
    with tempfile.TemporaryDirectory() as folder:
        config = recipe(
            "fixup_cifar",
            model=given.model,
            data=given.data,
            data_dir=str(given.data_dir),
            device=given.device,
            kernels=given.kernels,
            epochs=given.epochs,
            schedule="constant",
            lr=0.01,
            checkpoint_epochs=0,
            checkpoint_minutes=given.seconds / 60 if saves else 0.0,
            keep_last=1000,
        )
        result = nf.fit(config, out=folder, picture=False)
        records = RunFolder(folder).read_metrics()
        first, last = records[0], records[-1]
        images = (last["step"] - first["step"]) * config.batch_size
        seconds = last["seconds"] - first["seconds"]
        checkpoints = len(list(Path(folder).glob("checkpoint-*"))) - 1
        size = sum(file.stat().st_size for file in Path(folder).glob(f"checkpoint-{last['step']}/*"))
    return {
        "saves": WITH if saves else WITHOUT,
        "images_per_second": images / seconds,
        "seconds": seconds,
        "checkpoints": checkpoints,
        "checkpoint_bytes": size,
        "kernels": result.config.kernels,
    }


def shown_command(script: str, words: list[str]) -> str:
    """The command without the folders of the machine it ran on: DIR for that of the data, a name for the result.

    >>> shown_command("saving.py", ["--data-dir", "/home/me/data", "--json", "/tmp/saving.json"])
    'python benchmarks/saving.py --data-dir DIR --json saving.json'
    """
    shown = ["DIR" if before == "--data-dir" else word for before, word in zip(["", *words], words, strict=False)]
    names = [Path(word).name if word.endswith(".json") else word for word in shown]
    return shlex.join(["python", f"benchmarks/{script}", *names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path(".data"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="stage")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=10.0, help="between two checkpoints")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    origin = {"command": shown_command("saving.py", sys.argv[1:]), "commit": commit()}
    origin |= {"versions": versions(), "hardware": hardware(given.device)}
    origin |= {"model": given.model, "epochs": given.epochs, "seconds_between": given.seconds}
    rows: list[dict[str, Any]] = []
    for number in range(given.rounds):
        for saves in (False, True) if number % 2 == 0 else (True, False):
            rows.append({"round": number, **measure(saves, given)})
            print(rows[-1], flush=True)
        speeds = [
            {row["saves"]: row["images_per_second"] for row in rows if row["round"] == n} for n in range(number + 1)
        ]
        ratios = [speed[WITH] / speed[WITHOUT] for speed in speeds]
        interval = mean_interval(ratios)
        shown = {"ratios": ratios, "ratio": mean(ratios), "interval": interval and [interval.low, interval.high]}
        print(f"with / without: {mean(ratios):.4f} {shown['interval']}", flush=True)
        if given.json is not None:
            write_json(given.json, {**origin, **shown, "rows": rows})


if __name__ == "__main__":
    main()
