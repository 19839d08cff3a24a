"""Sizes are compared with the memory that is free, also in a container."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import normfree as nf
from normfree.nn import devices


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 3 GiB free."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {3 * 2**20} kB\n")
    monkeypatch.setattr(devices, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "_GROUP", tmp_path)
    return tmp_path


def test_free_memory_is_that_of_the_machine(machine: Path) -> None:
    assert devices.free_memory() == 3 * 2**30


def test_limit_of_a_container_counts_without_copies_of_files(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{2 * 2**30}\n")
    (machine / "memory.current").write_text(f"{2 * 2**30}\n")
    (machine / "memory.stat").write_text(f"anon 7\nfile {2**30}\nfile_mapped 5\n")
    assert devices.free_memory() == 2**30
    (machine / "memory.max").write_text("max\n")
    assert devices.free_memory() == 3 * 2**30


def test_unknown_memory_refuses_nothing(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert devices.free_memory() is None
    devices.require_memory("a batch", 2**60, "make it smaller")


def test_size_above_the_free_memory_is_one_sentence(machine: Path) -> None:
    devices.require_memory("a batch", 3 * 2**30, "make it smaller")
    says = "expected a batch to fit into the memory, got 4.0 GiB or more, where 3.0 GiB are free; make it smaller"
    with pytest.raises(ValueError, match=f"^{says}$"):
        devices.require_memory("a batch", 4 * 2**30, "make it smaller")


def test_model_larger_than_the_memory_is_refused_before_it_has_any(machine: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the weights of 'resmlp-2-100000' to fit into the memory, got 1"):
        nf.build("resmlp-2-100000", "fixup")


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_activations_of_a_large_batch_are_counted(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    model = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 7, bias=False))
    batch, cpu = torch.randn(1000, 30), torch.device("cpu")
    needed = int(share * 1000 * 4 * (30 + 50))  # what the two layers read; a slice of the batch is not the batch
    for free, refused in ((needed + 1, False), (needed - 1, True)):
        monkeypatch.setattr(devices, "free_memory", lambda _, free=free: free)
        context = pytest.raises(ValueError, match="the activations of 1,000 samples") if refused else nullcontext()
        with context:
            devices.require_room_for_activations(model, [batch[:2]], len(batch), "use less", cpu, share)
    devices.require_room_for_activations(model, [batch[:2, :1]], devices.LARGE - 1, "use less", cpu)  # not measured
    assert all(parameter.grad is None for parameter in model.parameters())
