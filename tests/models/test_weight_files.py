"""Weights in a safetensors file load bit for bit, and those of another model are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_tensors
from safetensors.torch import save_model
from torch import Tensor, nn

from normfree.models.weight_files import load_weights


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """All that there is of a tensor, NaN payloads and signs of zero included."""
    return tensor.dtype, tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def save_weights(path: Path, model: nn.Module) -> None:
    """Write every name of the state, also both names of a tied weight."""
    path.write_bytes(save_tensors({name: tensor.clone() for name, tensor in model.state_dict().items()}))


class Tied(nn.Module):
    """Two names of one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.b.weight = self.a.weight


def test_weights_come_back_by_name(tmp_path: Path) -> None:
    model, other = Tied().bfloat16(), Tied().bfloat16()
    model.norm.running_mean.fill_(3)
    save_weights(tmp_path / "model.safetensors", model)
    load_weights(tmp_path / "model.safetensors", other)
    assert {n: bits(t) for n, t in other.state_dict().items()} == {n: bits(t) for n, t in model.state_dict().items()}
    assert other.b.weight is other.a.weight


def test_file_with_one_name_of_tied_weights_is_enough(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_model(model, str(tmp_path / "one.safetensors"))
    load_weights(tmp_path / "one.safetensors", other)
    assert torch.equal(model.b.weight, other.b.weight)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (nn.Sequential(nn.Linear(3, 3)), "1 missing and 1 unknown tensors \\(0.bias, 0.missing\\)"),
        (nn.Sequential(nn.Linear(4, 3)), "1 missing and 1 unknown"),
        (nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(1, 1)), "2 missing and 1 unknown"),
    ],
)
def test_weights_of_another_model_are_refused(other: nn.Module, says: str, tmp_path: Path) -> None:
    torch_file = tmp_path / "model.safetensors"
    torch_file.write_bytes(save_tensors({"0.weight": torch.ones(3, 3), "0.missing": torch.ones(1)}))
    before = {name: bits(tensor) for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=says):
        load_weights(torch_file, other)
    assert {name: bits(tensor) for name, tensor in other.state_dict().items()} == before


def test_weights_of_another_shape_are_refused_and_change_nothing(tmp_path: Path) -> None:
    save_weights(tmp_path / "model.safetensors", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)))
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=r"got shape \(4,.*\) for '1\.(weight|bias)' of \(5,"):
        load_weights(tmp_path / "model.safetensors", other)
    assert torch.equal(other[0].weight, before)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(path, nn.Linear(30, 30))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        load_weights(path, nn.Linear(30, 30))
    with pytest.raises(ValueError, match="found none"):
        load_weights(tmp_path / "none.safetensors", nn.Linear(1, 1))
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match="other formats can run code"):
        load_weights(tmp_path / "model.pt", nn.Linear(1, 1))
