"""A work that meets a fault leaves a folder that goes on to the same result, or that is refused by one sentence.

The fault happens at any of the system calls with which the work changes or reads files: it is killed, killed in the
middle of a write, gets an input/output error, finds the disk full from there on, or the power fails (on a disk of its
own, which needs root). One of two ranks or workers is killed, at such a call or at a message between ranks. Or the work
is stopped there, while another one writes into its folder, or while its folder is moved.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normfree as nf
from fault_kinds import DISTURBED, HANDS, KINDS, NAMES, POWER, Kind
from faulty_calls import Fault, build_library
from faulty_works import OUT, SAVED, Arguments, Work, copy_base, make_works
from forked_runs import HANGS, Runs, forked_runs
from small_disk import can_mount, small_disk

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
MOST = 10  # places of a work at which a kind of fault happens; a kill of the process itself happens at all
PATIENCE = 100  # seconds after which a process hangs


class Stage:
    """Runs works with faults."""

    def __init__(self, runs: Runs, root: Path) -> None:
        self.runs, self.prints, self.log = runs, root / "printed", root / "calls"
        self.works = make_works(runs, root)
        self.calls: dict[tuple[str, str, str], list[tuple[str, str]]] = {}

    def start(self, work: Work, arguments: Arguments, out: Path, fault: Fault | None = None) -> int:
        """Begin a command line; return its process."""
        self.prints.write_text("")
        words = (word.replace(OUT, str(out)) for word in arguments)
        return self.runs.start(*words, prints=self.prints, fault=fault, ranks=work.ranks)

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return its status and what it printed."""
        return self.runs.wait(PATIENCE), self.prints.read_text(errors="replace")

    def run(self, work: Work, arguments: Arguments, out: Path, fault: Fault | None = None) -> tuple[int, str]:
        """Run a command line to its end; return its status and what it printed."""
        self.start(work, arguments, out, fault)
        return self.wait()

    def fault(self, work: Work, kind: Kind, room: Path, place: int) -> Fault:
        """A fault of a kind in a folder `room`."""
        folder = work.source if kind.calls == "reads" and work.source else room
        return Fault(kind.fault, str(folder), place, str(self.log), kind.calls, kind.who)

    def places(self, work: Work, kind: Kind, room: Path) -> list[int]:
        """The calls at which a kind of fault differs from the others."""
        key = (work.name, kind.calls, kind.who)
        if key not in self.calls:
            copy_base(work, room / "out")
            recorded = self.fault(work, kind._replace(fault="recorded"), room, 0)
            status, printed = self.run(work, work.arguments, room / "out", recorded)
            assert status == 0, printed
            lines = [line.split(maxsplit=2) for line in self.log.read_text().splitlines()]
            self.calls[key] = [(what, thread) for what, thread, _ in lines]
            shutil.rmtree(room / "out")
        found = [
            number
            for number, (what, thread) in enumerate(self.calls[key], 1)
            if (not kind.only or what in kind.only) and not (kind.thread and thread == "main")
        ]
        assert found
        return found

    def disturb(self, work: Work, kind: Kind, room: Path, place: int) -> tuple[int, str]:
        """Let a work meet a fault in an empty folder `room`."""
        copy_base(work, room / "out")
        return self.run(work, work.arguments, room / "out", self.fault(work, kind, room, place))

    def has_confirmed(self, out: Path) -> bool:
        """Whether the work had saved a checkpoint, and synced it, before the fault."""
        saved = False
        for line in self.log.read_text().splitlines()[:-1]:
            what, _, path = line.split(maxsplit=2)
            saved |= what == "rename" and path.startswith(f"{out}{SAVED}")
            if saved and (what, path) == ("fsync", str(out)):
                return True
        return False

    def outcome(self, work: Work, out: Path, status: int, printed: str, *, moved: bool = False) -> str:
        """What became of the folder: whole, refused, lost, accepted, traceback or hang.

        A folder that was moved may be unfinished although the work ended well: it did so at the old place.
        """
        confirmed = work.base is not None or self.has_confirmed(out)
        if (wrong := ended_badly(work, status, printed)) is not None:
            return wrong
        found = read(work, out)
        if found in ("whole", "accepted", "traceback"):
            return found
        if status == 0 and not moved:
            return "lost"  # it said that all was well
        for arguments in filter(None, (work.go_on, () if confirmed else work.restart)):
            status, printed = self.run(work, arguments, out)
            if (wrong := ended_badly(work, status, printed)) is not None:
                return wrong
            if status == 0:
                found = read(work, out)
                return found if found != "whole" or arguments == work.go_on else "refused"
        return "lost"


