"""The registry of claims, which imports the module of a claim when it is asked for.

To add a claim, decorate its measurement with `@claim(...)` in a module of its paper, and add its name to `MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Concatenate, ParamSpec

from normfree.errors import unknown_name
from normfree_papers.claims.claim import Claim, Measurement, Settings

PAPERS = {
    "fixup": "Zhang, Dauphin, Ma 2019. Fixup initialization: residual learning without normalization",
    "wninit": "Arpit, Campos, Bengio 2019. How to initialize your network? Weight norm and ResNets",
    "robust": "ICLR 2022 submission. A robust initialization of residual blocks",
    "normdead": "Hoedt, Hochreiter, Klambauer 2022. Normalization is dead, long live normalization!",
    "beyond": "Beyond the papers: our own questions",
}
DRAWINGS = {  # figures without numbers, which need no claim
    "fixup": {
        "Figure 1": "a drawing of three residual blocks: with batch norm, without, and with Fixup's scalars",
        "Figure 2": "a drawing that shows sets of layers to which Theorem 2 applies",
    },
    "robust": {"Figure 1": "a drawing of the identity block and the convolutional block"},
    "normdead": {
        "Figure 1": "a drawing of the axes of inputs: batch, channels and pixels",
        "Figure 2": "a drawing of the axes over which four normalization layers average",
        "Figure 3": "a drawing of the skip connections of ResNets, DenseNets and highway networks",
    },
}
MODULES = {  # the claims of each module, in the order of the ledger
    "fixup.explosion": ("sec2", "thm1", "thm2"),
    "fixup.updates": ("eq5", "eq5_options"),
    "fixup.update_theorems": ("thm3", "thm4"),
    "fixup.transformer_update": ("sec4_3",),
    "fixup.rules": ("sec3",),
    "fixup.training": ("fig3", "fig4"),
    "fixup.cifar": ("table1", "table4"),
    "fixup.imagenet": ("table2",),
    "fixup.translation": ("table3", "table3_multi30k", "table3_europarl"),
    "wninit.theorems": ("thm1", "thm2", "thm3", "thm4"),
    "wninit.norms": ("fig1", "sec3_lengths"),
    "wninit.choices": ("sec3",),
    "wninit.curvature": ("table2",),
    "wninit.depth": ("fig2_left", "fig2_right", "fig3_left", "fig3_right"),
    "wninit.warmup": ("fig4", "table1"),
    "robust.table": ("table1",),
    "robust.signal": ("fig2", "fig4", "fig5"),
    "robust.training": ("fig3", "fig6", "fig7"),
    "normdead.regression": ("eq1",),
    "normdead.batchnorm": ("eq3",),
    "normdead.invariances": ("sec2_3",),
    "normdead.moments": ("sec2_3_moments",),
    "normdead.costs": ("sec2_3_costs",),
    "normdead.skip_connections": ("sec3_2", "sec3_2_gradients"),
    "normdead.scaling_rules": ("sec4_1",),
    "normdead.signal_plots": ("fig4", "fig5"),
    "normdead.nf_signal": ("sec4_2",),
    "normdead.performance": ("sec4_3", "sec5_2_clipping"),
    "normdead.regnets": ("sec4_3_regnet",),
    "normdead.nf_limits": ("sec5_1",),
    "normdead.batchnorm_parts": ("sec5_2",),
    "beyond.scalar_rate": ("scalar_rate", "scalar_rate_law"),
    "beyond.precision": ("precision",),
    "beyond.isograd": ("isograd",),
    "beyond.equal_budget": ("equal_budget",),
    "beyond.transformer_rates": ("transformer_rates",),
}
_MODULE_OF = {f"{module.partition('.')[0]}/{name}": module for module, names in MODULES.items() for name in names}
_CLAIMS: dict[str, Claim] = {}

Measure = Callable[[Settings], Measurement]
Fields = ParamSpec("Fields")


def register(claim: Claim) -> Claim:
    """Add a claim.

    Raises:
        ValueError: if its id is taken, or its paper is unknown.
    """
    if claim.paper not in PAPERS:
        raise unknown_name("paper of a claim", claim.paper, PAPERS)
    if claim.id in _CLAIMS:
        raise ValueError(f"expected a new claim, got '{claim.id}', which is registered; choose another id")
    _CLAIMS[claim.id] = claim
    return claim


def _decorator(make: Callable[Concatenate[Measure, Fields], Claim]) -> Callable[Fields, Callable[[Measure], Measure]]:
    """Turn the constructor of a claim, which takes the measurement first, into a decorator of measurements."""

    def with_fields(*args: Fields.args, **fields: Fields.kwargs) -> Callable[[Measure], Measure]:
        def add(measure: Measure) -> Measure:
            register(make(measure, *args, **fields))
            return measure

        return add

    return with_fields


claim = _decorator(Claim)
"""`@claim(id=…, checks=…)` registers the function as that claim's measurement."""
training_claim = _decorator(partial(Claim, needs_training=True))
"""The same for a claim on training runs."""


def all_claims() -> tuple[Claim, ...]:
    """Every claim, by paper and in the order of the paper; imports all modules."""
    for module in MODULES:
        import_module(f"normfree_papers.{module}")
    places = list(_MODULE_OF)

    def place(claim: Claim) -> tuple[int, int]:
        return list(PAPERS).index(claim.paper), places.index(claim.id) if claim.id in places else len(places)

    return tuple(sorted(_CLAIMS.values(), key=place))


def get(claim_id: str) -> Claim:
    """The claim of an id; imports its module only.

    Raises:
        ValueError: for an unknown id, with the known ones, the closest first.
    """
    if claim_id in _MODULE_OF:
        import_module(f"normfree_papers.{_MODULE_OF[claim_id]}")
    if claim_id in _CLAIMS:
        return _CLAIMS[claim_id]
    known = [*_MODULE_OF, *(name for name in _CLAIMS if name not in _MODULE_OF)]
    if claim_id in PAPERS:
        own = [name for name in known if name.startswith(f"{claim_id}/")]
        raise ValueError(f"expected a claim, got the paper '{claim_id}'; name some of: {', '.join(own)}")
    raise unknown_name("claim", claim_id, known)
