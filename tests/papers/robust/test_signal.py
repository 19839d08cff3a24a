"""Figures 2, 4 and 5 of robust: the change over a whole network, which tells fan-out from fan-in."""

import pytest

from normfree.methods import get
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.depth_curves import decades
from normfree_papers.claims.registry import get as get_claim
from normfree_papers.robust import signal

SETTINGS = Settings(scale="quick", seeds=(0,))


@pytest.mark.parametrize("name", ["idshort", "idshort_in", "convshort_brock"])
def test_gradient_of_the_whole_network_is_the_derived_one(name):
    found = decades(signal._signal(18, name, 0, SETTINGS).series("sum_gradient"), backward=True)
    assert found == pytest.approx(signal.derived_decades(18, name), abs=signal._TOLERANCE)


def test_fan_in_for_fan_out_is_noticed(monkeypatch):
    """The planted error that no check inside a stage notices."""
    fan_in = get("idshort:fan=in")
    monkeypatch.setattr(signal, "_method", lambda name: fan_in)
    found = decades(signal._signal(18, "idshort", 0, SETTINGS).series("sum_gradient"), backward=True)
    assert abs(found - signal.derived_decades(18, "idshort")) > signal._TOLERANCE


def test_comparisons_are_positive_where_the_proposed_change_less():
    values = {f"backward decades, {name}": [-0.5] for name in ("idshort", "convshort")}
    values |= {f"backward decades, {name}": [-0.8] for name in ("idshort_in", "convshort_in")}
    values |= {"forward decades, idshort": [-0.2], "forward decades, convshort": [0.4], "forward decades, he_in": [0.3]}
    found = signal._comparisons(values)
    assert found["change by fan-in less change by fan-out, idshort"] == pytest.approx([0.3])
    assert found["forward growth of a plain ResNet less change, idshort"] == pytest.approx([0.1])
    assert found["forward growth of a plain ResNet less change, convshort"] == pytest.approx([-0.1])


@pytest.mark.parametrize("figure", ["fig2", "fig4", "fig5"])
def test_conserved_is_judged_over_the_whole_network(figure):
    checks = [c for c in get_claim(f"robust/{figure}").checks if c.paper == "conserve"]
    assert {check.name for check in checks} == {"backward decades, idshort", "backward decades, convshort"}
    assert all(check.main and (check.low, check.high) == (-1.0, 1.0) for check in checks)
