"""Run the commands of README.md and docs/guide.md in a fresh clone, and compare their times with the printed ones.

    python benchmarks/readme_times.py --json results/benchmarks/readme-times.json
    python benchmarks/readme_times.py "normfree train" "normfree check"

The commands are those of the first code block of the README, and those of the tables of commands with times in both
documents, in the order printed. Words choose the commands that
contain one of them; the file then keeps its rows of the others. A row is wrong if its command fails, or if the measured
time is not within a factor of 1.5 of the printed one. "Seconds" means at most ten. The exit status is 1 if a row is
wrong. Commands for a GPU, a download or a text that you prepared are listed as left out.

The clone uses the packages of this Python, so nothing is installed; with --install, `make setup` installs them first.
Run it on two cores that do nothing else: the file has the load at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normfree.report import Column, Table, print_table
from normfree.report.terminal import progress
from normfree.storage.provenance import origin
from normfree.storage.writing import write_json

ROOT = Path(__file__).parents[1]
STORED = ROOT / "results" / "benchmarks" / "readme-times.json"
FACTOR = 1.5
SOME_SECONDS = 10.0  # "seconds" promises no more
WATCHED = 10.0  # seconds until the ctrl-C of a command that runs until then
UNITS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
LEFT_OUT = {"normfree data get": "a download"}
HEADER = "| command | what it does | time on two cores | GPU |"
UNTIMED = ("git clone", "source")
JUDGES = "normfree reproduce"  # its status 1 says that the claim fails, as robust/fig2 does


@dataclass(frozen=True)
class Timed:
    """A command of a document.

    Attributes:
        command: The command as printed.
        printed: Its time as printed.
        left_out: Why it is not run; empty if it is.
    """

    command: str
    printed: str
    left_out: str = ""

    @property
    def until_interrupted(self) -> bool:
        return "ctrl-C" in self.printed


def printed_seconds(text: str) -> tuple[float, bool] | None:
    """Return a printed time in seconds, and whether it is one number and no bound; None if there is none.

    >>> printed_seconds("2½ minutes, the first time more"), printed_seconds("half a minute"), printed_seconds("seconds")
    ((150.0, True), (30.0, True), (10.0, False))
    """
    found = re.match(r"(?:(half an?|an?|\d*½?) )?(second|minute|hour)s?\b", text)
    if found is None:
        return None
    count, unit = found.groups()
    if count is None:
        return SOME_SECONDS, False
    words = {"half a": 0.5, "half an": 0.5, "a": 1.0, "an": 1.0}
    number = words[count] if count in words else float(count.rstrip("½") or 0) + (0.5 if count.endswith("½") else 0.0)
    return number * UNITS[unit], True


def documents() -> str:
    """Return the text of README.md and docs/guide.md."""
    return "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/guide.md"))


def commands(text: str) -> list[Timed]:
    """Return the commands of the first code block and of the tables in the order printed, with their times.

    Raises:
        ValueError: If a command has a time that cannot be read.
    """
    block = re.search(r"^```\n(.*?)^```", text, re.S | re.M)
    found = []
    for line in block.group(1).splitlines() if block else ():
        command, _, printed = line.partition("#")
        if not command.startswith(UNTIMED):
            found.append(Timed(command.strip(), printed.strip()))
    for row in (row for table in text.split(HEADER)[1:] for row in table.partition("\n\n")[0].splitlines()[2:]):
        command, does, printed, gpu = (cell.strip() for cell in row.strip("|").split(" | "))
        command = command.strip("` ")
        why = next((reason for start, reason in LEFT_OUT.items() if command.startswith(start)), "")
        why = "a GPU" if gpu.startswith("yes") else why
        first, _, again = printed.partition("; with ")
        found.append(Timed(command, first, why))
        found += [Timed(other, first, why) for other in re.findall(r"`(normfree [^`]*)`", does)]
        if option := re.match(r"`(.*?)` (.*)", again):
            found.append(Timed(f"{command} {option[1]}", option[2], why))
    for one in found:
        if not one.left_out and not one.until_interrupted and printed_seconds(one.printed) is None:
            raise ValueError(f"expected a time such as '5 seconds' beside '{one.command}', got {one.printed!r}")
    return found


def fresh_clone(folder: Path, *, install: bool = False) -> Path:
    """Clone the repository; `.venv` of the clone is made by `make setup`, or calls the Python that runs this."""
    clone = folder / "normfree"
    subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
    if install:
        subprocess.run(["make", "setup"], cwd=clone, check=True)
        return clone
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = f"PYTHONPATH={shlex.quote(str(clone / 'src'))} exec {shlex.quote(sys.executable)}"
    for name, module in (("python", ""), ("normfree", "-m normfree ")):
        (programs / name).write_text(f'#!/bin/sh\n{python} {module}"$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    (clone / ".venv" / ".setup-done").write_text(f"{clone}\n", encoding="utf-8")  # as `make setup` leaves it
    return clone


def run(one: Timed, clone: Path) -> dict[str, Any]:
    """Run a command in the clone, and return its row."""
    row: dict[str, Any] = {**asdict(one), "seconds": None, "ratio": None, "status": None, "output": ""}
    if one.left_out:
        return row
    environment = {**os.environ, "PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {one.command}"],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        if one.until_interrupted:
            time.sleep(WATCHED)
            if process.poll() is None:  # without a terminal, `watch` prints once and ends by itself
                process.send_signal(signal.SIGINT)
            row["status"] = 0 if process.wait(60) in (0, 130) else process.returncode
        else:
            status = process.wait()
            row["status"] = 0 if status == 1 and one.command.startswith(JUDGES) else status
            row["seconds"] = round(time.perf_counter() - began, 2)
            expected = printed_seconds(one.printed)
            row["ratio"] = round(row["seconds"] / expected[0], 3) if expected else None
        said.seek(0)
        row["output"] = said.read()[-2000:] if row["status"] else ""
    return row


def wrong(row: dict[str, Any]) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    if row["left_out"]:
        return ""
    if row["status"]:
        return f"status {row['status']}"
    expected = printed_seconds(row["printed"])
    if row["ratio"] is None or expected is None:
        return ""
    if row["ratio"] > FACTOR:
        return "slower than printed"
    return "faster than printed" if expected[1] and row["ratio"] < 1 / FACTOR else ""


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    columns = (
        Column("command"), Column("printed"), Column("measured", "right"), Column("ratio", "right"), Column("")
    )  # fmt: skip
    lines = [
        (
            row["command"],
            row["printed"],
            "" if row["seconds"] is None else f"{row['seconds']:.1f} s",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"left out: needs {row['left_out']}" if row["left_out"] else wrong(row),
        )
        for row in rows
    ]
    return Table("The commands of README.md and docs/guide.md", columns, tuple(lines))


def measure(chosen: Sequence[Timed], clone: Path) -> list[dict[str, Any]]:
    """Run the commands in order, and return their rows."""
    rows = []
    with progress("README") as update:
        for number, one in enumerate(chosen):
            update(number, len(chosen), one.command)
            rows.append(run(one, clone))
    return rows


def main() -> int:
    """Run the commands, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only the commands that contain one of these")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--install", action="store_true", help="install into the clone with make setup")
    options = parser.parse_args()
    listed = commands(documents())
    chosen = [one for one in listed if not options.words or any(word in one.command for word in options.words)]
    if not chosen:
        parser.error(f"expected a part of a command of the README or the guide, got {', '.join(options.words)}")
    kept: dict[str, Any] = {}
    if options.words and options.json and options.json.exists():
        kept = {row["command"]: row for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]}
    stored = {**origin(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(chosen, fresh_clone(Path(folder), install=options.install))
    print_table(table(rows))
    for row in rows:
        if said := row.pop("output"):
            print(f"\n{row['command']}: status {row['status']}\n{said}")
    if options.json:
        kept |= {row["command"]: row for row in rows}
        printed_rows = [kept[one.command] for one in listed if one.command in kept]
        command = shlex.join(["python", "benchmarks/readme_times.py", *sys.argv[1:]])
        write_json(options.json, {"command": command, **stored, "rows": printed_rows})
    return int(any(wrong(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
