"""Run a claim, store its result and its picture, and read stored results.

    results/<paper>/<name>.json          a full run
    results/<paper>/<name>.quick.json    a quick run

A file holds the claim, command, commit, date, seeds, versions, hardware, the values (mean and standard deviation over
the seeds, and the value of each seed), and the data of the picture. It names no folder, user or host. Numbers that are
not finite are stored as the strings "nan", "inf" and "-inf", because JSON cannot represent them.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Column, Table
from normfree.storage.provenance import commit, hardware, versions
from normfree.storage.reading import from_json_values, read_sealed_json
from normfree.storage.writing import atomic_path, explain_os_errors, to_json_values, write_sealed_json
from normfree_papers.claims.claim import SCALES, Claim, Measurement, Scale, Settings
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.run_cache import missing_runs

RESULTS = Path("results")
Result = dict[str, Any]
_NUMERIC = ("values", "panels")  # in these parts "nan", "inf" and "-inf" are numbers, except below the keys
_TEXTS = ("title", "y_label", "x_label", "note", "name", "names", "point_names")
_REQUIRED = {"claim": str, "scale": str, "seeds": list, "values": dict, "panels": list}


def reproduce(claim: Claim, settings: Settings, out: str | Path = RESULTS, before: Result | None = None) -> Result:
    """Run a claim, and write its result and picture below `out`.

    A stored result is returned instead of a new run if it has the same seeds and all its training runs. With missing
    ones it is measured again, since more of them may be there now. An interrupted run leaves the stored result as it
    was; a missing picture is drawn the next time.

    Args:
        claim: The claim.
        settings: Scale, seeds, device and training runs.
        out: Folder of the results.
        before: The stored result; None to run the claim in any case.

    Returns:
        The result as plain data.

    Raises:
        ValueError: for a claim that cannot be run here.
        OSError: in one sentence, if a file cannot be written.
    """
    if before is not None and tuple(before["seeds"]) != settings.seeds:
        before = None
    result = before if before is not None and not missing_runs(before) else run(claim, settings, before)
    if before is None and result.get("runs") and len(missing_runs(result)) == len(result["runs"]):
        return result  # nothing was measured, so that no file is written
    path, picture = (result_path(out, claim, settings.scale, suffix) for suffix in (".json", ".png"))
    if result is not before:
        # Delete the old picture first, so a picture never shows outdated numbers; a missing one is drawn.
        picture.unlink(missing_ok=True)
        with explain_os_errors("the result", path):
            write_sealed_json(path, result)
    if not picture.exists():
        draw(claim, result, out)
    return result


def run(claim: Claim, settings: Settings, before: Result | None = None) -> Result:
    """Measure a claim without touching any file; returns `before`, with its date and commit, if nothing changed."""
    start = time.perf_counter()
    measurement = claim.measure(settings)
    if before is not None and same_contents(before, contents_of(measurement, settings)):
        return before
    return collect(claim, settings, measurement, time.perf_counter() - start)


def draw(claim: Claim, result: Result, out: str | Path) -> None:
    """Draw the panels of a result; does nothing without matplotlib."""
    with suppress(ImportError):
        _draw(claim, result, out)


def redraw(out: str | Path = RESULTS, claims: Sequence[Claim] | None = None) -> list[Path]:
    """Draw the pictures of stored results again, of all claims or of some; measures nothing.

    Results of older measurements are drawn too: documents show them. The picture of a result without panels is removed.

    Raises:
        ValueError: for a stored file that is no result.
        ImportError: without matplotlib.
    """
    drawn = []
    for claim in all_claims() if claims is None else claims:
        for scale in SCALES:
            result, picture = _read(out, claim, scale), result_path(out, claim, scale, ".png")
            if result is not None and _draw(claim, result, out):
                drawn.append(picture)
            elif result is not None:
                picture.unlink(missing_ok=True)
    return drawn


def _draw(claim: Claim, result: Result, out: str | Path) -> bool:
    """Draw the panels of a result, if it has any."""
    from normfree.report.plots import write_plot

    panels = panels_of(result)
    if not panels:
        return False
    title = f"{claim.id}: {claim.where}, measured here"
    if result["scale"] == "quick":
        title += " (quick)"
    path = result_path(out, claim, result["scale"], ".png")
    with explain_os_errors("the picture", path), atomic_path(path) as temporary:
        write_plot(panels, temporary, title=title)
    return True


# Results as plain data


def result_path(out: str | Path, claim: Claim, scale: Scale, suffix: str = ".json") -> Path:
    """The path of a claim's result below a folder."""
    return Path(out) / f"{claim.id}{'.quick' if scale == 'quick' else ''}{suffix}"


def collect(claim: Claim, settings: Settings, measurement: Measurement, seconds: float) -> Result:
    """The result of a run as plain data, with everything needed to run it again."""
    contents = contents_of(measurement, settings)
    if settings.runs is not None and settings.runs.missing:
        from normfree_papers.claims.run_training import gpu_seconds  # builds networks

        for name, config in settings.runs.missing.items():
            contents["runs"][name] = {"gpu_seconds": round(gpu_seconds(config))}
    return {
        "claim": claim.id,
        "version": claim.version,
        "command": command(claim, settings),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scale": settings.scale,
        "seeds": list(settings.seeds),
        "versions": versions(),
        "hardware": hardware(settings.device),
        "seconds": round(seconds, 3),
        **contents,
    }


