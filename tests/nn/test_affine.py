"""What is left of a batch norm."""

import pytest
import torch
from torch import nn

from normfree.nn.normalizers import ChannelAffine


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (2, 3, 5, 5))])
def test_channel_affine_is_batch_norm_at_evaluation(norm: type[nn.BatchNorm2d], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    module = norm(3).eval()
    module.running_var.uniform_(0.5, 2.0, generator=generator)
    module.running_mean.normal_(generator=generator)
    scale = (module.running_var + module.eps).rsqrt()
    x = torch.randn(shape, generator=generator)
    torch.testing.assert_close(ChannelAffine(scale, -module.running_mean * scale)(x), module(x))


def test_channel_affine_keeps_the_type_of_its_input() -> None:
    assert ChannelAffine(torch.ones(2), torch.zeros(2))(torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_channel_affine_refuses_vectors_of_two_lengths() -> None:
    with pytest.raises(ValueError, match=r"one factor and one summand a channel, got shapes \(2,\) and \(3,\)"):
        ChannelAffine(torch.ones(2), torch.zeros(3))
