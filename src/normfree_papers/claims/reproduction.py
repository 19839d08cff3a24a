"""Run a claim, keep its result and its picture, and judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from normfree.files import explained, plain_json, replacing, write_json
from normfree_papers.claims.claim import SCALES, Claim, Judgement, Scale, Settings, all_claims, get, judge
from normfree_papers.claims.storage import Result, collect, is_empty, is_whole, panels_of, result_path, stored

RESULTS = Path("results")


def reproduce(
    claim_id: str, settings: Settings | None = None, out: str | Path = RESULTS, *, again: bool = False
) -> tuple[Result, Judgement]:
    """Run a claim and judge it; its result and picture are written below `out`.

    A stored result is taken instead of a new run when it is of this measurement and has the seeds that are asked for;
    `again` runs it all the same; so does a stored one for which runs are missing, since there may be more of them now.
    An interrupted run leaves the numbers that were there before; a picture that is missing is drawn the next time.

    Raises `ValueError` for an unknown claim, one that cannot be run here, and a stored file that is no result, and
    `OSError`, in one sentence, where a file cannot be written.
    """
    claim = get(claim_id)
    settings = settings or Settings(scale="full", seeds=claim.seeds_at("full"))
    before = None if again else stored(out, claim, settings.scale)
    if before is not None and tuple(before["seeds"]) != settings.seeds:
        before = None
    result = before if before is not None and is_whole(before) else run(claim, settings)
    if before is not None and _numbers(before) == _numbers(result):
        result = before  # no run has come to it, so that date and commit stay
    if is_empty(result) and before is None:
        return result, judge(claim, result)  # a file would only hide that there is nothing
    if result is not before:
        # First, so that no moment leaves the picture of other numbers: one that is missing is drawn.
        picture_path(out, claim, settings.scale).unlink(missing_ok=True)
        path = result_path(out, claim, settings.scale)
        with explained("the result", path):
            write_json(path, result)
        draw(claim, result, out)
    elif not picture_path(out, claim, settings.scale).exists():
        draw(claim, result, out)
    return result, judge(claim, result)


def _numbers(result: Result) -> Any:
    """What a result says, without when and where it was found."""
    return plain_json([result.get(key) for key in ("values", "panels", "tables", "notes", "runs")])


def run(claim: Claim, settings: Settings) -> Result:
    """Measure a claim, without touching any file."""
    start = time.perf_counter()
    measurement = claim.measure(settings)
    return collect(claim, settings, measurement, time.perf_counter() - start)


def picture_path(out: str | Path, claim: Claim, scale: Scale) -> Path:
    """Where the picture of a claim lies."""
    return result_path(out, claim, scale, ".png")


def draw(claim: Claim, result: Result, out: str | Path) -> None:
    """Draw the panels of a result; without matplotlib the numbers have to do."""
    with suppress(ImportError):
        _draw(claim, result, out)


def redraw(out: str | Path = RESULTS, claims: Sequence[Claim] | None = None) -> list[Path]:
    """Draw the pictures of all stored results anew, or of those of some claims; nothing is measured.

    One that a result no longer has is removed. Raises `ValueError` for a stored file that is no result, and
    `ImportError` without matplotlib.
    """
    drawn = []
    for claim in all_claims() if claims is None else claims:
        for scale in SCALES:
            result = stored(out, claim, scale)
            if result is not None and _draw(claim, result, out):
                drawn.append(picture_path(out, claim, scale))
            elif result is not None:
                picture_path(out, claim, scale).unlink(missing_ok=True)
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
    path = picture_path(out, claim, result["scale"])
    with explained("the picture", path), replacing(path) as temporary:
        write_plot(panels, temporary, title=title)
    return True
