"""Branches whose output is also used outside of their sum, as the levels of a feature pyramid are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Pyramid(nn.Module):
    """A feature pyramid with an output for each of its levels, or for the finest only."""

    def __init__(self, levels: int, every: bool = True) -> None:
        super().__init__()
        widths = [3, *(8 * (i + 1) for i in range(levels))]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(widths[i], widths[i + 1], 3, 2, 1), nn.BatchNorm2d(widths[i + 1]), nn.ReLU())
            for i in range(levels)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in widths[1:])
        self.out = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
            for _ in range(levels if every else 1)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for down in self.down:
            x = down(x)
            features.append(x)
        top = self.lateral[-1](x)
        merged = [top]
        for lateral, feature in zip([*self.lateral][-2::-1], features[-2::-1], strict=True):
            top = lateral(feature) + F.interpolate(top, scale_factor=2)
            merged.append(top)
        return [out(level) for out, level in zip(self.out, merged[::-1], strict=False)]


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("method", ["rezero", "skipinit"])
def test_no_level_of_a_pyramid_starts_constant(method: str, levels: int) -> None:
    torch.manual_seed(0)
    converted, plan = nf.convert(Pyramid(levels), method, IMAGES)
    assert all(branch.merges_signals for branch in plan.branches)
    assert all(out.std() > 0.01 for out in converted(IMAGES))
    assert not any("same for all samples" in note for note in plan.changes.notes)


def test_top_of_a_pyramid_that_nothing_else_reads_is_a_branch() -> None:
    plan = nf.discover(Pyramid(2, every=False), IMAGES)  # the control
    assert [branch.merges_signals for branch in plan.branches] == [False]


class Read(nn.Module):
    """x + f(x) with an output that reads f(x), in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.head, self.other = nn.LayerNorm(16), nn.Linear(16, 5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.last(F.relu(self.first(self.norm(x))))
        scores = self.head(x + y)
        if self.how == "head":
            return scores, self.other(y)
        if self.how == "returned":
            return scores, y
        if self.how == "penalty":
            return scores, y.square().mean()
        if self.how == "other sum":
            return scores, self.other(self.stem.bias + 2 * y + x.tanh())
        if self.how == "unused":
            self.other(y)
        return scores


@pytest.mark.parametrize("how", ["head", "returned"])
def test_branch_that_an_output_reads_carries_the_signal(how: str) -> None:
    assert [branch.merges_signals for branch in nf.discover(Read(how), torch.randn(6, 8)).branches][:1] == [True]


@pytest.mark.parametrize("how", ["alone", "penalty", "other sum", "unused"])
def test_other_uses_of_a_branch_leave_it_a_branch(how: str) -> None:
    assert not any(branch.merges_signals for branch in nf.discover(Read(how), torch.randn(6, 8)).branches)


class Upsampled(nn.Module):
    """The shortcut is made larger, or smaller, and added to a branch that changes its size by a layer."""

    def __init__(self, larger: bool) -> None:
        super().__init__()
        self.scale = 2 if larger else 0.5
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
        self.layer = nn.ConvTranspose2d(8, 8, 2, 2) if larger else nn.Conv2d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.interpolate(x, scale_factor=self.scale) + self.layer(F.relu(self.norm(x))))


@pytest.mark.parametrize(("larger", "kind"), [(True, "upsample"), (False, "subsample")])
def test_shortcut_that_is_made_larger_is_no_subsampling(larger: bool, kind: str) -> None:
    assert [branch.shortcut for branch in nf.discover(Upsampled(larger), IMAGES).branches] == [kind]
