"""Times and shares as text, and progress: a bar on a terminal, lines elsewhere; short work shows none."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import normfree
from normfree.report import open_console
from normfree.report import terminal as module
from normfree.report.terminal import duration, metrics_text, percent, progress


def test_duration_has_the_two_largest_units() -> None:
    assert [duration(s) for s in (0.4, 59.6, 61, 3599, 7260)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 1 min",
    ]


def test_percent_writes_spread_and_digits() -> None:
    assert percent(0.8351, 0.0123) == "83.5 ± 1.2 %"
    assert percent(0.8351, digits=2) == "83.51 %"
    assert percent(None) == ""


@pytest.mark.parametrize("plain", ["", "1"])
def test_a_name_between_colons_is_no_picture(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", plain)
    open_console().print("my_package.models:ok: linear")
    assert capsys.readouterr().out == "my_package.models:ok: linear\n"


@pytest.mark.parametrize("plain", ["", "1"])
def test_square_brackets_are_text(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", plain)
    open_console().print("run: pip install '.[plots]'", style="dim")
    assert capsys.readouterr().out == "run: pip install '.[plots]'\n"


@pytest.fixture(autouse=True)
def no_progress_lines() -> None:
    """Lines come as they do for users."""


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 80 columns gets."""
    out = io.StringIO()
    made = Console(file=out, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    monkeypatch.setattr(module, "open_console", lambda stderr: made)
    return out


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    return captured.err.splitlines()


def test_lines_tell_count_time_left_and_numbers(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("resnet20", 100) as update:
        for done in (10, 20, 50):
            clock.now += 2
            update(done, 100, metrics_text(loss=1.5, accuracy=0.25, throughput=1234.5))
    says = "loss 1.5, accuracy 25.0 %, 1,234 images/s"
    assert lines(capsys) == [
        f"resnet20: 10 of 100 done after 2 s, 18 s left, {says}",
        f"resnet20: 20 of 100 done after 4 s, 16 s left, {says}",
        f"resnet20: 50 of 100 done after 6 s, 6 s left, {says}",
        "resnet20: ended after 6 s",
    ]


def test_lines_whose_texts_tell_the_time_left_have_no_second_estimate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("runs", 4, estimate=False) as update:
        clock.now += 2
        update(2, 4, "about 9 s left")
    assert lines(capsys)[0] == "runs: 2 of 4 done after 2 s, about 9 s left"


def test_bar_whose_texts_tell_the_time_left_has_no_second_estimate(terminal: io.StringIO) -> None:
    with progress("runs", 4) as update:
        update(2, 4, "now")
    assert "-:--:--" in terminal.getvalue()  # the control: the time left, which is not known yet
    terminal.truncate(0)
    with progress("runs", 4, estimate=False) as update:
        update(2, 4, "now")
    assert "-:--:--" not in terminal.getvalue()


def test_lines_come_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 1000, every=5.0) as update:
        for done in range(1000):
            clock.now += 0.01
            update(done)
    printed = ["work: 499 of 1000", "work: 999 of 1000", "work: ended after 10 s"]
    assert [line.split(" done")[0] for line in lines(capsys)] == printed


def test_short_work_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 10) as update:
        for done in range(10):
            clock.now += 0.1
            update(done)
    assert lines(capsys) == []


def test_resumed_steps_do_not_count_for_the_speed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 1000, done=900) as update:
        clock.now += 10
        update(910, 1000)
    assert "910 of 1000 done after 10 s, 1 min 30 s left" in lines(capsys)[0]


def test_slow_start_is_forgotten(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 1000) as update:
        clock.now += 600  # compiling
        for done in range(1, 101):
            clock.now += 2
            update(done)
    printed = re.search(r"(\d+) of 1000 done .* s, (.*) left", lines(capsys)[-2])
    assert printed is not None
    assert int(printed[1]) > 80
    assert printed[2] == duration(2 * (1000 - int(printed[1])))  # at 2 s a step, though the mean is 8 s


def test_long_log_stays_short_and_knows_the_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Work of ten parts, each of three minutes, that is heard of twice a second."""
    with progress("runs", 10) as update:
        for beat in range(3600):
            clock.now += 0.5
            update(beat // 360, 10, f"beat {beat}")
    printed = lines(capsys)
    assert 50 < len(printed) < 120
    assert printed[-2].startswith("runs: 9 of 10 done")
    left = [line for line in printed if "left" in line]
    assert len(left) > len(printed) / 2
    assert re.search(r"9 of 10 done after 29 min \d+ s, \d+ s left, beat", left[-1])  # it counts down, not up


def test_total_may_be_unknown_or_change(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work") as update:
        clock.now += 2
        update(1)
        clock.now += 2
        update(2, 4, "[bold]now[/bold]")
        clock.now += 2
        update(9, 4)
    assert lines(capsys) == [
        "work: 1 done after 2 s",
        "work: 2 of 4 done after 4 s, 4 s left, [bold]now[/bold]",
        "work: 9 of 4 done after 6 s",
        "work: ended after 6 s",
    ]


def test_work_without_steps_tells_its_end_only(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("diagnosing he_in"):
        clock.now += 75
    assert lines(capsys) == ["diagnosing he_in: ended after 1 min 15 s"]


def test_failed_work_is_not_done(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress("work"):
            clock.now += 75
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert lines(capsys) == []


def test_hidden_progress_says_nothing(clock: Clock, terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 2, show=False) as update:
        clock.now += 10
        update(1, 2, "now")
    assert lines(capsys) == []
    assert terminal.getvalue() == ""


def test_terminal_gets_a_bar_that_is_gone_afterwards(terminal: io.StringIO) -> None:
    with progress("resnet20 [x]", 100) as update:
        update(50, 100, metrics_text(loss=1.5, accuracy=0.25, throughput=1234.0))
    text = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", terminal.getvalue())
    for part in ("resnet20 [x]", "━━━━━", "50/100", "loss 1.5, accuracy 25.0 %", "images/s"):
        assert part in text
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_numbers_leave_out_what_is_not_known() -> None:
    assert metrics_text() == ""
    assert metrics_text(accuracy=1.0) == "accuracy 100.0 %"
    assert metrics_text(loss=float("nan"), throughput=5.0) == "loss nan, 5 images/s"


def test_import_leaves_rich_alone() -> None:
    modules = "normfree.report.terminal, normfree.report.plots"
    code = f"import sys, {modules}; sys.exit(bool({{'rich', 'matplotlib'}} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_long_silence_in_a_pipe_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with module.notice("building takes a while"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    with module.notice("building takes a while"):
        time.sleep(0.5)
    assert capsys.readouterr() == ("", "building takes a while\n")
