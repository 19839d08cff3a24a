"""Convolutions whose weight gradient runs in parallel to the backward pass."""

import copy

import pytest
import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.weight_gradient_stream import SideStreamConv2d, side_stream, use_side_stream_

CPU = torch.device("cpu")


def spread(model: nn.Module) -> nn.Module:
    """Move every parameter away from 0, where an equality would say nothing."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g).to(parameter))
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with side_stream(x.device):
        model(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2}, {"padding": 0}, {"dilation": 2, "padding": 2}, {"groups": 4}, {"kernel_size": 1, "padding": 0}],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_overlapped_convolution_equals_a_plain_one(settings: dict[str, int], channels_last: bool) -> None:
    given = {"kernel_size": 3, "padding": 1, "bias": False, "dtype": torch.float64} | settings
    plain = spread(nn.Conv2d(4, 8, **given))  # type: ignore[arg-type]
    x = torch.randn(3, 4, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if channels_last:
        plain, x = plain.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    overlapped = use_side_stream_(copy.deepcopy(plain))
    assert type(overlapped) is SideStreamConv2d
    results = []
    for layer in (plain, overlapped):
        one = x.clone().requires_grad_()
        out = layer(one)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results.append((out, one.grad, layer.weight.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    assert overlapped.weight.grad.stride() == overlapped.weight.stride()


@pytest.mark.parametrize("method", ["fixup", "batchnorm", "nf", "wn"])
def test_overlapped_network_has_the_gradients_of_the_plain_one(method: str) -> None:
    plain = spread(build("wrn-10-1", method, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    overlapped = use_side_stream_(copy.deepcopy(plain))
    expected, found = gradients(plain, x), gradients(overlapped, x)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_overlap_takes_only_plain_convolutions_and_gives_them_back() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False),
        build("resnet8", "wn").body,
    )
    names = list(model.state_dict())
    use_side_stream_(model)
    assert [type(layer) is SideStreamConv2d for layer in list(model)[:3]] == [True, False, False]
    assert not any(isinstance(layer, SideStreamConv2d) for layer in model[3].modules())
    use_side_stream_(model, False)
    assert not any(isinstance(layer, SideStreamConv2d) for layer in model.modules())
    assert list(model.state_dict()) == names


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
def test_overlap_on_a_second_stream_has_the_gradients_of_one_stream(method: str) -> None:
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        plain = spread(build("resnet56", method, generator=torch.Generator().manual_seed(0))).cuda()
        overlapped = use_side_stream_(copy.deepcopy(plain))
        x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(2)).cuda()
        expected = gradients(plain, x)
        for _ in range(5):  # a race would not show every time
            overlapped.zero_grad()
            found = gradients(overlapped, x)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)
    finally:
        torch.backends.cudnn.deterministic = before


def test_convolution_that_pads_by_a_word_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same", bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False))
    expected = model(torch.ones(2, 3, 5, 5))
    use_side_stream_(model)
    assert [type(layer) for layer in model] == [nn.Conv2d, SideStreamConv2d]
    assert torch.equal(model(torch.ones(2, 3, 5, 5)), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_of_the_images_is_not_computed(compiled: bool) -> None:
    layer = use_side_stream_(nn.Conv2d(3, 4, 3, bias=False))
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    for needed in (False, True):
        x = torch.ones(2, 3, 5, 5, requires_grad=needed)
        out = run(x).sum()
        with torch.profiler.profile() as profile:
            out.backward()
        names = [event.name for event in profile.events()]
        assert names.count("aten::convolution_backward") == 1 + needed
        assert (x.grad is not None) == needed
    assert layer.weight.grad is not None
