"""Convert other people's models by each method, and measure how they start and learn.

    python benchmarks/conversion.py --markdown docs/models.md --json results/benchmarks/conversion.json

For each model and method: the residual branches found, the normalizers removed, the verdict of `diagnose`, the
suggested learning rate, and steps of AdamW at that rate on one fixed batch of noise with fixed targets: the loss at the
start and after 20 steps, and the parameters that have not moved after 40. A model runs in a process of its own, with a
time limit; --jobs says how many run at once, and those that took longest start first. Each row is stored as it ends,
and a pair that is in the JSON file is not run again, except with --fresh. diffusers and segmentation_models_pytorch are
needed for some models only (pip install --no-deps, or a folder of PYTHONPATH); where they are missing, these models are
left out, and the exit status is 1, as it is if a pair fails. The page ends with the results of learning_rates.py.

Rows that another machine has stored in FILE replace those of the table, and nothing runs, if the command above ends in
--page --rows FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from idle_scalars import idle_scalars, without_dropout
from models_page import ALL_STEPS, ORIGINAL, SMALL_RATE, STEPS, page
from subjects import MODELS, PACKAGES, Subject, import_packages, is_available
from torch import nn

import normfree as nf
from normfree.nn.normalizers import find_norms
from normfree.plan import remembered_plan
from normfree.report.terminal import progress
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.writing import write_json

METHODS = ("fixup", "skipinit", "nf")
MORE_METHODS = ("rezero", "small_branch", "hanin", "isograd", "wn", "dyt")  # for one model of each kind
WITH_MORE = ("torchvision resnet18", "timm convnext_atto", "transformers ViT", "transformers Llama")
PROCESSES = multiprocessing.get_context("forkserver")  # its server imports the packages once
PROCESSES.set_forkserver_preload(["conversion"])
STORED = Path(__file__).parents[1] / "results" / "benchmarks" / "conversion.json"
OF_A_ROW = ("commit", "versions", "hardware")  # of its own, since the rows of a table may come from several runs
Pair = tuple[str, str]  # a model and a method
LIMIT = 900  # seconds for one model with all its methods


import_packages()  # once, in the server of the processes


def methods_for(name: str) -> tuple[str, ...]:
    return (ORIGINAL, *METHODS, *(MORE_METHODS if name in WITH_MORE else ()))


def measure(name: str, method: str, rate: float | None = None) -> dict[str, Any]:
    """One pair: what was found and removed, the verdict, the losses and the parameters that stay, or why not."""
    began = time.perf_counter()
    torch.manual_seed(0)
    subject = MODELS[name]()
    row: dict[str, Any] = {"model": name, "method": method}
    model: nn.Module = subject.model.train()
    without_dropout(model)
    names = {name for name, _ in model.named_parameters()}
    try:
        if method == ORIGINAL:
            row |= {"norms": len(find_norms(model))}
            row |= {"branches": len(nf.discover(model, subject.inputs).branches)}
        else:
            model, plan = nf.convert(model, method, subject.inputs, generator=torch.Generator().manual_seed(0))
            row |= {"branches": len(plan.branches), "removed": len(plan.changes.removed)}
            row |= {"notes": list(plan.changes.notes)}
    except ValueError as error:
        row |= {"refused": str(error)}
        if method != ORIGINAL:
            return row
    try:
        found = nf.diagnose(model, subject.inputs, generator=torch.Generator().manual_seed(0))
        row["verdict"] = found.verdict.status
    except ValueError as error:
        row |= {"verdict": "refused", "not_diagnosed": str(error)}
    model.train()
    without_dropout(model)
    row |= {"chance": subject.chance, "suggested": rate is None}
    row["rate"] = suggested_rate(subject, model) if rate is None else rate
    row |= train(subject, model, row["rate"])
    row["added"] = [name for name in row["unmoved"] if name not in names]
    if row["added"]:
        row["idle"] = idle_scalars(MODELS[name], row["added"])
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def suggested_rate(subject: Subject, model: nn.Module) -> float:
    """Return the rate of `nf.find_lr` for AdamW: one short range test, and a few steps that must lower the loss."""
    search = {"low": 1e-5, "high": 0.03, "steps": 25, "runs": 1, "check": STEPS, "curvature": False}
    found = nf.find_lr(
        model, [(subject.inputs, None)], lambda out, _: subject.loss_of(out), optimizer="adamw", **search
    )
    return found.suggestion


def train(subject: Subject, model: nn.Module, rate: float) -> dict[str, Any]:
    """Take the steps; return the losses and the names of the parameters that are what they were.

    A batch that is learned to the last bit has no gradient, so what has not moved gets other steps at a small rate.
    """
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses, unmoved = _steps(subject, model, rate)
    if unmoved:
        model.load_state_dict(start)
        unmoved &= _steps(subject, model, SMALL_RATE)[1]
    reached = losses[STEPS] if len(losses) > STEPS else math.nan
    return {"first": losses[0], "loss": reached, "unmoved": sorted(unmoved)}


def _steps(subject: Subject, model: nn.Module, rate: float) -> tuple[list[float], set[str]]:
    """Take the steps, and more while a parameter has not moved; return the losses and such parameters."""
    is_converted = remembered_plan(model) is not None
    groups = nf.param_groups(model, lr=rate) if is_converted else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    unmoved = {name: value.detach().clone() for name, value in parameters.items()}
    losses: list[float] = []
    while len(losses) <= STEPS or (unmoved and len(losses) < ALL_STEPS):
        loss = subject.loss(model)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        unmoved = {name: value for name, value in unmoved.items() if torch.equal(value, parameters[name])}
    return losses, set(unmoved)


def run_model(name: str, methods: Sequence[str], rate: float | None, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run the pairs of one model in a process, and keep each row as it comes, also those that ran out of time."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run_here, args=(theirs, name, methods, rate))
    process.start()
    theirs.close()
    left = list(methods)
    deadline, reason = time.monotonic() + LIMIT, f"longer than {LIMIT} seconds"
    try:
        while left and ours.poll(max(0.0, deadline - time.monotonic())):
            keep(ours.recv())
            left.pop(0)
    except EOFError:
        reason = "the process died"
    process.kill()
    process.join()
    for method in left:
        keep({"model": name, "method": method, "failed": reason})


def run_here(rows: Connection, name: str, methods: Sequence[str], rate: float | None) -> None:
    """Send a row per pair."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for method in methods:
        try:
            row = measure(name, method, rate)
        except Exception as error:  # one pair that fails must not end the table
            row = {"model": name, "method": method, "failed": f"{type(error).__name__}: {error}"}
        rows.send(row)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="parts of the names of the models to run, separated by commas")
    parser.add_argument("--methods", help="the methods to run, separated by commas; default: each model's own")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the rows, and do not run those that are there")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="models that run at once")
    parser.add_argument("--rate", type=float, help="a learning rate for all, instead of the suggested ones: faster")
    parser.add_argument(
        "--rows", type=Path, nargs="*", default=[], metavar="FILE", help="more files with stored rows (last option)"
    )
    parser.add_argument("--page", action="store_true", help="write the page from stored rows, and run nothing")
    parser.add_argument("--fresh", action="store_true", help="run the chosen models again")
    given = parser.parse_args()
    if missing_files := [str(path) for path in given.rows if not path.exists()]:
        parser.error(f"expected files with stored rows, but there is no {', '.join(missing_files)}")
    wanted = given.models.split(",") if given.models else [""]
    known = [name for name in MODELS if any(part in name for part in wanted)]
    if not known:
        parser.error(f"expected parts of the names of models, got '{given.models}'; one is '{next(iter(MODELS))}'")
    models = known if given.page else [name for name in known if is_available(name)]
    if absent := [name for name in known if name not in models]:
        print(f"left out, their packages are not installed: {', '.join(absent)}", file=sys.stderr)
    rows: dict[Pair, dict[str, Any]] = {}
    stored: dict[str, Any] = {}
    for path in (given.json, *given.rows):
        if path is not None and path.exists():
            stored = json.loads(path.read_text())
            rows |= {(r["model"], r["method"]): {**{key: stored[key] for key in OF_A_ROW}, **r} for r in stored["rows"]}
    if unknown := {model for model, _ in rows if model not in MODELS}:
        print(f"stored, but not in subjects.py any more, and left out: {', '.join(sorted(unknown))}", file=sys.stderr)
    rows = {pair: row for pair, row in rows.items() if pair[0] in MODELS}
    chosen = {name: given.methods.split(",") if given.methods else methods_for(name) for name in models}
    left = {
        name: [method for method in methods if given.fresh or (name, method) not in rows]
        for name, methods in chosen.items()
    }
    left = {name: methods for name, methods in left.items() if methods and not given.page}
    command = "python " + shlex.join(["benchmarks/conversion.py", *_command(sys.argv[1:])])
    if (given.models or given.page) and stored:
        command = stored["command"]  # the whole table is not made by a command for some rows
    packages = {package: _version(package) for package in PACKAGES}
    origin = {"command": command, "commit": commit(), "versions": {**versions(), **packages}, "hardware": hardware()}
    if given.page and stored:
        origin = {key: stored[key] for key in origin}  # nothing runs here
    again = {(name, method) for name, methods in left.items() for method in methods}
    for (name, _), row in ((pair, row) for pair, row in rows.items() if pair not in again and pair[0] in left):
        if row["versions"] != origin["versions"]:
            raise SystemExit(f"expected the versions that other rows of '{name}' have, {row['versions']}; use --fresh")
    ran = _run(left, given, rows, origin, known=len(models))
    _keep(given.json, origin, rows)
    without = {model for model, method in rows if method != ORIGINAL and (model, ORIGINAL) not in rows}
    text = page([rows[pair] for pair in sorted(rows, key=_place) if pair[0] not in without], origin)
    if given.markdown is not None:
        given.markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    if without:
        print(f"not on the page, because 'original' was not run: {', '.join(sorted(without))}", file=sys.stderr)
    failed = [
        f"{name} by {method}: {rows[name, method]['failed']}" for name, method in ran if "failed" in rows[name, method]
    ]
    print(f"{len(ran)} pairs ran, {len(failed)} of them failed", *failed, sep="\n", file=sys.stderr)
    if failed or absent:
        raise SystemExit(1)


