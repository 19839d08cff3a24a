"""Jobs of SLURM: continue a run in a job that was queued again, and queue a job again before its time is over."""

from __future__ import annotations

import logging
import os
import signal
import subprocess

_log = logging.getLogger("normfree.train")
_SECONDS = 60.0  # for SLURM to answer


def was_requeued() -> bool:
    """Whether this job was queued again, so that its run may have begun."""
    return os.environ.get("SLURM_RESTART_COUNT", "0").strip() not in ("", "0")


def requeue(number: int | None) -> bool:
    """Queue this job again if the signal that ended the run is the one before the end of a job's time.

    Args:
        number: The signal; None if there was none.

    Returns:
        Whether SLURM queued the job. If it refuses, the log says why.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or number != signal.SIGUSR1:
        return False
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        _log.warning("SLURM did not queue job %s again: %s; start it again yourself", job, reason)
        return False
    return True
