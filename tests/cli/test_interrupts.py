"""Ctrl-C in every phase of every verb: it ends the command at once and quietly, and the work can go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import normfree
import normfree as nf
from compared_runs import differences
from faulty_works import write_images
from forked_runs import Runs, forked_runs
from tiny_text import SIZE, write_pairs

LIMIT = 10  # seconds until a command has ended
INTERRUPTED = 128 + signal.SIGINT
STEP = "normfree.train.engine.step:TrainStep.__call__"
SAVE = "normfree.train.engine.loop:checkpoint.save"
SCORE = "normfree.train.engine.setup:TrainSetup.score"
POOL = "normfree.comparison.run_executor"
slow = pytest.mark.slow

# Where ctrl-C is pressed in a run of training: the function at whose call, whether the run has begun by then, and
# the exit status. A run that is already tested is finished.
TRAINING = [
    pytest.param("normfree.train.data_sources:load", 1, False, INTERRUPTED, id="reading the data", marks=slow),
    pytest.param(
        "normfree.train.engine.loop:RunFolder.write_config", 1, False, INTERRUPTED, id="beginning", marks=slow
    ),
    pytest.param("normfree.train.engine.setup:parameter_groups", 1, False, INTERRUPTED, id="building", marks=slow),
    pytest.param(STEP, 1, True, INTERRUPTED, id="first step"),
    pytest.param(STEP, 2, True, INTERRUPTED, id="second step", marks=slow),
    pytest.param(STEP, 6, True, INTERRUPTED, id="later step", marks=slow),
    pytest.param(SAVE, 1, True, INTERRUPTED, id="saving"),
    pytest.param(SAVE, 2, True, INTERRUPTED, id="saving the end", marks=slow),
    pytest.param(SCORE, 1, True, INTERRUPTED, id="validating", marks=slow),
    pytest.param(SCORE, 2, True, INTERRUPTED, id="validating the end", marks=slow),
    pytest.param(SCORE, 3, True, INTERRUPTED, id="testing", marks=slow),
    pytest.param("normfree.train.engine.loop:write_curves", 1, True, 0, id="drawing", marks=slow),
]
PAIRS = ("--source", "{pairs}.de", "--target", "{pairs}.en")
SETTINGS = ("--set", "epochs=1", "--set", "batch_size=16", "--set", "device=cpu")
VERBS = {
    "convert": ("convert", "normed_blocks:network", "--input", "8", "--batch", "6", "--out", "{out}"),
    "diagnose": ("diagnose", "resmlp-2-8", "--input", "8", "--out", "{out}.html"),
    "lr": ("lr", "resmlp-2-8", "--input", "8", "--batches", "2", "--out", "{out}.png"),
    "data get": ("data", "get", "fashion14", "--data-dir", "{out}"),
    "data prepare": ("data", "prepare", *PAIRS, "--vocabulary", str(SIZE), "--out", "{out}"),
    "compare": ("compare", "-m", "fixup", "--model", "resmlp-2-8", "--jobs", "1", *SETTINGS, "--out", "{out}"),
    "reproduce": ("reproduce", "normdead/eq3", "--quick", "--again", "--out", "{out}"),
}
PHASES = [
    pytest.param("convert", "normfree.conversion:convert", 1, id="convert: converting", marks=slow),
    pytest.param("convert", "normfree.diagnostics:diagnose", 2, id="convert: measuring", marks=slow),
    pytest.param("convert", "normfree.conversion.saving:save_converted", 1, id="convert: saving"),
    pytest.param("convert", "normfree.diagnostics.diagnosis:save", 1, id="convert: drawing", marks=slow),
    pytest.param("diagnose", "normfree.diagnostics.diagnosis:save", 1, id="diagnose: drawing", marks=slow),
    pytest.param("diagnose", "normfree.models.example_inputs:build_by_name", 1, id="diagnose: building", marks=slow),
    pytest.param("lr", "normfree.optim.rate_search:find_lr", 1, id="lr: searching", marks=slow),
    pytest.param("data get", "normfree.data:get", 1, id="data get: fetching", marks=slow),
    pytest.param(
        "data prepare", "normfree.data.text.prepared_folder:write_bytes", 2, id="data prepare: writing", marks=slow
    ),
    pytest.param("compare", "normfree.comparison.compare_runs:open_data", 1, id="compare: reading data", marks=slow),
    pytest.param("compare", STEP, 2, id="compare: training", marks=slow),
    pytest.param("compare", SCORE, 1, id="compare: scoring", marks=slow),
    pytest.param("compare", "normfree.comparison.comparison_report:write_plot", 1, id="compare: drawing", marks=slow),
    pytest.param("reproduce", "normfree_papers.claims.command:reproduce", 1, id="reproduce: measuring", marks=slow),
    pytest.param(
        "reproduce", "normfree_papers.claims.reproduction:write_sealed_json", 1, id="reproduce: saving", marks=slow
    ),
]


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with forked_runs() as started:
        yield started


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    settings = nf.TrainConfig(model="resmlp-2-8", epochs=2, batch_size=16, device="cpu", workers=0)
    path.write_text(settings.to_toml())
    return path


@pytest.fixture(scope="module")
def trained(runs: Runs, configuration: Path) -> Path:
    """A run that nothing disturbed."""
    folder = configuration.parent / "trained"
    assert command(runs, folder.parent, "train", "--config", str(configuration), "--out", str(folder)).status == 0
    return folder


def command(runs: Runs, prints: Path, *arguments: str, press: tuple[str, int] | None = None) -> Ended:
    """Run the command line to its end; no process of it may be left, and ctrl-C must end it soon.

    Of stderr, the answer has the part after ctrl-C.
    """
    out, err = prints / "prints", prints / "errors"
    for path in (out, err):
        path.unlink(missing_ok=True)
    process = runs.start(*arguments, prints=out, errors=err, press=press)
    status = runs.wait()
    ended = time.monotonic()
    said, _, rest = err.read_text().partition("^C ")
    if press is not None:
        pressed, _, said = rest.partition("\n")
        assert ended - float(pressed) < LIMIT
    while is_group(process):  # Python's own helper process ends shortly after its parent
        assert time.monotonic() - ended < 1
        time.sleep(0.01)
    return Ended(status, out.read_text(), said)


def is_group(leader: int) -> bool:
    """Whether a process of a group runs; one that has ended and that nobody waits for does not count."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(group == str(leader) and state[0] != "Z" for group, state in map(str.split, listed.splitlines()))


