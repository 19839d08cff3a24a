"""Equation 1 of `normdead`: data, Hessians and descent against numpy, and the claim's verdict."""

import numpy as np
import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import regression

CLAIM = get("normdead/eq1")


@pytest.fixture
def data():
    g = np.random.default_rng(3)
    x = g.normal(size=(200, 4)) @ g.normal(size=(4, 4)) + [3.0, 0.0, -1.0, 2.0]
    return x, g.normal(size=200)


def test_hessian_of_regression_is_the_second_moment_and_not_the_covariance(data):
    x, y = data
    found = regression.regression_hessian(*map(torch.tensor, (x, y)), torch.ones(4, dtype=torch.float64)).numpy()
    mu = x.mean(0)
    np.testing.assert_allclose(found, np.cov(x.T, bias=True) + np.outer(mu, mu), rtol=1e-12)
    assert np.abs(found - np.cov(x.T, bias=True)).max() > 1


def test_data_forms_have_the_statistics_that_their_names_say(data):
    forms = {name: form.numpy() for name, form in regression.data_forms(torch.tensor(data[0])).items()}
    for name in ("centred", "normalized", "whitened"):
        np.testing.assert_allclose(forms[name].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(forms["normalized"].std(0), 1)
    np.testing.assert_allclose(np.cov(forms["whitened"].T, bias=True), np.eye(4), atol=1e-12)
    assert abs(np.corrcoef(forms["normalized"].T)[0, 1]) > 1e-3  # normalizing is not whitening


def test_descent_shrinks_every_direction_as_its_eigenvalue_says(data):
    x, y = data
    eigenvalues, vectors = np.linalg.eigh(x.T @ x / len(x))
    start = vectors.T @ np.linalg.lstsq(x, y, rcond=None)[0]
    found = regression.descent(torch.tensor(x), torch.tensor(y), (1, 5, 20))
    for t, value in zip((1, 5, 20), found, strict=True):
        left = start * (1 - eigenvalues / eigenvalues[-1]) ** t
        assert value == pytest.approx((eigenvalues @ left**2) / (eigenvalues @ start**2), rel=1e-9)


def test_condition_is_largest_over_smallest_eigenvalue():
    assert regression.condition(torch.diag(torch.tensor([2.0, 8.0, 4.0]))) == pytest.approx(4.0)


def test_claim_holds_but_for_the_word_covariance():
    settings = Settings(scale="quick", seeds=CLAIM.seeds_at("quick"))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    verdicts = {row.check.name: row.verdict for row in judge_means(CLAIM, result).rows}
    assert [name for name, verdict in verdicts.items() if verdict == "paper errs"] == [
        "Hessian against the covariance, raw data"
    ]
    assert set(verdicts.values()) == {"holds", "paper errs"}


def test_claim_fails_where_normalized_data_have_no_benefit():
    settings = Settings(scale="quick", seeds=CLAIM.seeds_at("quick"))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    result["values"]["condition number, normalized over raw"] = {"mean": 1.2, "values": [1.2]}
    assert judge_means(CLAIM, result).status == "fails"
