"""Score the diagnosis on networks that are broken on purpose, on the same ones without the fault, and on healthy ones.

    export PYTHONPATH=src:tests/support/networks
    python benchmarks/diagnosis.py --json results/benchmarks/diagnosis.json --keep final
    python benchmarks/diagnosis.py --table results/benchmarks/diagnosis.json

The networks are in tests/support/networks (broken_networks.py, healthy_networks.py, and further sets of both). Their
authors had not read the detector, and the authors of later sets had not seen its scores. A further set is two files,
such as broken_networks_third.py with `THIRD`, a list of `Broken`, and healthy_networks_third.py with `HEALTHY_THIRD`,
a list of names, and `build_healthy_third(name)`.
A case is right if the verdict and the recommendation report a fault, name its place and name its cause. An alarm is a
finding or an outlier; *drifting* is none, because it fails only at a larger depth. `--keep` adds a score under a name
and keeps the scores that the file has, so that the first score stays beside later ones.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from broken_networks import REVIEWED, UNSEEN, Broken
from fault_cases import Subject
from healthy_networks import HEALTHY, build_healthy
from normfree.diagnostics import diagnose
from normfree.models.third_party import create_model
from normfree.report import Column, Table, print_table
from normfree.report.tables import to_markdown
from normfree.storage.provenance import commit, versions

create_model("torchvision:squeezenet1_1")  # imports torchvision, which the sets import, also beside a CPU torch
KINDS: dict[str, list[Broken]] = {"reviewed": list(REVIEWED), "unseen": list(UNSEEN)}
SOUND: dict[str, tuple[list[str], Callable[[str], Subject]]] = {"false alarms": (list(HEALTHY), build_healthy)}
for number in (
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
):
    if importlib.util.find_spec(f"broken_networks_{number}"):
        cases = importlib.import_module(f"broken_networks_{number}")
        KINDS[f"{number} set"] = list(getattr(cases, number.upper()))
    if importlib.util.find_spec(f"healthy_networks_{number}"):
        models = importlib.import_module(f"healthy_networks_{number}")
        build = getattr(models, f"build_healthy_{number}")
        SOUND[f"false alarms, {number} set"] = (list(getattr(models, f"HEALTHY_{number.upper()}")), build)
TWINS = "alarms of mended twins"


def report_on(subject: Subject) -> tuple[bool, str, str]:
    """Whether the diagnosis reports a fault, its headline, and its recommendation; an error is a report too."""
    given = {} if subject.loss is None else {"loss": subject.loss}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            verdict = diagnose(subject.model, subject.example, subject.targets, **given).verdict
    except ValueError as error:
        return True, "refused", str(error)
    except RuntimeError as error:  # a traceback tells the user nothing, and counts as a miss
        return False, "error", str(error)
    alarm = bool(verdict.outliers) or any(f.status != "drifting" for f in verdict.findings)
    return alarm, verdict.word, verdict.recommendation


def judge_case(case: Broken) -> dict[str, Any]:
    """Diagnose a broken network, and the same network without the fault."""
    alarm, word, advice = report_on(case.build())
    text = f"{word}. {advice}"
    twin_alarm, twin_word, twin_advice = report_on(case.build(mended=True))
    twin = f"{twin_word}. {twin_advice}"
    return {
        "name": case.name,
        "places": list(case.places),
        "cause": case.cause,
        "word": word,
        "advice": advice,
        "alarm": alarm,
        "place": case.names_place(text),
        "named": case.names_cause(text),
        "right": alarm and case.names_place(text) and case.names_cause(text),
        "mended": twin_word,
        "alarm_when_mended": twin_alarm,
        "same_fault_when_mended": twin_alarm and case.names_place(twin) and case.names_cause(twin),
    }


def judge_healthy(name: str, build: Callable[[str], Subject] = build_healthy) -> dict[str, Any]:
    """Diagnose a healthy network."""
    alarm, word, advice = report_on(build(name))
    return {"name": name, "word": word, "advice": advice if alarm else "", "alarm": alarm}


def measure() -> dict[str, Any]:
    """Run every case."""
    made_with = commit()  # another commit may be made meanwhile
    found: dict[str, Any] = {kind: [judge_case(case) for case in cases] for kind, cases in KINDS.items()}
    twins = [row["alarm_when_mended"] for kind in KINDS for row in found[kind]]
    sound = {kind: [judge_healthy(name, build) for name in names] for kind, (names, build) in SOUND.items()}
    found["healthy"] = [row for rows in sound.values() for row in rows]
    found["score"] = {
        **{kind: [sum(row["right"] for row in found[kind]), len(found[kind])] for kind in KINDS},
        "mended twins with the fault": sum(row["same_fault_when_mended"] for kind in KINDS for row in found[kind]),
        TWINS: [sum(twins), len(twins)],
        **{kind: [sum(row["alarm"] for row in rows), len(rows)] for kind, rows in sound.items()},
    }
    return {"commit": made_with, "versions": versions(), **found}


def tables(scores: dict[str, Any]) -> list[Table]:
    """The scores by set, the broken networks of the review and of the last set, and the alarms on healthy networks."""
    last = scores[list(scores)[-1]]
    newest = [kind for kind in KINDS if kind in last][-1]
    sets = list(dict.fromkeys([*KINDS, *(kind.rpartition(", ")[2] for kind in SOUND if ", " in kind)]))

    def shares(count: str) -> tuple[str, str]:
        """The score of a set in its first run and in the last one."""
        pairs = [pair for s in scores.values() if (pair := s["score"].get(count))]
        if not pairs:
            return "–", "–"
        first, now = (f"{right} of {number}" for right, number in (pairs[0], pairs[-1]))
        return first, now

    def alarms(kind: str) -> str:
        return "false alarms" if kind == "reviewed" else f"false alarms, {kind}"

    by_set = Table(
        "right place and cause, and false alarms",
        (Column("set"), *(Column(c, "right") for c in ("right, first run", "now", "alarms, first run", "now"))),
        (
            *((name, *shares(name), *shares(alarms(name))) for name in sets),
            ("all sets without their faults", "–", "–", *shares(TWINS)),
        ),
    )
    columns = (Column("network"), Column("fault"), Column("verdict"), Column("right", marked=True))
    broken = tuple(
        (row["name"], row["cause"], row["word"], "✓" if row["right"] else "✗")
        for kind in ("reviewed", newest)
        for row in last[kind]
    )
    words = Counter(row["word"].partition(":")[0].partition(",")[0] for row in last["healthy"] if not row["alarm"])
    sound = [(word, str(number), "") for word, number in words.items()]
    sound += [(row["word"], "1", row["name"]) for row in last["healthy"] if row["alarm"]]
    return [
        by_set,
        Table(f"broken networks: reviewed and {newest}", columns, broken),
        Table("healthy networks", (Column("verdict"), Column("number", "right"), Column("false alarm")), tuple(sound)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    parser.add_argument("--keep", default="", help="the name of this score; scores under other names are kept")
    parser.add_argument("--table", type=Path, help="print the tables of a file as Markdown, and measure nothing")
    options = parser.parse_args()
    if options.table:
        scores = json.loads(options.table.read_text(encoding="utf-8"))["scores"]
        print("\n\n".join(map(to_markdown, tables(scores))))
        return
    warnings.filterwarnings("ignore")
    name = options.keep or "last"
    earlier = options.json is not None and options.json.exists()
    before = json.loads(options.json.read_text(encoding="utf-8"))["scores"] if earlier else {}
    scores = {**{key: value for key, value in before.items() if key != name}, name: measure()}
    if options.json:
        record = {"command": shlex.join(["python", "benchmarks/diagnosis.py", *sys.argv[1:]]), "scores": scores}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for table in tables(scores):
        print_table(table)


if __name__ == "__main__":
    main()
