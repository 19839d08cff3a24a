"""A Ray cluster of several nodes on this machine, and the processes that belong to it."""

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import normfree

SOURCES = (Path(normfree.__file__).parents[1], Path(__file__).parent)
_MARK = "NORMFREE_TEST_NODES"
_STORE = 80 * 2**20  # bytes of the object store of a node


class Nodes:
    """A head and a second node with one CPU each; further nodes can be added, and the second one killed."""

    def __init__(self, client_port: int | None = None) -> None:
        from ray.cluster_utils import Cluster

        self._mark = uuid.uuid4().hex
        head: dict[str, Any] = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False}
        head |= {} if client_port is None else {"ray_client_server_port": client_port}
        with marked_processes(self._mark):
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._second = self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        with marked_processes(self._mark):
            return self._cluster.add_node(num_cpus=1, object_store_memory=_STORE)

    def kill_second(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)

    def processes(self, name: str = "") -> list[int]:
        """The numbers of all living processes of the cluster, or of those whose title contains a name."""
        return [pid for pid, title in living_processes(self._mark) if name in title]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def started_nodes(client_port: int | None = None) -> Iterator[Nodes]:
    """Start a cluster whose workers find the library and the helpers of the tests."""
    changed = {
        "PYTHONPATH": os.pathsep.join(map(str, (*SOURCES, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))),
        "RAY_AUTH_MODE": "disabled",  # Ray would write a token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in (*changed, "RAY_ADDRESS")}
    os.environ.update(changed)
    os.environ.pop("RAY_ADDRESS", None)
    nodes = Nodes(client_port)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes
    finally:
        nodes.close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until something holds, or fail."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.1)


@contextmanager
def marked_processes(mark: str) -> Iterator[None]:
    """Mark the processes that are started inside, and all that they start, by an environment variable."""
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]


def living_processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and titles of the marked processes that live."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if title:  # a process that has ended, but was not waited for, has none
                        yield int(folder.name), title
            except OSError:  # it ended, or belongs to somebody else
                continue


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "normfree", *arguments]