def _run(
    left: dict[str, list[str]],
    given: argparse.Namespace,
    rows: dict[Pair, dict[str, Any]],
    origin: dict[str, Any],
    *,
    known: int,
) -> list[Pair]:
    """Run the pairs that are left, those models first that took longest, and keep their rows. Returns the pairs."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the server, which imports this module before it forks
    times = _seconds(rows)
    order = sorted(left, key=lambda name: -times.get(name, math.inf))  # a new model may be slow
    finished = known - len(left)
    lock = threading.Lock()
    ran: list[Pair] = []

    def keep(row: dict[str, Any]) -> None:
        with lock:
            ran.append((row["model"], row["method"]))
            rows[ran[-1]] = row | {key: origin[key] for key in OF_A_ROW}
            _keep(given.json, origin, rows)

    with ThreadPoolExecutor(given.jobs) as pool, progress("models", known, done=finished) as update:
        running = {pool.submit(run_model, name, left[name], given.rate, keep): name for name in order}
        for done, future in enumerate(as_completed(running), finished + 1):
            future.result()
            update(done, known, running[future])
    return ran


def _seconds(rows: dict[Pair, dict[str, Any]]) -> Counter[str]:
    """How long the models took, by these rows or, without rows, by those of the repository."""
    found = list(rows.values()) or (json.loads(STORED.read_text())["rows"] if STORED.exists() else [])
    times: Counter[str] = Counter()
    for row in found:
        times[row["model"]] += row.get("seconds", 0)
    return times


def _keep(path: Path | None, origin: dict[str, Any], rows: dict[Pair, dict[str, Any]]) -> None:
    """Store the rows; one that was made elsewhere, or by other versions, says so."""
    if path is not None:
        found = [rows[pair] for pair in sorted(rows, key=_place)]
        short = [
            {key: value for key, value in row.items() if key not in OF_A_ROW[1:] or value != origin[key]}
            for row in found
        ]
        write_json(path, {**origin, "rows": short})


def _place(pair: Pair) -> tuple[int, int]:
    order = (ORIGINAL, *METHODS, *MORE_METHODS)
    return list(MODELS).index(pair[0]), order.index(pair[1]) if pair[1] in order else len(order)


def _command(words: list[str]) -> list[str]:
    """Return the command without absolute folders, and without the options that only say what is run again."""
    short = [os.path.relpath(word) if os.path.isabs(word) else word for word in words]
    if "--rows" in short:
        short = short[: short.index("--rows")]  # comes last
    return [word for word in short if word not in ("--fresh", "--page")]


if __name__ == "__main__":
    main()
