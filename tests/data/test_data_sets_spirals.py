"""The spirals: points of the formula, and a task that a deep network learns and a shallow one does not."""

import hashlib
import math
from pathlib import Path

import pytest
import torch

from embedded_images import linear_accuracy
from normfree.data import load
from normfree.train import fit, recipe


def test_every_point_lies_on_its_arm() -> None:
    """The angle at a radius tells the arm; only noise near the centre, where arms meet, hides it."""
    data = load("spirals")
    for split, count in ((data.train, 6_000), (data.test, 2_000)):
        assert split.labels.bincount().tolist() == [count // 5] * 5
        x, y, height = ((split.images.flatten(1).double() / 127.5 - 1) * 1.05).T
        assert ((x.square() + y.square() + height.square()) / 1.05**2 - 1).abs().max() < 0.03  # of bytes
        radius, angle = (x.square() + y.square()).sqrt(), torch.atan2(y, x)
        arm = (angle / (2 * math.pi) - 3 * radius) * 5
        found = arm.round().long() % 5
        assert (found == split.labels).double().mean() > 0.98
        assert (found == split.labels)[radius > 0.3].all()


def test_points_are_the_same_everywhere() -> None:
    """The bytes do not depend on the platform: they are rounded far from the precision of the sine."""
    data = load("spirals")
    digest = hashlib.sha256(data.train.images.numpy().tobytes() + data.test.images.numpy().tobytes()).hexdigest()
    assert digest == "00e6ac4d685b5ba71637144d05ca1a27a6f3726c775a1afafaa8d7612d561c81"


def test_linear_accuracy_is_the_stored_one() -> None:
    data = load("spirals")
    assert linear_accuracy(data) == pytest.approx(data.linear_accuracy, abs=0.005)


@pytest.mark.slow
def test_depth_pays(tmp_path: Path) -> None:
    """At the end of the recipe, 100 layers beat 4 layers by 2 points and a linear classifier by 5, for three seeds."""
    for seed in range(3):
        found = {}
        for model in ("resmlp-1-64", "resmlp-49-64"):
            result = fit(recipe("spirals", model=model, seed=seed), out=tmp_path / f"{model}-{seed}")
            assert result.status == "finished"
            assert result.test is not None
            found[model] = result.test.accuracy
        assert found["resmlp-49-64"] >= found["resmlp-1-64"] + 0.02
        assert found["resmlp-49-64"] >= load("spirals").linear_accuracy + 0.05
