"""The registry of all claims: the papers, the module of each claim, and the claims by id.

A module is imported when one of its claims is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from normfree.errors import unknown_name

if TYPE_CHECKING:
    from normfree_papers.claims.claim import Claim

PAPERS = {
    "fixup": "Zhang, Dauphin, Ma 2019. Fixup Initialization: Residual Learning Without Normalization",
    "wninit": "Arpit, Campos, Bengio 2019. How to Initialize your Network? Robust Initialization for WeightNorm & "
    "ResNets",
    "robust": "2022 (anonymous submission). A Robust Initialization of Residual Blocks for Effective ResNet Training "
    "without Batch Normalization",
    "normdead": "Hoedt, Hochreiter, Klambauer 2022. Normalization is dead, long live normalization!",
    "beyond": "Beyond the papers: our own questions",
}
MODULES = {  # the claims of each module, in the order of the ledger
    "fixup.explosion": ("sec2", "thm1", "thm2"),
    "fixup.updates": ("eq5", "eq5_options"),
    "fixup.update_theorems": ("thm3", "thm4"),
    "fixup.transformer_update": ("sec4_3",),
    "fixup.training": ("sec3", "fig3", "fig4"),
    "fixup.image_tables": ("table1", "table4", "table2"),
    "fixup.translation": ("table3", "table3_multi30k", "table3_europarl"),
    "wninit.theorems": ("thm1", "thm2", "thm3", "thm4"),
    "wninit.activation_norms": ("fig1", "sec3_lengths", "sec3"),
    "wninit.curvature": ("table2",),
    "wninit.depth": ("fig2_left", "fig2_right", "fig3_left", "fig3_right"),
    "wninit.resnet_training": ("fig4", "table1"),
    "robust.table": ("table1",),
    "robust.signal": ("fig2", "fig4", "fig5"),
    "robust.training": ("fig3", "fig6", "fig7"),
    "normdead.regression": ("eq1",),
    "normdead.batchnorm": ("eq3",),
    "normdead.invariances": ("sec2_3",),
    "normdead.without_statistics": ("sec2_3_moments",),
    "normdead.costs": ("sec2_3_costs",),
    "normdead.skip_connections": ("sec3_2", "sec3_2_gradients"),
    "normdead.scaling_rules": ("sec4_1",),
    "normdead.signal_plots": ("fig4", "fig5"),
    "normdead.nf_signal": ("sec4_2",),
    "normdead.trained_networks": ("sec4_3", "sec5_2_clipping", "sec4_3_regnet"),
    "normdead.nf_limits": ("sec5_1",),
    "normdead.batchnorm_parts": ("sec5_2",),
    "beyond.scalar_rate": ("scalar_rate", "scalar_rate_law"),
    "beyond.precision": ("precision",),
    "beyond.isograd": ("isograd",),
    "beyond.equal_time": ("equal_time", "batch_sizes"),
    "beyond.converted": ("converted",),
    "beyond.transformer_rates": ("transformer_rates",),
}
_MODULE_OF = {f"{module.partition('.')[0]}/{name}": module for module, names in MODULES.items() for name in names}
_CLAIMS: dict[str, Claim] = {}


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


def all_claims() -> tuple[Claim, ...]:
    """Every claim, in the order of `MODULES`; imports all modules."""
    for module in MODULES:
        import_module(f"normfree_papers.{module}")
    return tuple(_CLAIMS[claim_id] for claim_id in _known() if claim_id in _CLAIMS)


def _known() -> list[str]:
    """The ids of `MODULES`, and then those of other registered claims."""
    return list(dict.fromkeys((*_MODULE_OF, *_CLAIMS)))


def get(claim_id: str) -> Claim:
    """The claim of an id; imports its module only.

    Raises:
        ValueError: for an unknown id, with the known ones, the closest first.
    """
    if claim_id in _MODULE_OF:
        import_module(f"normfree_papers.{_MODULE_OF[claim_id]}")
    if claim_id in _CLAIMS:
        return _CLAIMS[claim_id]
    if claim_id in PAPERS:
        own = [name for name in _known() if name.startswith(f"{claim_id}/")]
        raise ValueError(f"expected a claim, got the paper '{claim_id}'; name some of: {', '.join(own)}")
    raise unknown_name("claim", claim_id, _known())