def contents_of(measurement: Measurement, settings: Settings) -> Result:
    """The part of a result that does not depend on time and place; a missing training run has an empty record."""
    runs = {name: settings.runs.records.get(name, {}) for name in settings.runs.asked} if settings.runs else {}
    return {
        "values": {name: summarize(value) for name, value in measurement.values.items()},  # type: ignore[arg-type]
        "panels": [asdict(panel) for panel in measurement.panels],
        "tables": [
            {"title": t.title, "columns": [c.name for c in t.columns], "rows": [list(row) for row in t.rows]}
            for t in measurement.tables
        ],
        "notes": list(measurement.notes),
        **({"runs": runs} if runs else {}),
    }


def same_contents(result: Result, other: Result) -> bool:
    """Whether two results hold the same numbers, texts and training runs, whenever and wherever they were made."""

    def contents(one: Result) -> Any:
        folders = {name: run.get("folder") for name, run in one.get("runs", {}).items()}
        panels = [asdict(panel) for panel in panels_of(one)]  # a stored panel lacks the fields that came later
        return to_json_values([folders, panels, *(one.get(key) for key in ("values", "tables", "notes"))])

    return bool(contents(result) == contents(other))


def summarize(value: float | Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation of several numbers, and the numbers themselves.

    >>> summarize([1.0, 3.0])
    {'mean': 2.0, 'std': 1.4142135623730951, 'values': [1.0, 3.0]}
    >>> summarize(2)
    {'mean': 2.0, 'values': [2.0]}
    """
    numbers = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)]
    if not numbers:
        raise ValueError("expected a number or one per seed, got none; leave the value out")
    if len(numbers) == 1:
        return {"mean": numbers[0], "values": numbers}
    if not all(map(math.isfinite, numbers)):
        return {"mean": sum(numbers) / len(numbers), "std": math.nan, "values": numbers}
    return {"mean": statistics.fmean(numbers), "std": statistics.stdev(numbers), "values": numbers}


def panels_of(result: Mapping[str, Any]) -> tuple[Panel, ...]:
    """The panels of a result, ready to be drawn."""
    panels = []
    for plain in result["panels"]:
        fields = _tuples(plain)
        fields["curves"] = tuple(Curve(**_tuples(curve)) for curve in plain["curves"])
        fields["levels"] = tuple(ReferenceLine(**level) for level in plain.get("levels", ()))
        panels.append(Panel(**fields))
    return tuple(panels)


def tables_of(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """The tables of a result."""
    return tuple(
        Table(t["title"], tuple(map(Column, t["columns"])), tuple(tuple(map(str, row)) for row in t["rows"]))
        for t in result.get("tables", ())
    )


def _tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    def fixed(value: Any) -> Any:
        return tuple(map(fixed, value)) if isinstance(value, list) else value

    return {key: fixed(value) for key, value in plain.items()}


# Files


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        ValueError: if the file holds no result.
        FileNotFoundError: if there is no file.
    """
    remedy = "delete it, or run the claim with --again"
    result = read_sealed_json(path, "the result of a claim", remedy)
    for key, kind in _REQUIRED.items():
        if not isinstance(result.get(key), kind):
            raise ValueError(f"expected a result with {key!r} in '{path}', got {result.get(key)!r}; {remedy}")
    return {key: from_json_values(value, _TEXTS) if key in _NUMERIC else value for key, value in result.items()}


def stored(out: str | Path, claim: Claim, scale: Scale) -> Result | None:
    """The stored result of a claim; None if there is none, or only that of an older measurement."""
    result = _read(out, claim, scale)
    return result if result is not None and result.get("version") == claim.version else None


def _read(out: str | Path, claim: Claim, scale: Scale) -> Result | None:
    """The stored result of a claim, also that of an older measurement."""
    path = result_path(out, claim, scale)
    if not path.exists():
        return None
    result = read_result(path)
    if result["claim"] != claim.id or result["scale"] != scale:
        raise ValueError(
            f"expected the {scale} result of '{claim.id}' in '{path}', got the {result['scale']} one of "
            f"'{result['claim']}'; delete it, or run the claim with --again"
        )
    return result


# The command


def command(claim: Claim, settings: Settings, only: str | None = None) -> str:
    """The command that runs a claim with these settings, or one of its training runs.

    It names no folder outside the current one. If the training runs were only read, it is the command that trains
    them, on the GPU that the full scale needs.
    """
    words = ["normfree", "reproduce", claim.id]
    words += ["--quick"] if settings.quick else []
    if settings.seeds != claim.seeds_at(settings.scale) and settings.seeds == tuple(range(len(settings.seeds))):
        words += ["--seeds", str(len(settings.seeds))]
    words += [] if only is None else ["--only", only]
    only_read = claim.needs_training and settings.runs is not None and not settings.runs.trains
    device = "cuda" if only_read and not settings.quick else settings.device
    words += ["--device", device] if device != "cpu" else []
    if claim.needs_data and settings.data is not None:
        inside = not settings.data.is_absolute() and ".." not in PurePath(settings.data).parts
        words += ["--data-dir", str(settings.data) if inside else "DIR"]
    return shlex.join(words)


def default_command(claim: Claim, scale: Scale = "full", only: str | None = None) -> str:
    """The command that runs a claim with its default seeds, on the device that its cost names."""
    device = "cuda" if scale == "full" and claim.cost.device == "gpu" else "cpu"
    return command(claim, Settings(scale=scale, seeds=claim.seeds_at(scale), device=device), only)
