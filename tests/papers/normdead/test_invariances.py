"""The table of invariances against numpy's own normalizers, and a claim that notices a wrong one."""

import numpy as np
import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import invariances as inv

CLAIM = get("normdead/sec2_3")


def numpy_layer(name: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """One layer of vectors, written in numpy alone."""
    if name == "weight norm":
        w = w / np.linalg.norm(w, axis=1, keepdims=True)
    if name == "centred weight norm":
        w = w - w.mean(1, keepdims=True)
        w = w / np.linalg.norm(w, axis=1, keepdims=True)
    if name == "spectral norm":
        w = w / np.linalg.norm(w, 2)
    y = x @ w.T
    if name == "batch norm":
        return (y - y.mean(0)) / y.std(0)
    if name == "layer norm":
        return (y - y.mean(1, keepdims=True)) / y.std(1, keepdims=True)
    if name == "group norm":
        groups = y.reshape(len(y), 4, -1)
        return ((groups - groups.mean(2, keepdims=True)) / groups.std(2, keepdims=True)).reshape(y.shape)
    return y


@pytest.mark.parametrize(
    "name", ["none", "batch norm", "layer norm", "group norm", "weight norm", "centred weight norm", "spectral norm"]
)
def test_layer_is_what_its_name_says(name):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64) + 1 for shape in ((12, 10), (16, 10)))
    spec = inv.NORMALIZERS[name]
    out = inv.weighted(spec, x, w)
    np.testing.assert_allclose(inv.normalized(spec, out, out), numpy_layer(name, x.numpy(), w.numpy()), rtol=1e-9)


@pytest.mark.parametrize("change", inv.CHANGES)
def test_change_changes_a_plain_layer_or_its_other_samples(change):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((12, 10), (16, 10)))
    changed_x, changed_w = inv.CHANGES[change][1](x, w, g)
    assert changed_x.shape == x.shape
    assert changed_w.shape == w.shape
    assert not torch.allclose(changed_x @ changed_w.T, x @ w.T)
    if change == "other samples":
        torch.testing.assert_close(changed_x[0], x[0])


def test_inference_keeps_the_statistics_of_training():
    spec = inv.NORMALIZERS["batch norm, inference"]
    seen = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = inv.normalized(spec, 2 * seen + 3, seen)
    expected = (2 * seen + 3 - seen.mean(0)) / seen.std(0)  # running variances are unbiased
    torch.testing.assert_close(out, expected)


def test_claim_holds_and_its_table_has_every_normalizer():
    settings = Settings(scale="quick", seeds=CLAIM.seeds_at("quick"))
    measurement = CLAIM.measure(settings)
    judgement = judge_means(CLAIM, collect(CLAIM, settings, measurement, 1.0))
    assert judgement.status == "holds", [row for row in judgement.rows if row.verdict != "holds"]
    vectors, images = measurement.tables
    assert {row[0] for row in images.rows} == set(inv.NORMALIZERS)
    assert {row[0] for row in images.rows} - {row[0] for row in vectors.rows} == {"instance norm"}


def test_wrong_algebra_is_noticed(monkeypatch):
    right = inv.NORMALIZERS["layer norm"]
    monkeypatch.setitem(inv.NORMALIZERS, "layer norm", inv._Normalizer(right.keeps | {"data shift"}, norm="layer"))
    settings = Settings(scale="quick", seeds=(0, 1, 2))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    # A data shift in both kinds, and the weight shift of vectors.
    assert result["values"]["cells unlike the algebra"]["mean"] == 3
    assert judge_means(CLAIM, result).status == "fails"


def test_invariances_are_shown_as_tables_alone():
    """A row a normalizer and a column a change; curves over names of changes would say nothing."""
    measurement = CLAIM.measure(Settings(seeds=(0,)))
    assert measurement.panels == ()
    assert [[column.name for column in table.columns] for table in measurement.tables] == [
        ["normalizer", *inv.CHANGES]
    ] * 2
