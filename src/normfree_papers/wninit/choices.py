"""The claim of `wninit` on its own choices: lengths for the forward pass, and orthogonal directions.

Reference: Arpit, Campos, Bengio 2019, section 3, implementation details and footnote 2. All accuracies are in per cent.
"""

from __future__ import annotations

from typing import Any

from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Settings, expect, training_claim
from normfree_papers.claims.readings import reading, trains
from normfree_papers.claims.seed_metrics import CHANCE, DEAD, EMBEDDED, Columns, Sweep

_OTHERS = {
    "g for the backward pass": "wn:g=backward",
    "geometric mean of both g": "wn:g=mean",
    "Gaussian directions": "wn:directions=gaussian",
}
_ALL = {"proposed": "wn", **_OTHERS}
_SMALL: dict[str, Any] = {**EMBEDDED, "flip": False, "cutout": 0, "model": "wrn-22-1", "epochs": 1}
_DEPTH = {"quick": 22, "full": 40}


@training_claim(
    id="wninit/sec3",
    where="Section 3, implementation details and footnote 2",
    statement="The lengths for the forward pass train better than those for the backward pass and than a combination "
    "of both, and orthogonal directions better than Gaussian ones.",
    paper_value="'we tested both (and combinations of them) … and found the one proposed for the forward pass to be "
    "superior'; of Gaussian and orthogonal initialization 'the latter is superior'; no numbers",
    how="Recipe wninit_seeds: WRN-40-10, 3 epochs of CIFAR-10 at 0.1, 0.03 and 0.01, the best chosen on held-out "
    "images (full); WRN-22-1, one epoch of the embedded images at 0.03 (quick).",
    cost=Cost(quick_seconds=60, full_seconds=2000, device="gpu"),
    checks=(
        expect("proposed", paper="superior", low=DEAD).reading(
            "test accuracy of the proposed initialization, in %: it trains", why=trains("superior")
        ),
        *(
            expect(f"proposed - {other}", paper="superior", low=0.0, scale="full").reading(
                f"test accuracy of the proposed initialization less that with {other}, in points",
                why=reading("superior", "a higher accuracy at the best rate of each", "below 0"),
            )
            for other in _OTHERS
        ),
    ),
    departures=("bf16 on a GPU", "network, epochs and rates are chosen: the paper calls the experiments preliminary"),
    needs_data="CIFAR-10",
)
def sec3(settings: Settings) -> Measurement:
    """Accuracy with other lengths and directions. Reference: wninit, section 3, implementation details, footnote 2."""
    depth = _DEPTH[settings.scale]
    network = recipe("wninit_seeds", **(_SMALL if settings.quick else {}))
    rates = (0.03,) if settings.quick else (0.1, 0.03, 0.01)
    sweep = Sweep.run(settings, _ALL, {depth: network}, rates, diverged=CHANCE, trains=DEAD)
    found = Columns({label: sweep.accuracies(label, depth, whole=label != "proposed") for label in _ALL})
    return Measurement(
        values=found | found.leads(*(("proposed", other) for other in _OTHERS)),
        panels=sweep.panels("the embedded images" if settings.quick else "CIFAR-10"),
        notes=("a diverged run counts as chance",),
    )
