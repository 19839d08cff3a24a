import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from normfree.data import ImageSet, Split, image_set, linear_accuracy
from normfree.data.images.linear_classifier import _fit


def blobs(count: int, seed: int) -> Split:
    """Three classes of noisy 4×4 images, which overlap."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randint(60, 200, (3, 1, 4, 4), generator=torch.Generator().manual_seed(7)).float()
    labels = torch.randint(0, 3, (count,), generator=g)
    images = (centres[labels] + 60 * torch.randn(count, 1, 4, 4, generator=g)).clamp(0, 255).to(torch.uint8)
    return Split(images, labels)


@pytest.fixture
def data() -> ImageSet:
    return image_set("blobs", ["a", "b", "c"], blobs(200, 0), blobs(150, 1))


def solve(data: ImageSet, decay: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Weights, biases and test accuracy by scipy, with the gradient written out."""
    x, t = (s.images.flatten(1).numpy() / 255.0 for s in (data.train, data.test))
    mean, std = x.mean(0), x.std(0)
    x, t = (x - mean) / std, (t - mean) / std
    y = np.eye(3)[data.train.labels.numpy()]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w, b = flat[:48].reshape(16, 3), flat[48:]
        z = x @ w + b
        z = z - z.max(1, keepdims=True)
        logp = z - np.log(np.exp(z).sum(1, keepdims=True))
        r = (np.exp(logp) - y) / len(x)
        return -(y * logp).sum() / len(x) + decay / 2 * (w**2).sum(), np.r_[(x.T @ r + decay * w).ravel(), r.sum(0)]

    flat = minimize(loss, np.zeros(51), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000}).x
    w, b = flat[:48].reshape(16, 3), flat[48:]
    return w, b, float(((t @ w + b).argmax(1) == data.test.labels.numpy()).mean())


@pytest.mark.parametrize("decay", [1e-3, 1e-2, 1.0])
def test_linear_accuracy_is_that_of_another_solver(data: ImageSet, decay: float) -> None:
    w, b, accuracy = solve(data, decay)
    assert linear_accuracy(data, decay=decay) == accuracy
    x = data.train.images.flatten(1).double() / 255
    x = (x - x.mean(0)) / x.std(0, correction=0)
    weight, bias = _fit(x, data.train.labels, 3, decay, 1e-8)
    assert weight.numpy() == pytest.approx(w, abs=1e-4)
    assert (bias - bias.mean()).numpy() == pytest.approx(b - b.mean(), abs=1e-4)  # a constant added to all is free


def test_linear_accuracy_is_far_from_chance_and_from_certainty(data: ImageSet) -> None:
    assert 0.6 < linear_accuracy(data) < 1.0


def test_linear_accuracy_of_shuffled_labels_is_chance(data: ImageSet) -> None:
    g = torch.Generator().manual_seed(3)
    train = Split(data.train.images, torch.randint(0, 3, (200,), generator=g))
    assert abs(linear_accuracy(image_set("x", data.classes, train, data.test)) - 1 / 3) < 0.12  # 3 standard deviations


def test_linear_accuracy_draws_nothing(data: ImageSet) -> None:
    state = torch.get_rng_state()
    with torch.no_grad():  # nor does it mind this
        assert linear_accuracy(data) == linear_accuracy(data)
    assert torch.equal(torch.get_rng_state(), state)


def test_linear_accuracy_takes_a_constant_pixel(data: ImageSet) -> None:
    images = data.train.images.clone()
    images[:, 0, 0, 0] = 9
    train = Split(images, data.train.labels)
    assert linear_accuracy(image_set("x", data.classes, train, data.test)) > 0.6


@pytest.mark.parametrize("decay", [0.0, -1.0, float("nan")])
def test_linear_accuracy_refuses(data: ImageSet, decay: float) -> None:
    with pytest.raises(ValueError, match="expected a positive decay"):
        linear_accuracy(data, decay=decay)
    empty = data.test.take(slice(0))
    with pytest.raises(ValueError, match="expected training and test images in 'x', got 200, 0"):
        linear_accuracy(image_set("x", data.classes, data.train, empty))