def ended_badly(work: Work, status: int, printed: str) -> str | None:
    """Return "hang" or "traceback", or None if a process ended well, was killed, or ended by an error of one line."""
    errors = sum(line.startswith("error: ") for line in printed.splitlines())
    if status == HANGS:
        return "hang"
    most = 2 if work.ranks else 1  # a line of each rank: one says what failed, the other that the first one ended
    clean = "Traceback" not in printed and (status in (0, -signal.SIGKILL) or 1 <= errors <= most)
    return None if clean else "traceback"


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
    with pytest.MonkeyPatch.context() as patch, forked_runs(library, ("sharded_saves",)) as runs:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
        yield Stage(runs, tmp_path_factory.mktemp("stage"))


def chosen(places: list[int], kind: str) -> list[int]:
    """At most MOST of the places, evenly spread; all of them for a kill."""
    if kind == "killed":
        return places
    return [places[i] for i in np.unique(np.linspace(0, len(places) - 1, min(MOST, len(places))).astype(int))]


@pytest.fixture
def judge(stage: Stage, count_process: Any) -> Iterator[Callable[..., None]]:
    """Count the outcomes of a work and a kind of fault; at the end, all have to be whole or refused."""
    wrong = []

    def add(work: Work, kind: str, place: int, outcome: str, printed: str) -> None:
        count_process(work.name, kind, outcome)
        if outcome not in ("whole", "refused"):
            wrong.append((place, outcome, stage.log.read_text().splitlines()[-1:], printed[-300:]))

    yield add
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), DISTURBED)
def test_disturbed_process_leaves_what_goes_on(name: str, kind: str, stage: Stage, tmp_path: Path, judge: Any) -> None:
    work = stage.works[name]
    for place in chosen(stage.places(work, KINDS[kind], tmp_path), kind):
        room = tmp_path / str(place)
        room.mkdir()
        status, printed = stage.disturb(work, KINDS[kind], room, place)
        judge(work, kind, place, stage.outcome(work, room / "out", status, printed), printed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POWER)
@pytest.mark.parametrize("name", NAMES)
def test_power_loss_leaves_what_goes_on(name: str, kind: str, stage: Stage, tmp_path: Path, judge: Any) -> None:
    if not can_mount(tmp_path):
        pytest.skip("needs root and a loop device")
    work = stage.works[name]
    for place in chosen(stage.places(work, KINDS["killed"], tmp_path), kind):
        with small_disk(tmp_path / str(place)) as disk:
            out = disk.path / "out"
            copy_base(work, out)
            disk.settle()
            fault = Fault("killed", str(disk.path), place, str(stage.log))
            status, printed = stage.run(work, work.arguments, out, fault)
            if kind == POWER[1]:
                disk.commit()
            disk.lose_power()
            outcome = stage.outcome(work, out, status, printed)
        judge(work, kind, place, outcome, printed)


@pytest.fixture(scope="module")
def other(stage: Stage) -> Iterator[Runs]:
    """Starts runs beside those of the stage."""
    with forked_runs() as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANDS)
@pytest.mark.parametrize("name", NAMES)
def test_folder_in_other_hands_goes_on(
    name: str, kind: str, stage: Stage, other: Runs, tmp_path: Path, judge: Any
) -> None:
    """While a work is stopped at a call, another one writes into its folder, or the folder is moved."""
    work = stage.works[name]
    for place in chosen(stage.places(work, KINDS["stopped"], tmp_path), kind):
        room = tmp_path / str(place)
        out, moved, prints = room / "out", room / "moved", room / "printed"
        room.mkdir()
        copy_base(work, out)
        process = stage.start(work, work.arguments, out, stage.fault(work, KINDS["stopped"], room, place))
        wait_until_stopped(process)
        second = (0, "")
        if kind == "second writer":
            other.start(*(word.replace(OUT, str(out)) for word in work.arguments), prints=prints)
            second = other.wait(PATIENCE), prints.read_text()
        elif out.exists():
            out.rename(moved)
        os.kill(process, signal.SIGCONT)
        status, printed = stage.wait()
        kept_folder = moved if moved.exists() else out
        outcome = ended_badly(work, *second)
        outcome = outcome or stage.outcome(work, kept_folder, status, printed, moved=moved.exists())
        judge(work, kind, place, outcome, printed)


def wait_until_stopped(process: int) -> None:
    """Wait until a process has stopped or ended."""
    state = ""
    while state not in ("T", "Z"):
        time.sleep(0.005)
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return


@pytest.mark.slow
def test_control_of_careless_saves_is_lost(stage: Stage, tmp_path: Path) -> None:
    """The control: a model that is written over file by file is lost by a kill."""
    saving = stage.works["saving over an earlier model"]
    other = stage.run(saving, saving.arguments, tmp_path / "other")
    assert other[0] == 0
    careless = saving._replace(name="control", arguments=("faulty_works:save_carelessly", OUT, str(tmp_path / "other")))
    outcomes = set()
    for place in stage.places(careless, KINDS["killed"], tmp_path):
        room = tmp_path / str(place)
        room.mkdir()
        status, printed = stage.disturb(careless, KINDS["killed"], room, place)
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
from normfree.storage.writing import write_text

def contents(write):
    path, found = Path(sys.argv[1], "room", "file"), set()
    for kind in KINDS[1:5]:
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
