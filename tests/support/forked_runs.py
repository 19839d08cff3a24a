"""Runs of the command line that can be killed: torch is loaded once in a process of its own, and each run is its fork.

As a script it is that process. It reads a request a line, and answers with the number of the forked process and, when
that has ended, with its status.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import normfree


class Runs:
    """Starts runs; each is given a folder for what it prints."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def start(self, *arguments: str, prints: Path, die: tuple[str, int] | None = None) -> int:
        """Begin `normfree` with these arguments, and give its process; `die` is a function's name and a call of it."""
        self._tell({"arguments": arguments, "prints": str(prints), "die": die})
        return int(self._hear())

    def wait(self) -> int:
        """The exit status of the run that was started, minus the signal that ended it."""
        return int(self._hear())

    def _tell(self, request: object) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()

    def _hear(self) -> str:
        assert self._server.stdout
        return self._server.stdout.readline()


@contextmanager
def forked_runs() -> Iterator[Runs]:
    """A process that has loaded everything and waits for requests."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(Path(normfree.__file__).parents[1]), str(here))),
        "OMP_NUM_THREADS": "1",  # a pool of threads does not survive a fork
    }
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        try:
            yield Runs(server)
        finally:
            assert server.stdin
            server.stdin.close()


def _die_at(name: str, call: int) -> None:
    """Kill this process when `module:Class.function` returns for the `call`-th time."""
    from functools import reduce
    from importlib import import_module

    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner = reduce(getattr, owners, import_module(module))
    original, calls = getattr(owner, last), 0

    def dying(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, dying)


def _serve() -> None:
    import torch

    import normfree.report.progress
    import normfree.train.data
    import normfree.train.engine.loop
    from normfree.cli import main
    from tiny_images import tiny_images

    torch.set_num_threads(1)
    images = tiny_images()
    normfree.train.data.load = lambda name, root: images
    normfree.train.engine.loop.write_curves = lambda *_: None  # it takes longer than such a run
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            with open(request["prints"], "ab") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            if request["die"]:
                _die_at(*request["die"])
            status = 0
            try:
                main(request["arguments"])
            except SystemExit as end:
                status = int(end.code or 0)
            sys.stdout.flush()
            os._exit(status)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
