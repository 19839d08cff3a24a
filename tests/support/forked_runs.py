"""Runs of the command line that can be killed: torch is loaded once in a process of its own, and each run is its fork.

As a script it is that process. It reads a request a line, and answers with the number of the forked process and, when
that has ended, with its status.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import normfree
from faulty_calls import Fault, meet

HANGS = 75  # the status of a process that did not end in time
NOTICED, ENDED = 10, 40  # seconds after the end of one rank: the other gets SIGTERM, as from torchrun at once; it hangs


class Runs:
    """Starts runs; each is given a folder for what it prints."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server, self._process = server, 0

    def start(
        self,
        *arguments: str,
        prints: Path,
        errors: Path | None = None,
        die: tuple[str, int] | None = None,
        press: tuple[str, int] | None = None,
        fault: Fault | None = None,
        ranks: bool = False,
    ) -> int:
        """Begin `normfree` with these arguments, and give its process, which leads a process group.

        `die` is a function's name and a call of it, at whose end the process is killed. `press` names one likewise, at
        whose begin the process and its children get SIGINT, as from a terminal. `errors` is the file of stderr, if it
        is not that of `prints`. If the first argument is `module:function`, that function is called with the others
        instead. With `ranks`, two processes are started as torchrun would start them.
        """
        files = {"prints": str(prints), "errors": str(errors or prints)}
        self._tell({"arguments": arguments, **files, "die": die, "press": press, "fault": fault, "ranks": ranks})
        self._process = int(self._hear())
        return self._process

    def wait(self, limit: float | None = None) -> int:
        """The exit status of the run that was started, minus the signal that ended it; HANGS beyond a limit."""
        hangs = limit is not None and not select([self._server.stdout], [], [], limit)[0]
        if hangs:
            os.kill(self._process, signal.SIGKILL)
        status = int(self._hear())
        return HANGS if hangs else status

    def _tell(self, request: object) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()

    def _hear(self) -> str:
        assert self._server.stdout
        return self._server.stdout.readline()


@contextmanager
def forked_runs(preload: Path | None = None, modules: tuple[str, ...] = ()) -> Iterator[Runs]:
    """A process that has loaded everything and waits for requests; `preload` is a library that `Fault` needs.

    It imports `modules`, too, so that its forks need not.
    """
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(Path(normfree.__file__).parents[1]), str(here))),
        "OMP_NUM_THREADS": "1",  # a pool of threads does not survive a fork
        **({"LD_PRELOAD": str(preload)} if preload else {}),
    }
    command = [sys.executable, __file__, *modules]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        try:
            yield Runs(server)
        finally:
            assert server.stdin
            server.stdin.close()


def _die_at(name: str, call: int, *, press: bool = False) -> None:
    """Kill this process when `module:Class.function` returns for the `call`-th time; or press ctrl-C when it begins."""
    from functools import reduce
    from importlib import import_module

    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner = reduce(getattr, owners, import_module(module))
    original, calls = getattr(owner, last), 0

    def dying(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if press and calls == call:
            print("^C", time.monotonic(), file=sys.stderr, flush=True)  # as a terminal shows it
            os.killpg(0, signal.SIGINT)
        result = original(*args, **kwargs)
        if calls == call and not press:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, dying)


def _call(name: str, *arguments: str) -> None:
    """Call `module:function`; an error that users see is one line, as with the command."""
    from importlib import import_module

    module, _, function = name.partition(":")
    try:
        getattr(import_module(module), function)(*arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}")
        raise SystemExit(1) from error


def _run(request: dict[str, Any], rank: str = "") -> int:
    """Run the arguments of a request in this process, with its fault, and return the status."""
    from normfree.cli import main

    if request["die"]:
        _die_at(*request["die"])
    if request["press"]:
        _die_at(*request["press"], press=True)
    fault = request["fault"] and Fault(*request["fault"])
    if fault and (not rank or fault.who == rank):
        meet(fault)
    status, arguments = 0, request["arguments"]
    try:
        _call(*arguments) if ":" in arguments[0] else main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    return status


def _run_ranks(request: dict[str, Any]) -> int:
    """Run the arguments in two processes; return the largest status, or be killed if they were, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    running = []
    for rank in ("0", "1"):
        if (process := os.fork()) == 0:
            os.environ.update({**place, "RANK": rank, "LOCAL_RANK": rank})
            os._exit(_run(request, rank))
        running.append(process)
    statuses, ended, told = [], float("inf"), False
    while running:
        for process in list(running):
            waited = time.monotonic() - ended
            found, status = os.waitpid(process, os.WNOHANG)
            if not found and waited > NOTICED and not told:
                os.kill(process, signal.SIGTERM)
                told = True
            if not found and waited > ENDED:
                os.kill(process, signal.SIGKILL)
            if found or waited > ENDED:
                running.remove(process)
                ended = min(ended, time.monotonic())
                statuses.append(os.waitstatus_to_exitcode(status) if found else HANGS)
        time.sleep(0.005)
    if max(statuses) <= 0 and min(statuses) < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return max(statuses)


def _serve(modules: Sequence[str] = ()) -> None:
    from importlib import import_module

    import torch

    import normfree.cli
    import normfree.comparison.comparison_report
    import normfree.report.terminal
    import normfree.train.data_sources
    import normfree.train.engine.loop
    from tiny_images import tiny_images

    for name in modules:
        import_module(name)
    torch.set_num_threads(1)
    images = tiny_images()
    normfree.train.data_sources.load = lambda name, root: images
    normfree.train.engine.loop.write_curves = lambda *_: None  # it takes longer than such a run
    normfree.comparison.comparison_report.write_plot = lambda _, path, **__: path.write_text("a plot")  # so does this
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            for stream, name in ((1, "prints"), (2, "errors")):
                with open(request[name], "ab") as file:
                    os.dup2(file.fileno(), stream)
            os._exit((_run_ranks if request["ranks"] else _run)(request))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
