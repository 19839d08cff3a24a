"""Parameters and FLOPs of `robust`, Table 1: four depths times four kinds of shortcut, at 32×32."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from normfree.models import Network, build

METHODS = {
    "BatchNorm": "batchnorm_convshort",
    "IdShort": "idshort",
    "LearnScalar": "learnscalar",
    "ConvShort": "convshort",
}
# (millions of parameters, billions of FLOPs) as printed, for depth and kind of shortcut
PRINTED = {
    (18, "BatchNorm"): (11.52, 1.16),
    (18, "IdShort"): (11.16, 1.12),
    (18, "LearnScalar"): (11.16, 1.12),
    (18, "ConvShort"): (11.52, 1.16),
    (50, "BatchNorm"): (38.02, 4.2),
    (50, "IdShort"): (23.47, 2.6),
    (50, "LearnScalar"): (23.47, 2.6),
    (50, "ConvShort"): (38.02, 4.2),
    (101, "BatchNorm"): (74.78, 8.92),
    (101, "IdShort"): (42.41, 5.02),
    (101, "LearnScalar"): (42.41, 5.02),
    (101, "ConvShort"): (74.78, 8.92),
    (152, "BatchNorm"): (105.06, 13.62),
    (152, "IdShort"): (58.01, 3.72),
    (152, "LearnScalar"): (58.01, 3.72),
    (152, "ConvShort"): (105.06, 13.62),
}
PRINTED_AS_MACS = {(152, "IdShort"), (152, "LearnScalar")}


def network(depth: int, kind: str) -> Network:
    return build(f"preact_resnet{depth}", METHODS[kind], num_classes=10, device="meta")


def millions(model: nn.Module, *, affine: bool) -> float:
    """Parameters in millions; without `affine` those of normalizers are left out, and nothing else is."""
    norms = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if affine or id(p) not in norms) / 1e6


def gigaflops(model: nn.Module, size: int = 32) -> float:
    """Twice the multiply-accumulates of one image, counted by torch on tensors without data."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, size, size, device="meta"))
    return counter.get_total_flops() / 1e9


@pytest.mark.parametrize(("depth", "kind"), PRINTED, ids=lambda v: str(v))
def test_parameters_equal_the_printed_digits(depth: int, kind: str) -> None:
    counted = millions(network(depth, kind), affine=False)
    assert f"{counted:.2f}" == f"{PRINTED[depth, kind][0]:.2f}"


@pytest.mark.parametrize(("depth", "kind"), PRINTED, ids=lambda v: str(v))
def test_flops_are_within_one_percent(depth: int, kind: str) -> None:
    counted, printed = gigaflops(network(depth, kind)), PRINTED[depth, kind][1]
    if (depth, kind) in PRINTED_AS_MACS:
        # The paper prints multiply-accumulates here and FLOPs everywhere else: deeper would be cheaper.
        assert counted == pytest.approx(7.4, rel=0.01)
        assert printed == pytest.approx(counted / 2, rel=0.01)
        assert printed < PRINTED[101, kind][1]
    else:
        assert counted == pytest.approx(printed, rel=0.01)


def test_learnable_scalars_vanish_in_rounding() -> None:
    with_scalars, without = network(152, "LearnScalar"), network(152, "IdShort")
    extra = sum(p.numel() for p in with_scalars.parameters()) - sum(p.numel() for p in without.parameters())
    assert extra == sum(not b.position.transition for b in with_scalars.plan.branches) == 46


# Controls: what the table would look like if one of its conventions were another.


@pytest.mark.parametrize(("depth", "wrong"), [(50, "38.06"), (101, "74.88"), (152, "105.20")])
def test_affine_parameters_would_not_round_to_the_printed_digits(depth: int, wrong: str) -> None:
    counted = millions(network(depth, "BatchNorm"), affine=True)
    assert f"{counted:.2f}" == wrong != f"{PRINTED[depth, 'BatchNorm'][0]:.2f}"


def test_batchnorm_with_identity_shortcuts_has_other_parameters() -> None:
    model = build("preact_resnet50", "batchnorm", device="meta")
    assert f"{millions(model, affine=False):.2f}" == "23.47"


def test_macs_miss_the_printed_flops() -> None:
    assert abs(gigaflops(network(50, "ConvShort")) / 2 / 4.2 - 1) > 0.4


def test_flops_at_another_resolution_miss_the_printed_ones() -> None:
    assert gigaflops(network(18, "IdShort"), size=28) < 0.99 * 1.12
