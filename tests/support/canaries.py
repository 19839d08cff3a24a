"""Compute canaries: today's, and those of the commits that made the stored runs.

    PYTHONPATH=src python tests/support/canaries.py today [--device cuda]
    PYTHONPATH=src python tests/support/canaries.py agreed FILE FILE
    PYTHONPATH=src python tests/support/canaries.py commits

On a GPU two processes round differently, and a few probes amplify that beyond the tolerance: compute today's canary
in two processes, and write the figures on which the two files agree.

`normfree_papers.claims.canary` describes canaries and the files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normfree.methods.method_registry import FIRST_RELEASE, as_of
from normfree.nn.devices import device_of
from normfree.storage.writing import write_text
from normfree.train.config import TrainConfig
from normfree_papers.claims.canary import COMMITTED, Record, differing, probes_of, tolerance
from normfree_papers.claims.canary_training import all_probes, canary, generated_images, generated_text, settings_of
from normfree_papers.claims.run_cache import KeptRun

ROOT = Path(__file__).resolve().parents[2]
RUNS, STORED = ROOT / "results" / "runs", ROOT / "results" / "canaries.json"
UNKNOWN, CPU = "unknown", "cpu float32"


def write_todays(device: str) -> None:
    """Write today's canary beside the code; the figures of other devices stay."""
    record: Record = json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else {}
    wanted = dict.fromkeys([*all_probes(), *kept_probes()])
    for precision in ("float32", "bf16", "mixed") if device == "cuda" else ("float32",):
        place = f"{device} {precision}"
        record[place] = {"tolerance": tolerance(place), "figures": canary(device, precision=precision, probes=wanted)}
    write_text(COMMITTED, _lines(record) + "\n")


def write_agreed(files: Iterable[Path]) -> None:
    """Write the canary that today's canaries of several processes have in common; other probes are left out."""
    record = _common([json.loads(file.read_text(encoding="utf-8")) for file in files])
    for found in record.values():
        found["figures"] = {probe: figures for probe, figures in found["figures"].items() if figures}
    write_text(COMMITTED, _lines(record) + "\n")


def write_commits() -> None:
    """Compute the canaries of all commits that made stored runs, and write them to results/canaries.json."""
    wanted = stored_probes()
    records: dict[str, Record | str] = {}
    for named, probes in wanted.items():
        found = [_of_commit(commit, probes) for commit in re.findall(r"[0-9a-f]{12,40}", named)]
        records[named] = UNKNOWN if not found or None in found else _common([one for one in found if one is not None])
        print(f"{named}: {_summary(records[named])}", flush=True)
    rows = (
        f'"{commit}": {json.dumps(one) if isinstance(one, str) else _lines(one)}' for commit, one in records.items()
    )
    write_text(STORED, '{"commits": {\n' + ",\n".join(rows) + "}}\n")


def kept_probes() -> list[str]:
    """Return the probes of all kept runs, as today's code spells them."""
    configs = (KeptRun(path.parent).config for path in sorted(RUNS.glob("*/config.toml")))
    return list(dict.fromkeys(probe for config in configs for probe in probes_of(config)))


def stored_probes() -> dict[str, dict[str, dict[str, Any]]]:
    """Return for each commit of the stored runs its probes, as today spells them, and their settings as it did."""
    wanted: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(RUNS.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "canary" in result:
            continue
        known = TrainConfig.__dataclass_fields__
        then = TrainConfig(**{name: value for name, value in result["config"].items() if name in known})
        now = then.with_changes(method=as_of(then.method, FIRST_RELEASE, then.model))
        probes = wanted.setdefault(result["commit"], {})
        for today, earlier in zip(probes_of(now), probes_of(then), strict=True):
            probes[today] = settings_of(earlier)
    return wanted


def _of_commit(commit: str, probes: Mapping[str, Mapping[str, Any]]) -> Record | None:
    """Return the record of a commit, computed by its own code in a temporary work tree; None if there is no such."""
    with tempfile.TemporaryDirectory(prefix=".tmp-canary-") as folder:
        tree, job = Path(folder) / "tree", Path(folder) / "job.json"
        added = subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, capture_output=True)
        if added.returncode:
            return None
        try:
            job.write_text(json.dumps({"probes": probes, "data": _data()}), encoding="utf-8")
            environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
            driver = [sys.executable, str(Path(__file__).with_name("canary_driver.py")), str(job)]
            ran = subprocess.run(driver, env=environment, capture_output=True, text=True, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True, capture_output=True)
    return {CPU: {"tolerance": tolerance(CPU), "figures": json.loads(ran.stdout.splitlines()[-1])}}


def _data() -> dict[str, Any]:
    """Return the generated data as plain numbers, so that an earlier release trains on the same."""
    images, text = generated_images(), generated_text("transformer-")
    splits = {name: getattr(images, name) for name in ("train", "test")}
    pairs = {split: text.pairs(split) for split in text.splits}
    return {
        "images": {name: [split.images.tolist(), split.labels.tolist()] for name, split in splits.items()},
        "pairs": {
            split: [[list(side[i]) for i in range(len(side))] for side in (found.source, found.target)]
            for split, found in pairs.items()
        },
        "vocabulary": text.vocabulary_size,
    }


def _common(records: list[Record]) -> Record:
    """Return the record on which all given ones agree; a probe on which they differ has no figures."""
    first, *others = records
    for place, found in first.items():
        for other in others:
            usable = {probe: figures or () for probe, figures in found["figures"].items()}
            for probe in differing(usable, other[place]["figures"], found["tolerance"]):
                found["figures"][probe] = None
    return first


def _summary(record: Record | str) -> str:
    if isinstance(record, str):
        return record
    today = canary(probes=record[CPU]["figures"])
    found = record[CPU]
    usable = {probe: figures for probe, figures in found["figures"].items() if figures}
    other, missing = differing(usable, today, found["tolerance"]), len(found["figures"]) - len(usable)
    return f"{len(usable)} probes; other than today: {', '.join(other) or 'none'}; not computed: {missing}"


def _lines(record: Record) -> str:
    """Render a record as JSON with one probe per line."""
    places = []
    for place, found in record.items():
        rows = ",\n".join(f"   {json.dumps(probe)}: {json.dumps(row)}" for probe, row in found["figures"].items())
        places.append(f' "{place}": {{"tolerance": {found["tolerance"]}, "figures": {{\n{rows}}}}}')
    return "{\n" + ",\n".join(places) + "\n}"


def main(arguments: Iterable[str] | None = None) -> None:
    """Parse the command line, and write the canaries that it names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", choices=["today", "agreed", "commits"])
    parser.add_argument("files", nargs="*", type=Path, help="of the canaries to compare, for `agreed`")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to compute today's canary")
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        device_of(given.device)
    except ValueError as error:
        parser.error(str(error))
    if given.which == "today":
        write_todays(given.device)
    elif given.which == "agreed":
        write_agreed(given.files)
    else:
        write_commits()


if __name__ == "__main__":
    main()
