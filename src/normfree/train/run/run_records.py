"""The records of a run, read without torch: its metrics, its result, and its state.

Files may be damaged or forged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from normfree.storage.reading import (
    check_sealed_text,
    from_json_values,
    has_kinds,
    parse_json,
    read_limited,
    read_sealed_json,
    require_regular,
)
from normfree.train.run.result import RunStatus

# The files in the folder of a run.
CONFIG, METRICS, RESULT, PROGRESS, LOCK = "config.toml", "metrics.jsonl", "result.json", "progress.json", "lock"
PAGE, SIGNAL = "page.html", "signal.jsonl"
_END = 1 << 16  # bytes at the end of the metrics in which the last record is looked for; a record has a few hundred
# The kinds of the values that are read from a result, which may be forged; a number may be "nan".
_KINDS: dict[str, Any] = {"status": str, "seconds": int | float | str, "config": dict, "files": dict}
_SCORE_KINDS: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "score"), int | float | str)


def check_config(path: Path) -> None:
    """Raise `ValueError` if the configuration of a run is empty, or was altered after it was written."""
    if not path.stat().st_size:  # it would be read as all defaults, which nobody trained
        raise ValueError(f"expected the configuration of a run in '{path}', got an empty file; start the run again")
    remedy = "restore it, or start another run with the changed settings by --config"
    check_sealed_text(path, "the configuration of the run", remedy)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file and their records, without an incomplete end.

    Raises `ValueError` if a line before the last complete one is damaged.
    """
    complete = read_limited(path).split(b"\n")[:-1]
    parsed = [(raw, _record(raw)) for raw in complete]
    while parsed and parsed[-1][1] is None:
        parsed.pop()
    for number, (_, record) in enumerate(parsed, start=1):
        if record is None:
            raise ValueError(
                f"expected a JSON object with a 'step' in line {number} of '{path}', but it is damaged; delete the line"
            )
    return [(raw, record) for raw, record in parsed if record is not None]


def read_last_line(path: Path) -> dict[str, Any]:
    """Return the last complete record of a metrics file, without reading the others; {} if there is none.

    Raises `ValueError` if the end of the file holds none although lines are there.
    """
    require_regular(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        lines = file.read(_END).split(b"\n")[:-1]
    for raw in reversed(lines):
        if (record := _record(raw)) is not None:
            return record
    if lines:
        raise ValueError(f"expected JSON objects with a 'step' in '{path}', but its end is damaged; delete the lines")
    return {}


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    found: dict[str, Any] = from_json_values(record)
    return found


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a result.json.

    Raises:
        ValueError: If there is no result, or the file is damaged.
    """
    if not path.exists():
        raise ValueError(f"expected a result at '{path}', found none; finish the run with --resume")
    result = read_sealed_json(path, "the result of a run", "delete it")
    scores = [result[name] for name in ("validation", "test", "bleu") if result.get(name) is not None]
    whole = has_kinds(result, _KINDS) and all(has_kinds(score, _SCORE_KINDS) for score in scores)
    if result.get("status") not in get_args(RunStatus) or not whole:
        raise ValueError(f"expected a result with a status, but '{path}' is damaged; delete it")
    return result


RunState = Literal["starting", "running", "finished", "stopped", "diverged", "unknown", "damaged"]
"""The state of a run. 'unknown' has not ended, and its lock cannot be read; 'starting' has taken no step yet."""


_STATES: dict[str, RunState] = {
    "finished": "finished",
    "diverged": "diverged",
    "interrupted": "stopped",
}  # by the status of a result


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The state and the numbers of a run, from its files; None for those that they lack.

    Attributes:
        folder: The folder of the run.
        state: See `RunState`.
        note: Why the folder is damaged, or which signal stopped the run.
        model, method, data: The main settings.
        epochs: The epochs of the whole run.
        epoch: The epochs done, with a fraction.
        loss, accuracy: The means of training in the last epoch.
        validation, test: The loss and the accuracy on these data.
        bleu: BLEU of the test sentences of a translation.
        throughput: Images or target tokens per second, the `unit`.
        classes: The number of classes, or of tokens in the vocabulary; 0 if it is not known.
        parameters: The number of parameters.
        seconds: The time of the run so far.
        left: The seconds that are left.
        updated: When the run last wrote one of its files, in seconds since 1970.
    """

    folder: Path
    state: RunState
    note: str = ""
    model: str = ""
    method: str = ""
    data: str = ""
    epochs: int | None = None
    epoch: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation: tuple[float, float] | None = None
    test: tuple[float, float] | None = None
    bleu: float | None = None
    throughput: float | None = None
    unit: str = "images"
    classes: int = 0
    parameters: int | None = None
    seconds: float | None = None
    left: float | None = None
    updated: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether a process works on the run."""
        return self.state in ("starting", "running")


def describe_run(
    folder: Path,
    config: Mapping[str, Any],
    last: Mapping[str, Any],
    result: Mapping[str, Any],
    now: Mapping[str, Any],
    updated: float,
) -> WatchedRun:
    """Describe a run by its records, each of which may be empty; `with_state` adds whether it is running.

    Args:
        folder: The folder of the run.
        config: The settings.
        last: The last line of the metrics.
        result: The content of result.json.
        now: The content of progress.json.
        updated: When the last of these was written.
    """
    status = result.get("status")
    if status in ("finished", "diverged") or _number(now.get("step")) is None:
        now = {}  # left by a process that was killed at its end
    unit = "tokens" if "tokens_per_second" in {**result, **last, **now} else "images"
    known = {**last, **result, **now}  # a later record overrides an earlier one
    return WatchedRun(
        folder=folder,
        state=_STATES.get(str(status), "unknown"),
        note=f"signal {result['signal']}" if isinstance(result.get("signal"), int) else "",
        **{name: str(config.get(name, "")) for name in ("model", "method", "data")},
        epochs=_count(config.get("epochs")),
        epoch=_number(now.get("epoch", result.get("epochs", last.get("epoch")))),
        loss=_number(known.get("train_loss")),
        accuracy=_number(known.get("train_accuracy")),
        validation=_score(result.get("validation")) if result and not now else _logged(now) or _logged(last),
        test=_score(result.get("test")),
        bleu=_number(result["bleu"].get("score")) if result.get("bleu") else None,
        throughput=_number(known.get(f"{unit}_per_second")),
        unit=unit,
        classes=_count(known.get("classes")) or 0,
        parameters=_count(known.get("parameters")),
        seconds=_number(known.get("seconds")),
        left=_number(now.get("seconds_left")),
        updated=updated,
    )


def with_state(run: WatchedRun, held: bool | None) -> WatchedRun:
    """Complete the state of a run that has not ended, given whether a process holds its lock."""
    if run.state not in ("unknown", "stopped"):
        return run
    if held:
        left = None if run.left is None else max(0.0, run.left - (time.time() - run.updated))
        return replace(run, state="starting" if run.epoch is None else "running", note="", left=left)
    return replace(run, state="unknown" if held is None else "stopped", left=None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _number(value: object) -> float | None:
    """Return a number of a file, which may be forged; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _logged(record: Mapping[str, Any]) -> tuple[float, float] | None:
    return _score({"loss": record.get("validation_loss"), "accuracy": record.get("validation_accuracy")})


def _score(found: object) -> tuple[float, float] | None:
    values = [_number(found.get(name)) for name in ("loss", "accuracy")] if isinstance(found, dict) else [None]
    return None if None in values else (values[0], values[1])  # type: ignore[return-value]
