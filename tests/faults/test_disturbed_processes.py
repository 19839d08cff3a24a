"""A work that meets a fault leaves a folder that goes on to the same result, or that is refused by one sentence.

The fault happens at any of the system calls with which the work changes files: it is killed, killed in the middle of a
write, gets an input/output error, finds the disk full from there on, or the power fails (on a disk of its own, which
needs root).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normfree as nf
from faulty_calls import Fault, build_library
from faulty_works import OUT, Arguments, Work, copy_base, make_works
from forked_runs import Runs, forked_runs
from small_disk import can_mount, small_disk

pytestmark = pytest.mark.faults
NAMES = ["training", "resuming", "converting", "saving over an earlier model", "preparing data", "comparing"]
POWER = ("power loss", "power loss after a commit")
DISTURBED = ("killed", "killed in a write", "input/output error", "disk full")
GROWING = ("create", "write", "pwrite", "writev", "mkdir", "link", "symlink", "copy")
MOST = 20  # places of a work at which a kind of fault happens; a kill happens at all


class Stage:
    """Runs works with faults."""

    def __init__(self, runs: Runs, root: Path) -> None:
        self.runs, self.prints, self.log = runs, root / "printed", root / "calls"
        self.works = make_works(runs, root)
        self.calls: dict[str, list[str]] = {}

    def run(self, arguments: Arguments, out: Path, fault: Fault | None = None) -> tuple[int, str]:
        """Run a command line to its end; return its status and what it printed."""
        self.prints.write_text("")
        self.runs.start(*(word.replace(OUT, str(out)) for word in arguments), prints=self.prints, fault=fault)
        return self.runs.wait(), self.prints.read_text(errors="replace")

    def places(self, work: Work, kind: str, room: Path) -> list[int]:
        """The calls at which a kind of fault differs from the others."""
        if work.name not in self.calls:
            copy_base(work, room / "out")
            status, printed = self.run(work.arguments, room / "out", Fault("recorded", str(room), 0, str(self.log)))
            assert status == 0, printed
            self.calls[work.name] = [line.split()[0] for line in self.log.read_text().splitlines()]
        only = {"killed in a write": ("write",), "disk full": GROWING}.get(kind)
        return [number for number, what in enumerate(self.calls[work.name], 1) if only is None or what in only]

    def disturb(self, work: Work, kind: str, room: Path, place: int) -> tuple[int, str]:
        """Let a work meet a fault in an empty folder `room`."""
        copy_base(work, room / "out")
        return self.run(work.arguments, room / "out", Fault(kind, str(room), place, str(self.log)))

    def has_confirmed(self, out: Path) -> bool:
        """Whether the work had saved a checkpoint, and synced it, before the fault."""
        saved = False
        for line in self.log.read_text().splitlines()[:-1]:
            saved |= line.startswith(f"rename {out}/checkpoint-")
            if saved and line == f"fsync {out}":
                return True
        return False

    def outcome(self, work: Work, out: Path, status: int, printed: str) -> str:
        """What became of the folder: whole, refused, lost, accepted or traceback."""
        confirmed = work.base is not None or self.has_confirmed(out)
        if status != -signal.SIGKILL and not is_clean(status, printed):
            return "traceback"
        found = read(work, out)
        if found in ("whole", "accepted", "traceback"):
            return found
        if status == 0:
            return "lost"  # it said that all was well
        for arguments in filter(None, (work.go_on, () if confirmed else work.restart)):
            status, printed = self.run(arguments, out)
            if not is_clean(status, printed):
                return "traceback"
            if status == 0:
                found = read(work, out)
                return found if found != "whole" or arguments == work.go_on else "refused"
        return "lost"


def is_clean(status: int, printed: str) -> bool:
    """Whether a process ended well, or by an error of one line."""
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    return "Traceback" not in printed and (status == 0 or len(errors) == 1)


def read(work: Work, out: Path) -> str:
    """Whether a folder holds what it should; refused, accepted and traceback as for flipped bytes."""
    try:
        return "whole" if work.is_whole(out) else "accepted"
    except (ValueError, OSError) as error:
        return "refused" if "\n" not in str(error) else "traceback"
    except Exception:
        return "traceback"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_library(tmp_path_factory.mktemp("library")) if sys.platform == "linux" else None
    if built is None:
        pytest.skip("needs Linux and a C compiler")
    return built


@pytest.fixture(scope="module")
def stage(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    pytest.importorskip("sentencepiece")
    with pytest.MonkeyPatch.context() as patch, forked_runs(preload=library) as runs:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
        yield Stage(runs, tmp_path_factory.mktemp("stage"))


def chosen(places: list[int], kind: str) -> list[int]:
    """At most MOST of the places, evenly spread; all of them for a kill."""
    if kind == "killed":
        return places
    return [places[i] for i in np.unique(np.linspace(0, len(places) - 1, min(MOST, len(places))).astype(int))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DISTURBED)
@pytest.mark.parametrize("name", NAMES)
def test_disturbed_process_leaves_what_goes_on(
    name: str, kind: str, stage: Stage, tmp_path: Path, count_process: Any
) -> None:
    work, wrong = stage.works[name], []
    for place in chosen(stage.places(work, kind, tmp_path), kind):
        room = tmp_path / str(place)
        room.mkdir()
        status, printed = stage.disturb(work, kind, room, place)
        outcome = stage.outcome(work, room / "out", status, printed)
        count_process(name, kind, outcome)
        if outcome not in ("whole", "refused"):
            wrong.append((place, outcome, stage.log.read_text().splitlines()[-1:], printed[-300:]))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", POWER)
@pytest.mark.parametrize("name", NAMES)
def test_power_loss_leaves_what_goes_on(name: str, kind: str, stage: Stage, tmp_path: Path, count_process: Any) -> None:
    if not can_mount(tmp_path):
        pytest.skip("needs root and a loop device")
    work, wrong = stage.works[name], []
    for place in chosen(stage.places(work, kind, tmp_path), kind):
        with small_disk(tmp_path / str(place)) as disk:
            room, out = disk.path, disk.path / "out"
            copy_base(work, out)
            disk.settle()
            status, printed = stage.run(work.arguments, out, Fault("killed", str(room), place, str(stage.log)))
            if kind == POWER[1]:
                disk.commit()
            disk.lose_power()
            outcome = stage.outcome(work, out, status, printed)
        count_process(name, kind, outcome)
        if outcome not in ("whole", "refused"):
            wrong.append((place, outcome, stage.log.read_text().splitlines()[-1:], printed[-300:]))
    assert not wrong


@pytest.mark.slow
def test_control_of_careless_saves_is_lost(stage: Stage, tmp_path: Path) -> None:
    """The control: a model that is written over file by file is lost by a kill."""
    saving = stage.works["saving over an earlier model"]
    other = stage.run(saving.arguments, tmp_path / "other")
    assert other[0] == 0
    careless = saving._replace(name="control", arguments=("faulty_works:save_carelessly", OUT, str(tmp_path / "other")))
    outcomes = set()
    for place in stage.places(careless, "killed", tmp_path):
        room = tmp_path / str(place)
        room.mkdir()
        status, printed = stage.disturb(careless, "killed", room, place)
        outcomes.add(stage.outcome(careless, room / "out", status, printed))
    assert "lost" in outcomes


@pytest.mark.slow
def test_control_of_power_loss_empties_a_file_that_is_not_synced(tmp_path: Path) -> None:
    """The control: without a sync, the new name is on the disk, and its content is not."""
    if not can_mount(tmp_path):
        pytest.skip("needs root and a loop device")
    with small_disk(tmp_path / "place") as disk:
        for name, synced in (("synced", True), ("unsynced", False)):
            with (disk.path / "new").open("w") as file:
                file.write("content")
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            (disk.path / "new").replace(disk.path / name)
        disk.commit()
        disk.lose_power()
        assert (disk.path / "synced").read_text() == "content"
        assert (disk.path / "unsynced").read_text() == ""


WRITES = """
import json, os, sys
from pathlib import Path
from faulty_calls import KINDS, Fault, meet
from normfree.files import write_text

def contents(write):
    path, found = Path(sys.argv[1], "room", "file"), set()
    for kind in KINDS[1:]:
        for place in range(1, 10):
            path.write_text("old" * 99)
            if (process := os.fork()) == 0:
                meet(Fault(kind, str(path.parent), place, sys.argv[1] + "/calls"))
                try:
                    write(path, "new" * 99)
                except OSError:
                    pass
                os._exit(0)
            os.waitpid(process, 0)
            found.add(path.read_text())
    return sorted(found)

print(json.dumps([contents(write_text), contents(Path.write_text)]))
"""


def test_atomic_write_survives_every_fault(library: Path, tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    here = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": f"{Path(nf.__file__).parents[1]}:{here}", "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", WRITES, tmp_path], env=environment, check=True, capture_output=True, text=True
    )
    atomic, plain = json.loads(done.stdout)
    assert atomic == ["new" * 99, "old" * 99]
    assert {"", ("new" * 99)[: 297 // 2]} <= set(plain)  # the control: a plain write is emptied or torn by them
