"""Train converted models at several learning rates, and record where they diverge.

    python benchmarks/learning_rates.py --json results/benchmarks/rates.json
    python benchmarks/learning_rates.py resnet18=0.1,0.05 --methods fixup,nf

For each model of torchvision, method, rate and seed: 150 steps of SGD with momentum 0.9 on batches of 16 of
`fashion14`, enlarged to 32 pixels a side, with the dropout and stochastic depth of the model. A seed gives all methods
and rates the same batches in the same order. A run diverges, and ends, at the first step (counted from 1) whose loss is
not finite or above the limit. The limit is far above the highest loss from which a run recovered; that loss is recorded
too. A method with "+agc" clips gradients adaptively by `nf.clip_grad_agc_`, which leaves out the classifier. A run that
is in the JSON file is not made again, except with --fresh.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import normfree as nf
from normfree.conversion import convert
from normfree.data import load
from normfree.models.third_party import create_model
from normfree.optim import agc_parameters
from normfree.report import Column, Table, print_table, to_markdown
from normfree.report.terminal import progress
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json

ORIGINAL = "original"
UNCLIPPED = (ORIGINAL, "fixup", "rezero", "skipinit", "nf", "wn")
CLIPPED, CLIP = "+agc", 0.02  # the bound on ‖gradient‖ / ‖weight‖ of a unit
METHODS = (*UNCLIPPED, *(method + CLIPPED for method in UNCLIPPED))
SWEEPS = ("mobilenet_v3_small=0.05,0.02,0.01,0.003", "efficientnet_b0=0.05,0.02,0.005")
SETTINGS = {"steps": 150, "last": 30, "batch": 16, "momentum": 0.9, "size": 32, "limit": 1000.0}
SEEDS = "0,1,2"
Run = tuple[str, str, float, int]  # model, method, rate, seed


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a seed: shuffled training images, standardized, enlarged, with three equal channels."""
    split = load("fashion14").train
    images = split.images.float()
    images = (images - images.mean()) / images.std()
    count, size = SETTINGS["batch"], SETTINGS["size"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    parts = order[: SETTINGS["steps"] * count].split(count)
    return [
        (F.interpolate(images[i], size=(size, size), mode="bilinear").expand(-1, 3, -1, -1), split.labels[i].long())
        for i in parts
    ]


def train(run: Run, data: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Train one run, and return the step at which it diverged or the mean loss of the last steps."""
    began = time.perf_counter()
    name, method, rate, seed = run
    clipped, method = method.endswith(CLIPPED), method.removesuffix(CLIPPED)
    torch.manual_seed(seed)
    model = create_model(f"torchvision:{name}", classes=10)
    groups = [{"params": list(model.parameters())}]
    if method != ORIGINAL:
        generator = torch.Generator().manual_seed(seed)
        model, plan = convert(model, method, data[0][0], generator=generator)
        groups = nf.param_groups(model, lr=rate, method=method, plan=plan)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=SETTINGS["momentum"])
    torch.manual_seed(seed)  # the same dropout for all methods
    model.train()
    bounded = agc_parameters(model) if clipped else []
    losses: list[float] = []
    diverged = None
    for images, labels in data:
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        if not losses[-1] <= SETTINGS["limit"]:  # true for NaN too
            diverged = len(losses)
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if clipped:
            nf.clip_grad_agc_(bounded, CLIP)
        optimizer.step()
    return {
        "model": name,
        "method": run[1],
        "rate": rate,
        "seed": seed,
        "diverged": diverged,
        "loss": None if diverged else sum(losses[-SETTINGS["last"] :]) / SETTINGS["last"],
        "highest": max(filter(math.isfinite, losses), default=math.nan),
        "seconds": round(time.perf_counter() - began, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate the mean loss over the seeds, or the number of diverged runs, by model, rate and method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = []
    for model, rate in dict.fromkeys((row["model"], row["rate"]) for row in rows):
        here = [row for row in rows if (row["model"], row["rate"]) == (model, rate)]
        losses = (_cell([row for row in here if row["method"] == method]) for method in methods)
        cells.append((model, f"{rate:g}", *losses))
    names = (method.removesuffix(CLIPPED).replace(ORIGINAL, "as built") for method in methods)
    heads = (Column("model"), Column("rate", "right"), *(Column(name, "right") for name in names))
    return Table(f"mean loss of the last {SETTINGS['last']} steps", heads, tuple(cells))


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    if lost := sum(row["diverged"] is not None for row in rows):
        return f"{lost} of {len(rows)} diverged"
    return f"{sum(row['loss'] for row in rows) / len(rows):.2f}" if rows else ""


def markdown(stored: dict[str, Any]) -> list[str]:
    """Write the stored runs as lines of a page: the setting, and the tables without and with clipping."""
    rows, done = stored["rows"], stored["settings"]
    command = stored["command"].replace("benchmarks/rates.py", "benchmarks/learning_rates.py")  # its name until 0.2
    seeds = len({row["seed"] for row in rows})
    plain, clipped = ([row for row in rows if row["method"].endswith(CLIPPED) == part] for part in (False, True))
    back = max((row for row in plain if not row["diverged"]), key=lambda row: row["highest"])
    return [
        f"Models of torchvision with random weights, as built and converted, are trained for {done['steps']} steps of "
        f"SGD (momentum {done['momentum']:g}) on batches of {done['batch']} images of `fashion14`, enlarged to "
        f"{done['size']} pixels a side, with the dropout and stochastic depth of the model. The tables give the mean "
        f'loss of the last {done["last"]} steps over {seeds} seeds. "n of {seeds} diverged" means that the loss '
        f"exceeded {done['limit']:g} or was not finite. Chance is {math.log(10):.2f}. The highest loss from which a "
        f"run recovered is {back['highest']:.1f}, of `{back['model']}` "
        f"{('by ' + back['method']).replace('by ' + ORIGINAL, 'as built')} at {back['rate']:g}.",
        "",
        *_lines(plain),
        f"With adaptive clipping, `nf.clip_grad_agc_(model, {CLIP:g})` before every step (`--set clip=agc --set "
        f"clip_at={CLIP:g}` of `normfree train`):",
        "",
        *_lines(clipped),
        f"Made by `{command}` with "
        + ", ".join(f"{name} {number}" for name, number in stored["versions"].items())
        + f" at commit {', '.join(sorted({row['commit'][:12] for row in rows}))}; "
        "[every run](../results/benchmarks/rates.json).",
    ]


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [*to_markdown(table(rows)).splitlines()[2:], ""]  # without its title


def _sweep(text: str) -> tuple[str, list[float]]:
    name, _, rates = text.partition("=")
    try:
        return name, [float(rate) for rate in rates.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a model and rates such as '{SWEEPS[0]}', got '{text}'") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [_sweep(text) for text in SWEEPS]
    parser.add_argument("sweeps", nargs="*", type=_sweep, default=default, metavar="MODEL=RATE,RATE")
    parser.add_argument("--methods", help="the methods to run, separated by commas", default=",".join(METHODS))
    parser.add_argument("--seeds", help="separated by commas", default=SEEDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the runs; skip those that are there")
    parser.add_argument("--fresh", action="store_true", help="make the chosen runs again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds, methods = [int(seed) for seed in given.seeds.split(",")], given.methods.split(",")
    runs = [(name, m, rate, seed) for seed in seeds for name, rates in given.sweeps for m in methods for rate in rates]
    words = [os.path.relpath(word) if os.path.isabs(word) else word for word in sys.argv[1:] if word != "--fresh"]
    origin = {
        "command": "python " + shlex.join(["benchmarks/learning_rates.py", *words]),
        "commit": commit(),
        "versions": {**versions(), "torchvision": version("torchvision")},
        "hardware": hardware(),
        "settings": SETTINGS,
    }
    rows: dict[Run, dict[str, Any]] = {}
    if given.json is not None and given.json.exists():
        stored = json.loads(given.json.read_text(encoding="utf-8"))
        rows = {(row["model"], row["method"], row["rate"], row["seed"]): row for row in stored["rows"]}
        if not given.fresh and any(stored[key] != origin[key] for key in ("versions", "settings")):
            raise SystemExit(f"expected the versions and settings that '{given.json}' was made with; use --fresh")
    left = [run for run in runs if given.fresh or run not in rows]
    create_model("torchvision:resnet18")  # importing it for the first time draws random numbers
    data = {seed: batches(seed) for seed in seeds}
    with progress("rates", len(runs), done=len(runs) - len(left)) as update:
        for done, run in enumerate(left, len(runs) - len(left) + 1):
            row = train(run, data[run[3]])
            rows[run] = row | {"commit": origin["commit"]}
            update(done, len(runs), f"{run[0]}, {run[1]}, {run[2]:g}, seed {run[3]}: {_cell([row])}")
            if given.json is not None:
                write_json(given.json, {**origin, "rows": [rows[key] for key in _in_order(rows, runs)]})
    for part in (False, True):
        if of := [rows[run] for run in runs if run[1].endswith(CLIPPED) == part]:
            print_table(table(of))


def _in_order(rows: dict[Run, dict[str, Any]], runs: list[Run]) -> list[Run]:
    """Sort the runs of this command first, in its order, and then the others."""
    return [run for run in runs if run in rows] + [run for run in rows if run not in runs]


if __name__ == "__main__":
    main()
