"""Networks that are broken on purpose, each with the place and the cause that a diagnosis has to name.

The cases were written down before the detector that they judge ran, by an author who had not read it. `REVIEWED` are
the cases of the users' review, `UNSEEN` are cases that no document names. Each case also builds its mended twin: the
same network without the fault.

A diagnosis is right about a case if three things hold for what a reader sees first (the verdict and the advice, not
the table of all modules): it reports a fault, `Broken.names_place` finds the place, and `Broken.names_cause` finds the
cause. On the mended twin, a report of the same fault at the same place is a false alarm.
"""

from __future__ import annotations

from fault_cases import Broken
from reviewed_faults import REVIEWED
from unseen_faults import UNSEEN

__all__ = ["BROKEN", "REVIEWED", "UNSEEN", "Broken"]

BROKEN: tuple[Broken, ...] = (*REVIEWED, *UNSEEN)
