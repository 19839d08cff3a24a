"""Measure the training speed of Transformers: norm-free beside layer norm in the engine, on the same batches.

    normfree data prepare --source multi30k.train.de --target multi30k.train.en
    python benchmarks/translation.py pairs:.data/multi30k-8000 --json results/benchmarks/translation.json

Rows are whole steps (gathering the batch, forward, backward, update), in target tokens per second without padding; the
share of padding is printed too. The set-up (building, compiling, capturing one graph per shape) is timed separately.
Methods take turns `--repeats` times, and ratios are those of medians.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import normfree as nf
from normfree.data.text.pair_batches import PairBatches
from normfree.data.text.prepared_folder import Prepared
from normfree.report import Column, Table, print_table
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json
from normfree.train.text.text_data import open_text


def only_training(data: Prepared) -> Prepared:
    """The same without validation and test, which are not timed."""
    return replace(data, manifest={**data.manifest, "splits": {"train": data.manifest["splits"]["train"]}})


def speed(model: str, method: str, data: Prepared, tokens: int, epochs: int, device: str) -> tuple[float, float]:
    """Tokens a second, and seconds to set up."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    config = nf.recipe("translation", model=model, method=method, batch_size=tokens, epochs=epochs, device=device)
    found = nf.fit(config, data=data)
    return found.throughput, found.setup_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="pairs:FOLDER of normfree data prepare")
    parser.add_argument("--model", default="transformer-6-6-512-1024-4")
    parser.add_argument(
        "--methods", default="layernorm,fixup,rezero,dyt", help="the first is what others are held against"
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    data = only_training(open_text(given.data).prepared)
    batches = PairBatches(data.pairs("train"), tokens=given.tokens)
    print(batches)
    methods = given.methods.split(",")
    speeds: dict[str, list[float]] = {method: [] for method in methods}
    setups: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(given.repeats):
        for method in methods:
            found, setup = speed(given.model, method, data, given.tokens, given.epochs, given.device)
            speeds[method].append(found)
            setups[method].append(setup)
    base = statistics.median(speeds[methods[0]])
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "tokens_per_second": statistics.median(speeds[method]),
            "each": speeds[method],
            "ratio": statistics.median(speeds[method]) / base,
            "setup_seconds": setups[method][0],
        }
        for method in methods
    ]
    cells = tuple(
        (r["method"], f"{r['tokens_per_second']:,.0f}", f"{r['ratio']:.3f}", f"{r['setup_seconds']:.1f}") for r in rows
    )
    heads = (
        Column("method"),
        Column("tokens/s", "right"),
        Column(f"/ {methods[0]}", "right"),
        Column("set-up, s", "right"),
    )
    print_table(Table(given.model, heads, cells))
    if given.json is not None:
        words = [Path(word).name if word.endswith(".json") else word for word in sys.argv[1:]]
        origin = {"command": "python " + shlex.join(["benchmarks/translation.py", *words]), "commit": commit()}
        origin |= {"versions": versions(), "hardware": hardware(given.device)}
        about = {"model": given.model, "padding": batches.padding, "shapes": len(batches.shapes)}
        write_json(given.json, {**origin, **about, "rows": rows})


if __name__ == "__main__":
    main()
