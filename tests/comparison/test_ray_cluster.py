"""Runs on a real Ray cluster with two nodes on this machine: the same results, and nothing left behind."""

import faulthandler
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray  # so that this file is left out where ray is not installed

from normfree.comparison import ray_cluster
from normfree.comparison.compare_runs import compare
from normfree.comparison.ray_cluster import RayCluster
from normfree.train import RunFolder, TrainConfig
from normfree.train.engine.process_state import Stop
from ray_nodes import Nodes, command, living_processes, marked_processes, started_nodes, wait_until

BASE = TrainConfig(epochs=1, batch_size=1000, validation=0.5)  # three steps
SMALL: dict[str, Any] = {"methods": ["fixup", "he_in"], "models": ["resmlp-1-8"]}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with started_nodes() as started:
        yield started


def _rows(found: Any) -> list[Any]:
    return [(run.folder, run.status, run.validation, run.test) for run in found.runs]


def _state() -> list[Any]:
    log = logging.getLogger("ray")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return [
        dict(os.environ),
        handlers,
        sys.excepthook,
        faulthandler.is_enabled(),
        list(log.handlers),
        (log.propagate, log.level),
        list(logging.getLogger().handlers),
        ray._private.worker._worker_logs_enabled,
    ]


def test_cluster_trains_what_one_process_trains(nodes: Nodes, tmp_path: Path) -> None:
    state, told = _state(), []
    found = compare(
        BASE, **SMALL, seeds=(0, 1), out=tmp_path / "ray", on="ray", progress=lambda *progress: told.append(progress)
    )
    assert _state() == state
    assert not ray.is_initialized()
    assert _rows(found) == _rows(compare(BASE, **SMALL, seeds=(0, 1), out=tmp_path / "one"))
    assert [told[0][:2], told[-1][:2]] == [(0, 4), (4, 4)]
    assert {path.name for path in (tmp_path / "ray").iterdir()} == {run.folder for run in found.runs}
    before = [(tmp_path / "ray" / run.folder / "result.json").stat() for run in found.runs]
    assert compare(BASE, **SMALL, seeds=(0, 1), out=tmp_path / "ray", on="ray") == found
    assert before == [(tmp_path / "ray" / run.folder / "result.json").stat() for run in found.runs]


def test_missing_gpu_is_named_and_not_waited_for_without_end(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_PATIENCE", 2.0)
    told: list[str] = []
    lack = "a node with 1 CPU and 0.25 GPUs (the cluster's 2 nodes have 1 CPU and no GPU)"
    with pytest.raises(
        ValueError, match=f"expected {re.escape(lack)}, but none came within 2 s; ask for less with --cpus-per"
    ):
        compare(
            BASE,
            **SMALL,
            out=tmp_path,
            on="ray",
            gpus_per_run=0.25,
            progress=lambda done, total, text: told.append(text),
        )
    assert told[-1] == f"fixup, resmlp-1-8, lr 0.1: waits for {lack}"


def _fail(task: str, report: Callable[[str], None]) -> None:
    raise {"value": ValueError, "other": KeyError}[task]("a sentence\n in two lines")


def _count(task: Path, report: Callable[[str], None]) -> int:
    """End this process the first two times; count how often it began."""
    with task.open("a") as file:
        file.write("x")
    if len(task.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def _results(cluster: RayCluster, function: Callable[..., Any], tasks: list[Any]) -> dict[int, Any]:
    with Stop() as stop:
        return dict(cluster.run_tasks(function, tasks, stop=stop, on_report=lambda reports: None))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "says"), [("value", "^a sentence in two lines$"), ("other", "^KeyError: 'a sent")])
def test_error_of_a_run_is_one_sentence(nodes: Nodes, tmp_path: Path, task: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _results(RayCluster("", tmp_path), _fail, [task, task])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.faults
def test_lost_worker_is_retried_until_there_are_too_many(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(_results(RayCluster("", tmp_path), _count, [tmp_path / "one"])) == {0}
    assert (tmp_path / "one").read_text() == "xxx"
    monkeypatch.setattr(ray_cluster, "_RETRIES", 1)
    with pytest.raises(ValueError, match=r"but 2 of them were lost \(WorkerCrashedError: .*; give each run more"):
        _results(RayCluster("", tmp_path), _count, [tmp_path / "two"])
    assert (tmp_path / "two").read_text() == "xx"
    assert capsys.readouterr().out == ""  # Ray would write there that a worker was lost


def test_folder_must_be_shared_with_its_locks(tmp_path: Path) -> None:
    with ray_cluster._shared_proof(tmp_path) as proof:
        ray_cluster._require_shared(proof)  # the lock of another file object, as in another process
        with pytest.raises(ValueError, match=rf"on every node, but node {socket.gethostname()} does not see it"):
            ray_cluster._require_shared(tmp_path / "elsewhere" / proof.name)
    proof.touch()  # as on a node that does not see the locks of others
    with pytest.raises(ValueError, match="expected a file system whose locks hold on all nodes"):
        ray_cluster._require_shared(proof)
    with ray_cluster._shared_proof(tmp_path):
        assert proof.exists()  # its driver may just begin
    os.utime(proof, (0, 0))
    with ray_cluster._shared_proof(tmp_path):
        assert not proof.exists()


def test_nodes_need_the_release_of_the_driver() -> None:
    worker = ray_cluster._Worker(proof="", folder="", modules=(), version="0.0", threads=1)
    with pytest.raises(ValueError, match=r"expected normfree 0\.0 on every node, got .*; install the same release"):
        ray_cluster._require_same_release(worker)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "ray://127.0.0.1:{port}",
            r"expected a Ray cluster at 'ray://127.0.0.1:\d+', but nothing answers there \(Conn",
        ),
        ("127.0.0.1:{port}", r"expected a Ray cluster at '127.0.0.1:\d+', but nothing answers there \(Conn"),
        ("ray://host", "expected the address of a cluster such as ray://HOST:10001, got 'ray://host'"),
        ("ray://host:many", "expected the address of a cluster such as ray://HOST:10001"),
        ("here", "expected the address of a cluster such as HOST:6379, got 'here'"),
    ],
)
def test_cluster_that_does_not_answer_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    address = address.format(port=_free_port())
    is_client = address.startswith("ray:")
    if not is_client:
        monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ValueError, match=says):
        compare(BASE, **SMALL, out=tmp_path, on=address if is_client else "ray")
    assert time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == []


# 300 runs, a killed node and a killed driver

SHORT = ("--set", "epochs=1", "--set", "batch_size=1000", "--set", "validation=0.5")
MANY = ("-m", "fixup", "-m", "he_in", "--model", "resmlp-1-8", "--model", "resmlp-2-8", "--lr", "0.1", "--lr", "0.03",
        "--lr", "0.01", "--seeds", "25", *SHORT)  # fmt: skip


def _ended(out: Path) -> dict[str, tuple[int, int]]:
    """The runs that ended, with the number and time of their result's file."""
    found = {}
    for path in out.glob("*/result.json"):
        stat = path.stat()
        found[path.parent.name] = (stat.st_ino, stat.st_mtime_ns)
    return found


def _start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command("compare", *arguments, "--out", str(out)), **options)  # type: ignore[call-overload]


def _finish(driver: "subprocess.Popen[str]", seconds: float) -> str:
    out, errors = driver.communicate(timeout=seconds)
    assert driver.returncode == 0, errors[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_300_runs_survive_the_death_of_a_node_and_of_the_driver(tmp_path: Path) -> None:
    out = tmp_path / "ray"
    with started_nodes() as nodes:
        driver = _start(out, *MANY, "--on", "ray")
        wait_until(lambda: len(_ended(out)) >= 60, 300, "the end of 60 runs")
        nodes.kill_second()
        at_kill = len(_ended(out))
        nodes.add()
        wait_until(lambda: len(_ended(out)) >= at_kill + 60, 300, "the end of further runs")
        assert driver.poll() is None
        driver.kill()
        driver.communicate()
        wait_until(lambda: not nodes.processes("ray::_run_task"), 30, "the end of the workers of a killed driver")
        before = _ended(out)
        assert len(before) < 300
        printed = _finish(_start(out, *MANY, "--on", "ray"), 600)
        after = _ended(out)
        assert len(after) == 300
        assert before.items() <= after.items()  # no run that had ended was trained again
        wait_until(lambda: not nodes.processes("ray::_"), 30, "the end of the workers")
        everything = nodes.processes()
    assert everything
    wait_until(lambda: not nodes.processes(), 60, "the end of the cluster")
    for folder in after:
        metrics = RunFolder(out / folder).read_metrics()
        assert [record["step"] for record in metrics] == [3]  # trained once
    one = _finish(_start(tmp_path / "one", *MANY, "--jobs", "1"), 600)
    assert _without_times(printed) == _without_times(one)
    stored = [json.loads((place / "comparison.json").read_text()) for place in (out, tmp_path / "one")]
    ends = [[(r["folder"], r["status"], r["validation"], r["test"]) for r in found["runs"]] for found in stored]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 300


def _without_times(table: str) -> list[str]:
    return [re.sub(r"\s+\d+ (s|min \d+ s)$", "", line) for line in table.splitlines() if "─" not in line]


LONG = ("-m", "fixup", "-m", "he_in", "--model", "resmlp-3-8", "--set", "epochs=100000", "--set", "batch_size=1000",
        "--set", "validation=0.5", "--lr", "0.0001")  # fmt: skip


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_the_runs_save_and_leaves_no_process(nodes: Nodes, tmp_path: Path, number: int) -> None:
    driver = _start(tmp_path, *LONG, "--on", "ray")
    wait_until(lambda: len(list(tmp_path.glob("*/metrics.jsonl"))) == 2, 120, "the first epochs")
    driver.send_signal(number)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 128 + number, errors
    assert "stopped; the runs so far are kept" in errors
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert {RunFolder(folder).status for folder in folders} == {"interrupted"}
    wait_until(lambda: not nodes.processes("ray::_"), 30, "the end of the workers")


@pytest.mark.slow
@pytest.mark.faults
def test_own_cluster_of_this_machine_ends_with_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # even if another cluster runs here
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with marked_processes(str(tmp_path)):
        driver = _start(tmp_path, *LONG, "--on", "ray")
    wait_until(lambda: list(tmp_path.glob("*/metrics.jsonl")), 120, "the first epoch")
    running = [pid for pid, title in living_processes(str(tmp_path)) if "ray::_run_task" in title]
    assert running
    driver.kill()
    driver.communicate()
    wait_until(lambda: not {*running} & {pid for pid, _ in living_processes(str(tmp_path))}, 20, "the end of the runs")
    # The agents of Ray look for their node every now and then.
    wait_until(lambda: not list(living_processes(str(tmp_path))), 120, "the end of all processes")


@pytest.mark.slow
def test_client_port_of_a_cluster_takes_the_runs(tmp_path: Path) -> None:
    port = _free_port()
    with started_nodes(client_port=port) as nodes:
        found = compare(BASE, **SMALL, out=tmp_path / "ray", on=f"ray://127.0.0.1:{port}")
        wait_until(lambda: not nodes.processes("ray::_"), 60, "the end of the workers")
    assert _rows(found) == _rows(compare(BASE, **SMALL, out=tmp_path / "one"))