def require_quiet(ended: Ended, status: int = INTERRUPTED) -> None:
    assert ended.status == status, ended
    assert "Traceback" not in ended.out + ended.err
    said = [line for line in ended.err.splitlines() if " after " not in line]  # without the progress, as in a file
    assert len(said) <= 1, ended.err


@pytest.mark.parametrize(("name", "call", "begun", "status"), TRAINING)
def test_training_stops_and_resumes(
    runs: Runs, configuration: Path, trained: Path, tmp_path: Path, name: str, call: int, begun: bool, status: int
) -> None:
    out = tmp_path / "run"
    train = ("train", "--config", str(configuration), "--out", str(out))
    ended = command(runs, tmp_path, *train, press=(name, call))
    require_quiet(ended, status)
    assert ("stopped by SIGINT; continue with: normfree train --resume" in ended.out) == (begun and status != 0)
    again = ("train", "--resume", str(out)) if begun else train
    assert command(runs, tmp_path, *again).status == 0
    assert not differences(trained, out)


@pytest.mark.parametrize(("verb", "name", "call"), PHASES)
def test_verb_stops_and_can_be_repeated(runs: Runs, tmp_path: Path, verb: str, name: str, call: int) -> None:
    arguments = [word.replace("{out}", str(tmp_path / "out")) for word in VERBS[verb]]
    if verb == "data prepare":
        (tmp_path / "pairs").mkdir()
        source, target = write_pairs(tmp_path / "pairs")["train"]
        named = {"{pairs}.de": str(source), "{pairs}.en": str(target)}
        arguments = [named.get(word, word) for word in arguments]
    require_quiet(command(runs, tmp_path, *arguments, press=(name, call)))
    assert not list(tmp_path.glob(".tmp-*"))
    ended = command(runs, tmp_path, *arguments)
    assert ended.status == 0, ended


@slow
def test_comparison_with_workers_stops_and_goes_on(runs: Runs, tmp_path: Path) -> None:
    # Images of a folder, because spawned workers do not have the small set of the process that starts them.
    images = write_images(tmp_path / "images", train=200)
    compare = ("compare", "-m", "fixup", "-m", "batchnorm", "--model", "resmlp-2-8", "--jobs", "2", "--lr", "1e-6")
    compare += ("--set", f"data=folder:{images}", "--set", "epochs=3", "--set", "batch_size=4", "--set", "device=cpu")
    compare += ("--out", str(tmp_path / "out"))
    for name, call in ((f"{POOL}:_deferring_sigint", 1), (f"{POOL}:_send_next", 2), (f"{POOL}:_receive", 1)):
        require_quiet(command(runs, tmp_path, *compare, press=(name, call)))
    assert command(runs, tmp_path, *compare).status == 0
    assert (tmp_path / "out" / "comparison.html").exists()


PRESS = """
import atexit, os, runpy, signal, sys

class Press:
    count = 0
    def find_spec(self, name, *_):
        self.count += name == "normfree.cli.verbs" or self.count > 0
        if self.count == {number}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
if {at_exit}:
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
runpy.run_module("normfree", run_name="__main__")
"""


def press_in_a_new_process(*arguments: str, number: int = -1, at_exit: bool = False) -> Ended:
    """Run the command line in a new process, with ctrl-C at an import by its number, or when the process ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    code = PRESS.format(number=number, at_exit=at_exit)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@slow
@pytest.mark.parametrize("number", [1, 3, 10, 30, 100, 200, 300, 500, 700, 900, 1100, 1300])
def test_imports_stop(number: int) -> None:
    assert press_in_a_new_process("diagnose", "resmlp-2-8", "--input", "8", number=number) == (INTERRUPTED, "", "")


def test_a_process_that_ends_stops_without_a_traceback() -> None:
    ended = press_in_a_new_process("--version", at_exit=True)
    assert ended == (-signal.SIGINT, f"normfree {normfree.__version__}\n", "")
