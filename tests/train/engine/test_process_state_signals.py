"""A signal becomes a flag, and the handlers are restored."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import normfree
from normfree.train.engine.process_state import Stop

WAITS = """
import sys, time
from normfree.train.engine.process_state import Stop
with Stop() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved", flush=True)
sys.exit(128 + stop.requested)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of the test runner, whatever a test leaves behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nothing_is_requested_without_a_signal() -> None:
    with Stop() as stop:
        pass
    assert stop.requested is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_becomes_a_flag(number: int) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        signal.raise_signal(number)
        assert stop.requested == number
    assert stop.requested == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_interrupt_is_raised_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_first_signal_is_the_one_that_counts() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested == signal.SIGINT
    with Stop():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_restored_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), Stop():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_inner_one_takes_over_and_hands_on_what_it_heard() -> None:
    with Stop() as outer:
        with Stop() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (outer.requested, inner.requested) == (None, signal.SIGTERM)
        assert outer.requested == signal.SIGTERM
        with Stop():
            signal.raise_signal(signal.SIGINT)  # the first of this one
        assert outer.requested == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_thread_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with Stop() as stop:
            seen.extend([signal.getsignal(signal.SIGINT), stop.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_finishes_its_work_first(number: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(number)
        assert child.stdout.read() == b"saved\n"
        assert child.wait() == 128 + number


# Generators


def test_interrupt_ends_at_once_while_nothing_is_to_be_saved() -> None:
    with Stop() as stop:
        stop.at_once = True
        signal.raise_signal(signal.SIGTERM)  # waits
        assert stop.requested == signal.SIGTERM
    with Stop() as stop:
        stop.at_once = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
