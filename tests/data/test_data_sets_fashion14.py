"""The images in the package are as documented, and the linear baseline is the optimum."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from embedded_images import fit_linear, linear_accuracy, pack
from normfree.data import ImageSet, Split, data_sets, get, image_set, load
from normfree.data.data_sets import ASSET
from normfree.data.download.catalog import FASHION_CLASSES


def test_fashion14_file_is_one_small_file_with_its_notice() -> None:
    assert ASSET.stat().st_size < 1_500_000
    assert hashlib.sha256(ASSET.read_bytes()).hexdigest() == data_sets._ASSET_CHECKSUM.sha256
    notice = ASSET.with_name("fashion14.LICENSE.txt").read_text(encoding="utf-8")
    assert "Zalando" in notice
    assert "MIT" in notice
    assert "Permission is hereby granted" in notice


def test_fashion14_images_are_balanced() -> None:
    data = load("fashion14", "no such folder")
    assert data.train.images.shape == (6000, 1, 14, 14)
    assert data.test.images.shape == (1000, 1, 14, 14)
    assert data.train.labels.tolist() == list(range(10)) * 600
    assert data.test.labels.tolist() == list(range(10)) * 100
    assert data.classes[9] == "Ankle boot"


def test_fashion14_images_are_distinct() -> None:
    data = load("fashion14")
    both = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 7000  # so no test image is a training image


def test_fashion14_pixels_are_means_of_four() -> None:
    """The first test image, whose first rows at 28×28 were read off the npm package by hand."""
    first = [0, 0, 0, 0, 0, 0, 0, 9, 8, 0, 0, 34, 29, 7, 0, 11, 24, 0, 0, 3, 3, 1, 0, 1, 1, 0, 0, 0]
    second = [0, 0, 4, 0, 0, 1, 0, 0, 0, 0, 0, 44, 88, 99, 122, 123, 80, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    sums = [first[i] + first[i + 1] + second[i] + second[i + 1] for i in range(0, 28, 2)]
    expected = [int(total / 4 + 0.5) for total in sums]
    assert any(total % 4 == 2 for total in sums)  # a half, which goes up
    assert load("fashion14").test.images[0, 0, 0].tolist() == expected


def test_fashion14_statistics_are_those_of_the_full_set() -> None:
    """Fashion-MNIST has mean 0.286 and, at 28×28, std 0.353; means of four vary a little less."""
    data = load("fashion14")
    assert data.mean[0] == pytest.approx(0.286, abs=0.005)
    assert 0.31 < data.std[0] < 0.353


def test_pack_follows_its_rule() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat(650)[torch.randperm(6500, generator=g)]
    images = torch.randint(0, 256, (6500, 1, 28, 28), dtype=torch.uint8, generator=g)
    split = Split(images, labels)
    content = torch.frombuffer(bytearray(pack(image_set("x", FASHION_CLASSES, split, split))), dtype=torch.uint8)
    records = content.view(7000, 197)
    for record, (label, place) in {0: (0, 0), 13: (3, 1), 5999: (9, 599), 6000: (0, 0), 6999: (9, 99)}.items():
        source = images[(labels == label).nonzero()[place].item(), 0].tolist()
        mean = [
            (source[2 * r][2 * c] + source[2 * r][2 * c + 1] + source[2 * r + 1][2 * c] + source[2 * r + 1][2 * c + 1])
            / 4
            for r in range(14)
            for c in range(14)
        ]
        assert records[record].tolist() == [label, *(int(value + 0.5) for value in mean)]
    few = split.take(slice(100))
    with pytest.raises(ValueError, match="expected 600 images of 'T-shirt/top'"):
        pack(image_set("x", FASHION_CLASSES, few, few))


def test_fashion14_file_that_is_altered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(ASSET.read_bytes())
    content[12345] ^= 1
    (tmp_path / "fashion14.bin").write_bytes(content)
    monkeypatch.setattr(data_sets, "ASSET", tmp_path / "fashion14.bin")
    with pytest.raises(ValueError, match=r"'fashion14\.bin'.*altered.*install normfree again"):
        load("fashion14")


def test_fashion14_needs_no_fetching(tmp_path: Path) -> None:
    assert get("fashion14", tmp_path / "root") == ASSET.parent
    assert not (tmp_path / "root").exists()


def test_linear_accuracy_of_fashion14() -> None:
    assert linear_accuracy(load("fashion14")) == pytest.approx(data_sets.LINEAR_ACCURACY["fashion14"], abs=0.003)


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
    weight, bias = fit_linear(x, data.train.labels, 3, decay, 1e-8)
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
