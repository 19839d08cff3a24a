"""Run a claim, store its result and its picture, and judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from normfree.files import atomic_path, explain_os_errors, write_sealed_json
from normfree_papers.claims.claim import SCALES, Claim, Judgement, Progress, Scale, Settings, judge
from normfree_papers.claims.registry import all_claims, get
from normfree_papers.claims.run_cache import RunCache
from normfree_papers.claims.storage import (
    Result,
    collect,
    contents_of,
    is_empty,
    is_whole,
    panels_of,
    result_path,
    same_contents,
    stored,
)

RESULTS = Path("results")
WORK = Path("runs/claims")  # runs in progress, with their checkpoints


def reproduce(
    claim_id: str, settings: Settings | None = None, out: str | Path = RESULTS, *, again: bool = False
) -> tuple[Result, Judgement]:
    """Run a claim, write its result and picture below `out`, and judge it.

    A stored result is used instead of a new run if it has the same measurement and seeds. A stored result with missing
    training runs is measured again, since more of them may be there now. An interrupted run leaves the stored result
    as it was; a missing picture is drawn the next time.

    Args:
        claim_id: Such as "fixup/fig3".
        settings: Scale, seeds, device and training runs; by default the full scale with the seeds of the claim.
        out: Folder of the results.
        again: Run the claim even if there is a stored result.

    Returns:
        The result as plain data, and the judgement.

    Raises:
        ValueError: for an unknown claim, a claim that cannot be run here, and a stored file that is no result.
        OSError: in one sentence, if a file cannot be written.
    """
    claim = get(claim_id)
    settings = settings or Settings(scale="full", seeds=claim.seeds_at("full"))
    return _reproduce(claim, settings, out, None if again else stored(out, claim, settings.scale))


def reproduce_with_runs(
    claim: Claim,
    *,
    scale: Scale,
    seeds: int | None,
    device: str,
    data: Path,
    out: Path,
    again: bool,
    jobs: int,
    only: Sequence[str] | None,
    progress: Progress,
) -> tuple[Result, Judgement]:
    """As `reproduce`, with the training runs below `out`; without `seeds`, a stored result of any seeds is used.

    Args:
        claim: The claim.
        jobs: Training runs at a time.
        only: The runs that may be trained, as for `RunCache`.
        progress: Called with the steps done, the number of steps, and the name of the next step.

    Raises:
        StoppedError: after SIGINT or SIGTERM; the same call continues.
    """
    before = None if again else stored(out, claim, scale)
    if seeds is not None:
        chosen = tuple(range(seeds))
    else:
        chosen = tuple(before["seeds"]) if before is not None else claim.seeds_at(scale)
    runs = RunCache(out / "runs", WORK, device=device, data=data, jobs=jobs, only=only, progress=progress)
    settings = Settings(scale=scale, seeds=chosen, device=device, data=data, progress=progress, runs=runs)
    return _reproduce(claim, settings, out, before)


def _reproduce(claim: Claim, settings: Settings, out: str | Path, before: Result | None) -> tuple[Result, Judgement]:
    """Run a claim unless the stored result `before` is whole and of these seeds, store the result, and judge it."""
    if before is not None and tuple(before["seeds"]) != settings.seeds:
        before = None
    result = before if before is not None and is_whole(before) else run(claim, settings, before)
    if is_empty(result) and before is None:
        return result, judge(claim, result)  # nothing was measured, so that no file is written
    if result is not before:
        # Delete the old picture first, so a picture never shows outdated numbers; a missing one is drawn.
        picture_path(out, claim, settings.scale).unlink(missing_ok=True)
        path = result_path(out, claim, settings.scale)
        with explain_os_errors("the result", path):
            write_sealed_json(path, result)
    if result is not before or not picture_path(out, claim, settings.scale).exists():
        draw(claim, result, out)
    return result, judge(claim, result)


def run(claim: Claim, settings: Settings, before: Result | None = None) -> Result:
    """Measure a claim without touching any file; returns `before`, with its date and commit, if nothing changed."""
    start = time.perf_counter()
    measurement = claim.measure(settings)
    if before is not None and same_contents(before, contents_of(measurement, settings)):
        return before
    return collect(claim, settings, measurement, time.perf_counter() - start)


def picture_path(out: str | Path, claim: Claim, scale: Scale) -> Path:
    """The path of a claim's picture."""
    return result_path(out, claim, scale, ".png")


def draw(claim: Claim, result: Result, out: str | Path) -> None:
    """Draw the panels of a result; does nothing without matplotlib."""
    with suppress(ImportError):
        _draw(claim, result, out)


def redraw(out: str | Path = RESULTS, claims: Sequence[Claim] | None = None) -> list[Path]:
    """Draw the pictures of stored results again, of all claims or of some; measures nothing.

    The picture of a result without panels is removed.

    Raises:
        ValueError: for a stored file that is no result.
        ImportError: without matplotlib.
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
    with explain_os_errors("the picture", path), atomic_path(path) as temporary:
        write_plot(panels, temporary, title=title)
    return True
