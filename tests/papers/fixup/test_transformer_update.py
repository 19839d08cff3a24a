"""The claim on the first update of a Transformer: errors planted in the method turn its checks."""

import pytest

from normfree import theory
from normfree.methods.initialize import InitContext
from normfree.plan import Layer
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.judgement import admits
from normfree_papers.claims.registry import get

CLAIM = get("fixup/sec4_3")
ZERO, SPREAD = "largest output of a branch at the start", "spread over depth, Fixup"
BOUNDED, CONTROL = "spread over depth, Fixup, bounded", "exponent, Fixup without L-scaling"


def fails() -> set[str]:
    """The checks that fail at the quick scale, with one seed."""
    values = CLAIM.measure(Settings(scale="quick")).values
    found = {name: number[0] if isinstance(number, list) else number for name, number in values.items()}
    return {check.name for check in CLAIM.checks if not admits(check, found[check.name])}


def test_only_the_growth_with_depth_contradicts_the_paper() -> None:
    assert fails() == {SPREAD}


def test_missing_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "fixup_scale", lambda branches, layers: 1.0)
    assert {SPREAD, BOUNDED, CONTROL} <= fails()


def test_wrong_exponent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """L^(-1/(2m)) in place of L^(-1/(2m-2))."""
    monkeypatch.setattr(theory, "fixup_scale", lambda branches, layers: branches ** (-1 / (2 * layers)))
    assert {SPREAD, CONTROL} <= fails()


def test_branch_that_does_not_start_at_zero_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_(ctx: InitContext, layer: Layer) -> None:
        ctx.default_(layer)

    monkeypatch.setattr(InitContext, "zero_", default_)
    assert ZERO in fails()


def test_checks_say_where_their_ranges_come_from() -> None:
    assert {check.name: check.source for check in CLAIM.checks}[ZERO] == "paper"
    assert all(check.source for check in CLAIM.checks)
