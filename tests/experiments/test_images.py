"""CIFAR-10 in both of its layouts, written here, and what is refused."""

import os
import pickle

import numpy as np
import pytest
import torch

from normfree.experiments.images import _MEAN, _STD, cifar10


@pytest.fixture
def batch():
    g = np.random.default_rng(0)
    return g.integers(0, 256, (20, 3072), dtype=np.uint8), g.integers(0, 10, 20, dtype=np.uint8)


def write_binary(folder, batch, number=1):
    folder.mkdir(exist_ok=True)
    pixels, labels = batch
    np.concatenate([labels[:, None], pixels], axis=1).tofile(folder / f"data_batch_{number}.bin")


def write_pickle(folder, batch):
    folder.mkdir(exist_ok=True)
    content = {b"data": batch[0], b"labels": batch[1].tolist(), b"batch_label": b"1 of 5"}
    (folder / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))


def test_images_are_normalized_planes(tmp_path, batch):
    write_binary(tmp_path / "cifar-10-batches-bin", batch)
    x, y = cifar10(tmp_path, 8)
    assert (x.shape, x.dtype, y.dtype) == ((8, 3, 32, 32), torch.float32, torch.int64)
    assert y.tolist() == batch[1][:8].tolist()
    for channel in range(3):
        expected = (batch[0][5, 1024 * channel + 33] / 255 - _MEAN[channel]) / _STD[channel]
        assert x[5, channel, 1, 1].item() == pytest.approx(expected, abs=1e-5)


def test_both_layouts_are_the_same_images(tmp_path, batch):
    write_binary(tmp_path / "cifar-10-batches-bin", batch)
    write_pickle(tmp_path / "other", batch)
    for a, b in zip(cifar10(tmp_path, 20), cifar10(tmp_path / "other", 20), strict=True):
        assert torch.equal(a, b)


def test_images_go_on_in_the_next_file(tmp_path, batch):
    for number in (1, 2):
        write_binary(tmp_path, batch, number)
    x, _ = cifar10(tmp_path, 25)
    assert torch.equal(x[20:], x[:5])


def test_missing_data_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"expected CIFAR-10 in the folder 'empty', .*pass --data DIR") as caught:
        cifar10(tmp_path / "empty", 8)
    assert str(tmp_path) not in str(caught.value)


def test_damaged_data_is_refused(tmp_path, batch):
    (tmp_path / "data_batch_1.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"expected records of 3073 bytes in 'data_batch_1\.bin', got 4 bytes"):
        cifar10(tmp_path, 8)
    (tmp_path / "data_batch_1.bin").unlink()
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": [1, 2], b"labels": [1]}))
    with pytest.raises(ValueError, match="expected a batch of CIFAR-10 in 'data_batch_1'"):
        cifar10(tmp_path, 8)


class Harmful:
    def __reduce__(self):
        return os.system, ("echo harm > harmed",)


def test_pickles_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Harmful(), b"labels": []}))
    with pytest.raises(ValueError, match=r"it holds \w+.system"):
        cifar10(tmp_path, 8)
    assert not (tmp_path / "harmed").exists()
