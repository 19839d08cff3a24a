"""The claim of `normdead` on the limits of NF-ResNets: other skip connections, normalized weights, dropout.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 5.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normfree import theory
from normfree.methods import get
from normfree.methods.method import SKIPS_WITHOUT_SEQUENCES
from normfree.models import build
from normfree.models.nonresidual import Concatenate, Highway
from normfree.nn.residual import Residual
from normfree.nn.weight_layers import weight_kind
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import chart, means
from normfree_papers.normdead.float64_draws import generator, normal, undisturbed
from normfree_papers.normdead.nf_signal import centred, variance

_BLOCKS, _WIDTH, _GROWTH, _DRAWS = 12, 512, 64, 1_000_000
_KINDS = ("sum", "concatenation", "gate")


class _Scaled(nn.Module):
    """f(αx): scaling, ReLU, and centred weights with the gain that keeps the variance."""

    def __init__(self, inputs: int, outputs: int, alpha: float, g: torch.Generator) -> None:
        super().__init__()
        self.alpha = alpha
        self.layer = centred(inputs, outputs, theory.variance_gain("relu") ** 0.5, g)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.relu(self.alpha * x))
        return out


@torch.no_grad()
def scaled_branches(kind: str, seed: int) -> list[float]:
    """Variance of the branch in every block, with the α = 1/√b of NF-ResNets in block b."""
    g = generator(seed)
    x = normal((2 * _WIDTH, 256 if kind == "concatenation" else _WIDTH), g)
    found = []
    for b in range(1, _BLOCKS + 1):
        width = x.shape[1]
        branch = _Scaled(width, _GROWTH if kind == "concatenation" else width, b**-0.5, g)
        found.append(variance(branch(x)))
        if kind == "sum":
            x = Residual(branch)(x)
        elif kind == "concatenation":
            x = Concatenate(branch)(x)
        else:
            gate = nn.Linear(width, width, bias=False).double()
            gate.weight.copy_(normal((width, width), g) / math.sqrt(width))
            x = Highway(gate, branch)(x)
    return found


def expected_concatenation() -> list[float]:
    """The branch variances of `scaled_branches` for concatenations, in closed form.

    The branch of block b has 1/b of the mean variance of its inputs.
    """
    features, level, found = 256, 1.0, []
    for b in range(1, _BLOCKS + 1):
        found.append(level / b)
        level = (features * level + _GROWTH * level / b) / (features + _GROWTH)
        features += _GROWTH
    return found


@claim(
    id="normdead/sec5_1",
    where="Section 5.1",
    statement="The scaling of NF-ResNets is meaningful for additive skip connections only; they still normalize, their "
    "weights; and dropout still makes training and testing differ.",
    paper_value="no numbers; each check quotes the paper",
    how="Variance of 12 branches with NF's α in sums, concatenations and highway gates of width 512, the weight layers "
    "of an NF-ResNet, and the variance after dropout.",
    cost=Cost(quick_seconds=5, full_seconds=16),
    precision="float64",
    quick_seeds=3,
    seeds=10,
    checks=(
        *(
            expect(f"{which} branch variance, sum", paper=1.0, low=0.85, high=1.15).derived(
                f"in sums the branches keep variance 1: {which}",
                why="product of branch and shortcut moves the sum by 2·√(b/512)/(1 + b) per block, 10 % in all at most",
            )
            for which in ("smallest", "largest")
        ),
        expect("last branch variance, concatenation", paper="not compatible", high=0.15).derived(
            "in concatenations the branches fade, since no variance grows that α could undo",
            why="1/12 of the mean variance of its inputs, which is below 1",
        ),
        expect("branch variance over closed form, concatenation", low=0.85, high=1.15).derived(
            "variance of the last branch in concatenations, over its closed form",
            why="64 rows of norm 1 after correlated inputs: √(2/64) = 18 % for one layer, of which the mean over the "
            "earlier ones hands on a tenth each; below it for ten seeds",
        ),
        expect("last branch variance, gate", paper="probably not compatible", high=0.15).derived(
            "with gates the branches fade", why="1/12 of a variance that gates do not raise"
        ),
        expect("other skips that nf admits", paper="not possible to directly apply", high=0.0).printed(
            "normfree refuses the method for dense and highway networks", why="a count", exact=True
        ),
        expect(
            "share of normalized weight layers, NF-ResNet-50",
            paper="they do rely on an adaptation of WN",
            low=1.0,
            high=1.0,
        ).printed("all weight layers of an NF-ResNet but the classifier are normalized", why="a count", exact=True),
        expect(
            "variance in training over testing, dropout",
            paper="differences between training and testing",
            low=0.99 * (0.5 / 0.8 - 0.5 / math.pi) / (0.5 - 0.5 / math.pi),
            high=1.01 * (0.5 / 0.8 - 0.5 / math.pi) / (0.5 - 0.5 / math.pi),
        ).derived(
            "factor by which plain dropout of 20 % after ReLU changes the variance",
            why="(E[x²]/(1 - p) - E[x]²)/Var[x] = 1.37 for ReLU of N(0, 1); a million draws leave 0.2 %",
        ),
    ),
)
@undisturbed
def sec5_1(settings: Settings) -> Measurement:
    """Variance of scaled branches in three kinds of skips, and after dropout. Reference: normdead, section 5.1."""
    exact = expected_concatenation()

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        curves = {kind: scaled_branches(kind, seed) for kind in _KINDS}
        x = normal((_DRAWS,), generator(seed)).relu()
        torch.default_generator.manual_seed(seed + 10_000)  # not x's seed, so that the mask is independent of x
        numbers = {
            "smallest branch variance, sum": min(curves["sum"]),
            "largest branch variance, sum": max(curves["sum"]),
            "last branch variance, concatenation": curves["concatenation"][-1],
            "branch variance over closed form, concatenation": curves["concatenation"][-1] / exact[-1],
            "last branch variance, gate": curves["gate"][-1],
            "variance in training over testing, dropout": float(nn.functional.dropout(x, 0.2).var() / x.var()),
        }
        return numbers, curves

    numbers, curves = settings.over_seeds(measured)
    model = build("preact_resnet50", "nf")
    kinds = [weight_kind(model.get_submodule(layer.name)) for layer in model.plan.hidden()]
    return Measurement(
        values={
            **numbers,
            "other skips that nf admits": len(set(get("nf").skips) & set(SKIPS_WITHOUT_SEQUENCES) - {"residual"}),
            "share of normalized weight layers, NF-ResNet-50": kinds.count("standardized") / len(kinds),
        },
        panels=(
            chart(
                "variance of the branch under NF's scaling",
                {kind: means(of) for kind, of in curves.items()} | {"concatenation, closed form": tuple(exact)},
                "mean over channels",
                "block",
                note="the concatenation lies on its closed form",
            ),
        ),
        notes=(
            "the time that centred weight norm takes is in normdead/sec2_3_costs",
            "the closed form takes the variance of inputs as equal, and they differ once branches fade",
        ),
    )
