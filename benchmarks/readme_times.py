"""Run the commands of README.md, docs/start.md and docs/guide.md in a fresh clone, and compare their times.

    python benchmarks/readme_times.py
    python benchmarks/readme_times.py "normfree train" "normfree check"

The commands are those with a time: in the first code block of the README, in the tables of commands, and in other code
blocks with a comment that ends in a time. They run in the order printed. Words choose the commands that contain one of
them. Without words, the rows are written to results/benchmarks/readme-times.json, with hardware and versions; with
words, only --json writes a file, which then keeps its rows of the other commands.

A row is wrong if its command fails, or if the measured time is not within a factor of 1.5 of the printed one. "Seconds"
and "minutes" mean at most ten. The exit status is 1 if a row is wrong. Commands that need a GPU or a download are
listed as left out.

The clone uses the packages of this Python, so nothing is installed; with --install, `make setup` installs them first.
Run it on two cores that do nothing else: the file has the load at the start. OMP_NUM_THREADS is not passed on, because
a reader of the README does not set it.
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
SOME = 10.0  # "seconds" and "minutes" promise no more
DOCUMENTS = ("README.md", "docs/start.md", "docs/guide.md")
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

    >>> printed_seconds("2½ minutes, the first time more"), printed_seconds("half a minute"), printed_seconds("minutes")
    ((150.0, True), (30.0, True), (600.0, False))
    """
    found = re.match(r"(?:(half an?|an?|\d*½?) )?(second|minute|hour)s?\b", text)
    if found is None:
        return None
    count, unit = found.groups()
    if count is None:
        return SOME * UNITS[unit], False
    words = {"half a": 0.5, "half an": 0.5, "a": 1.0, "an": 1.0}
    number = words[count] if count in words else float(count.rstrip("½") or 0) + (0.5 if count.endswith("½") else 0.0)
    return number * UNITS[unit], True


def documents() -> str:
    """Return the text of all documents whose commands have times."""
    return "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)


def commands(text: str) -> list[Timed]:
    """Return the commands with times in the order printed, each once.

    Raises:
        ValueError: If a command has a time that cannot be read, or two different ones.
    """
    parts = re.finditer(rf"^ *```(\w*)\n(.*?)^ *```|^{re.escape(HEADER)}\n[^\n]*\n((?:\|[^\n]*\n)+)", text, re.S | re.M)
    found: dict[str, Timed] = {}
    for number, part in enumerate(parts):
        language, block, rows = part.groups()
        if rows is None:
            of_part = [] if language else _of_block(block, every=number == 0)
        else:
            of_part = [one for row in rows.splitlines() for one in _of_row(row)]
        for one in of_part:
            seconds = printed_seconds(one.printed)
            if not one.left_out and not one.until_interrupted and seconds is None:
                raise ValueError(f"expected a time such as '5 seconds' beside '{one.command}', got {one.printed!r}")
            if seconds != printed_seconds(found.setdefault(one.command, one).printed):
                other = found[one.command].printed
                raise ValueError(f"expected one time for '{one.command}', got {other!r} and {one.printed!r}")
    return list(found.values())


def _of_block(block: str, *, every: bool) -> list[Timed]:
    """Return the commands of a code block whose comment ends in a time; with `every`, all but the untimed ones."""
    found = []
    for line in block.splitlines():
        command, _, comment = (cell.strip() for cell in line.partition(" #"))
        printed = comment if every else comment.rpartition(";")[2].strip()
        if not command.startswith(UNTIMED) and (every or printed_seconds(printed)):
            found.append(Timed(command, printed))
    return found


def _of_row(row: str) -> list[Timed]:
    """Return the commands of a row of a table of commands."""
    command, does, printed, gpu = (cell.strip() for cell in row.strip("|").split(" | "))
    command = command.strip("` ")
    why = next((reason for start, reason in LEFT_OUT.items() if command.startswith(start)), "")
    why = "a GPU" if gpu.startswith("yes") else why
    first, _, again = printed.partition("; with ")
    found = [Timed(command, first, why)]
    found += [Timed(other, first, why) for other in re.findall(r"`(normfree [^`]*)`", does)]
    if option := re.match(r"`(.*?)` (.*)", again):
        found.append(Timed(f"{command} {option[1]}", option[2], why))
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
    return Table(f"The commands of {', '.join(DOCUMENTS)}", columns, tuple(lines))


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
    parser.add_argument(
        "--json", type=Path, help="write the rows to this file (default: the stored one, without words)"
    )
    parser.add_argument("--install", action="store_true", help="install into the clone with make setup")
    options = parser.parse_args()
    listed = commands(documents())
    chosen = [one for one in listed if not options.words or any(word in one.command for word in options.words)]
    if not chosen:
        parser.error(f"expected a part of a command of {', '.join(DOCUMENTS)}, got {', '.join(options.words)}")
    if not options.words and options.json is None:
        options.json = STORED
    kept: dict[str, Any] = {}
    if options.words and options.json and options.json.exists():
        kept = {row["command"]: row for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]}
    os.environ.pop("OMP_NUM_THREADS", None)  # before torch is imported: the hardware names its threads
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
