import hashlib
from pathlib import Path

import pytest
import torch

from normfree.data import Split, get, image_set, linear_accuracy, load
from normfree.data.images import embedded


def test_embedded_file_is_one_small_file_with_its_notice() -> None:
    assert embedded.ASSET.stat().st_size < 1_500_000
    assert hashlib.sha256(embedded.ASSET.read_bytes()).hexdigest() == embedded._CHECKSUM.sha256
    notice = embedded.NOTICE.read_text(encoding="utf-8")
    assert "Zalando" in notice
    assert "MIT" in notice
    assert "Permission is hereby granted" in notice


def test_embedded_images_are_balanced() -> None:
    data = load("fashion14", "no such folder")
    assert data.train.images.shape == (6000, 1, 14, 14)
    assert data.test.images.shape == (1000, 1, 14, 14)
    assert data.train.labels.tolist() == list(range(10)) * 600
    assert data.test.labels.tolist() == list(range(10)) * 100
    assert data.classes[9] == "Ankle boot"


def test_embedded_images_are_distinct() -> None:
    data = load("fashion14")
    both = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 7000  # so no test image is a training image


def test_embedded_pixels_are_means_of_four() -> None:
    """The first test image, whose first rows at 28×28 were read off the npm package by hand."""
    first = [0, 0, 0, 0, 0, 0, 0, 9, 8, 0, 0, 34, 29, 7, 0, 11, 24, 0, 0, 3, 3, 1, 0, 1, 1, 0, 0, 0]
    second = [0, 0, 4, 0, 0, 1, 0, 0, 0, 0, 0, 44, 88, 99, 122, 123, 80, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    sums = [first[i] + first[i + 1] + second[i] + second[i + 1] for i in range(0, 28, 2)]
    expected = [int(total / 4 + 0.5) for total in sums]
    assert any(total % 4 == 2 for total in sums)  # a half, which goes up
    assert load("fashion14").test.images[0, 0, 0].tolist() == expected


def test_embedded_statistics_are_those_of_the_full_set() -> None:
    """Fashion-MNIST has mean 0.286 and, at 28×28, std 0.353; means of four vary a little less."""
    data = load("fashion14")
    assert data.mean[0] == pytest.approx(0.286, abs=0.005)
    assert 0.31 < data.std[0] < 0.353


def test_pack_follows_its_rule() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat(650)[torch.randperm(6500, generator=g)]
    images = torch.randint(0, 256, (6500, 1, 28, 28), dtype=torch.uint8, generator=g)
    split = Split(images, labels)
    content = torch.frombuffer(
        bytearray(embedded.pack(image_set("x", embedded.FASHION_CLASSES, split, split))), dtype=torch.uint8
    )
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
        embedded.pack(image_set("x", embedded.FASHION_CLASSES, few, few))


def test_embedded_file_that_is_altered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(embedded.ASSET.read_bytes())
    content[12345] ^= 1
    (tmp_path / "fashion14.bin").write_bytes(content)
    monkeypatch.setattr(embedded, "ASSET", tmp_path / "fashion14.bin")
    with pytest.raises(ValueError, match=r"'fashion14\.bin'.*altered.*install normfree again"):
        load("fashion14")


def test_embedded_needs_no_fetching(tmp_path: Path) -> None:
    assert get("fashion14", tmp_path / "root") == embedded.ASSET.parent
    assert not (tmp_path / "root").exists()


def test_linear_accuracy_of_the_embedded_images() -> None:
    assert linear_accuracy(load("fashion14")) == pytest.approx(0.835, abs=0.003)
