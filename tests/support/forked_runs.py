"""Runs of the command line that can be killed: torch is loaded once in a process of its own, and each run is its fork.

As a script it is that process. It reads a request a line, and answers with the number of the forked process and, when
that has ended, with its status.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import normfree
from faulty_calls import Fault, meet


class Runs:
    """Starts runs; each is given a folder for what it prints."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def start(
        self,
        *arguments: str,
        prints: Path,
        errors: Path | None = None,
        die: tuple[str, int] | None = None,
        press: tuple[str, int] | None = None,
        fault: Fault | None = None,
    ) -> int:
        """Begin `normfree` with these arguments, and give its process, which leads a process group.

        `die` is a function's name and a call of it, at whose end the process is killed. `press` names one likewise, at
        whose begin the process and its children get SIGINT, as from a terminal. `errors` is the file of stderr, if it
        is not that of `prints`. If the first argument is `module:function`, that function is called with the others
        instead.
        """
        files = {"prints": str(prints), "errors": str(errors or prints)}
        self._tell({"arguments": arguments, **files, "die": die, "press": press, "fault": fault})
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
def forked_runs(preload: Path | None = None) -> Iterator[Runs]:
    """A process that has loaded everything and waits for requests; `preload` is a library that `Fault` needs."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(Path(normfree.__file__).parents[1]), str(here))),
        "OMP_NUM_THREADS": "1",  # a pool of threads does not survive a fork
        **({"LD_PRELOAD": str(preload)} if preload else {}),
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


def _serve() -> None:
    import torch

    import normfree.comparison.comparison_report
    import normfree.report.progress
    import normfree.train.data
    import normfree.train.engine.loop
    from normfree.cli import main
    from tiny_images import tiny_images

    torch.set_num_threads(1)
    images = tiny_images()
    normfree.train.data.load = lambda name, root: images
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
            if request["die"]:
                _die_at(*request["die"])
            if request["press"]:
                _die_at(*request["press"], press=True)
            if request["fault"]:
                meet(Fault(*request["fault"]))
            status, arguments = 0, request["arguments"]
            try:
                _call(*arguments) if ":" in arguments[0] else main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                status = 70
            sys.stdout.flush()
            os._exit(status)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
