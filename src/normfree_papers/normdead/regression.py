"""The claim of `normdead` on linear regression: its Hessian, for raw, normalized and whitened data.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 2.1, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from normfree.diagnostics.curvature import Hessian
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import chart, decades, means, table
from normfree_papers.normdead.float64_draws import apart, generator, normal, rounding

_SAMPLES, _FEATURES = 2000, 8
_FORMS = ("raw", "centred", "normalized", "whitened")
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def data_forms(x: Tensor) -> dict[str, Tensor]:
    """The data as they are, centred, normalized, and whitened, by their own statistics."""
    centred = x - x.mean(0)
    eigenvalues, vectors = torch.linalg.eigh(centred.T @ centred / len(x))
    whitened = centred @ vectors / eigenvalues.sqrt()
    return {"raw": x, "centred": centred, "normalized": centred / centred.std(0, correction=0), "whitened": whitened}


def regression_hessian(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The Hessian of mean ½(wᵀx - y)², column by column, by the library's Hessian-vector products."""
    model = nn.Linear(len(w), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(w)
    product = Hessian(model, x, y, loss=lambda out, target: 0.5 * (out.squeeze(1) - target).square().mean())
    return torch.stack([product(unit) for unit in torch.eye(len(w), dtype=torch.float64)])


def descent(x: Tensor, y: Tensor, steps: Sequence[int]) -> list[float]:
    """Excess loss after steps of gradient descent at rate 1/λ_max, relative to that of w = 0."""
    second = x.T @ x / len(x)
    best = torch.linalg.lstsq(x, y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    rate = 1 / torch.linalg.eigvalsh(second)[-1]
    w, found = torch.zeros_like(best), []
    for step in range(max(steps) + 1):
        if step == 0 or step in steps:
            found.append(float((w - best) @ second @ (w - best)))
        w = w - rate * (x.T @ (x @ w - y) / len(x))
    return [value / found[0] for value in found[1:]]


def condition(hessian: Tensor) -> float:
    """Largest over smallest eigenvalue of a symmetric matrix."""
    eigenvalues = torch.linalg.eigvalsh(hessian)
    return float(eigenvalues[-1] / eigenvalues[0])


@claim(
    id="normdead/eq1",
    where="Section 2.1, equation 1",
    statement="The Hessian of linear regression is the covariance of the data, so that normalized data make it easier "
    "and whitened data easiest.",
    paper_value="equation 1, an identity: the mean of x xᵀ, called the covariance",
    how="Hessians by automatic differentiation in float64 on 2,000 correlated samples of 8 features with a mean and "
    "different scales, and gradient descent at rate 1/λ_max.",
    cost=Cost(quick_seconds=1, full_seconds=2),
    precision="float64",
    seeds=10,
    quick_seeds=10,
    version=2,
    checks=(
        rounding("Hessian against the mean of x xᵀ", "the two sides of equation 1, relative difference"),
        rounding("Hessian at other weights and targets", "the Hessian depends on neither w nor y: relative change"),
        rounding(
            "Hessian against the covariance, centred data",
            "for data of mean 0 the Hessian is the covariance, as the text says",
        ),
        rounding(
            "Hessian against the covariance and μμᵀ, raw data",
            "for data of mean μ the Hessian is the covariance plus μμᵀ",
            None,
        ),
        expect("Hessian against the covariance, raw data", paper=0.0, low=0.1).derived(
            "for data of mean μ the Hessian is not the covariance",
            why="each mean is 1 to 2 times the scale of its feature, so that μμᵀ has at least the size of the "
            "covariance of uncorrelated features; a tenth leaves room for the correlated ones",
            erratum="the right side of equation 1 is the second moment, which is the covariance of centred data only",
        ),
        expect("condition number, normalized over raw", paper="at least some", high=1.0).reading(
            "normalized data have some of the benefit",
            why="our reading of the word 'some': a condition number below that of raw data; 1 or more refutes it",
        ),
        expect("log10 condition number, normalized", paper="at least some", low=math.log10(1.5)).derived(
            "normalized data do not have all of the benefit: the Hessian is not the identity where features are "
            "correlated (the control)",
            why="correlations of 0.2 alone give (1 + 0.2)/(1 - 0.2) = 1.5; the logarithm, since the number is heavy-"
            "tailed over draws",
        ),
        expect("condition number less 1, whitened", paper=0.0, high=1e-9).derived(
            "the Hessian of whitened data is the identity",
            why="rounding of 1e-16, times the condition of the covariance that is divided out (about 1e3), with room",
        ),
        expect("excess loss after one step, whitened", paper="much easier", high=1e-20).derived(
            "with whitened data one step of gradient descent is enough", why="the square of rounding"
        ),
        expect("decades of excess loss after 1,000 steps, raw over normalized", paper="easier", low=0.0).reading(
            "gradient descent on raw data is slower than on normalized data",
            why="our reading of the word 'easier': less loss after as many steps; 0 decades or less refute it",
        ),
        expect("excess loss over its bound", high=1 + 1e-6).derived(
            "at no step is the loss above (1 - 1/κ)²ᵗ: the condition number κ governs learning",
            why="the slowest direction shrinks by 1 - 1/κ per step; rounding",
        ),
        rounding(
            "block of a layer against v²·mean of x xᵀ",
            "in a network of two linear layers the block of a neuron's weights is the same matrix times v²",
            "directly carry over",
        ),
    ),
)
def eq1(settings: Settings) -> Measurement:
    """Hessians of linear regression and covariances. Reference: normdead, section 2.1, equation 1; LeCun 1998."""
    numbers, curves = settings.over_seeds(_measured)
    losses, spectra = ({form: [draw[k] for draw in draws] for form, draws in curves.items()} for k in (0, 1))
    return Measurement(
        values=numbers,
        panels=(
            chart(
                "eigenvalues of the Hessian",
                {form: means(spectra[form]) for form in _FORMS},
                "mean over seeds",
                "number of the eigenvalue",
                note="the flatter, the easier",
            ),
            chart(
                "gradient descent at rate 1/λ_max",
                {form: [max(loss, 1e-16) for loss in means(losses[form])] for form in _FORMS},
                "excess loss over that of w = 0",
                "step",
                x=_STEPS,
                log_x=True,
                note="whitened data are done after one step, and losses below 1e-16 are drawn there",
            ),
        ),
        tables=table(
            "Largest over smallest eigenvalue of the Hessian",
            ("data", "condition number"),
            ((form, f"{fmean([s[0] / s[-1] for s in spectra[form]]):.4g}") for form in _FORMS),
        ),
        notes=("centring alone need not lower the condition number: μμᵀ lifts the smallest eigenvalues too",),
    )


def _measured(seed: int) -> tuple[dict[str, float], dict[str, tuple[list[float], list[float]]]]:
    """The numbers of one draw, and the excess losses and the Hessian's eigenvalues for every form of the data."""
    g = generator(seed)
    scales = torch.logspace(-0.5, 0.5, _FEATURES, dtype=torch.float64)
    mixed = normal((_SAMPLES, _FEATURES), g) @ (torch.eye(_FEATURES) + 0.3 * normal((_FEATURES, _FEATURES), g))
    x = (mixed + 1 + torch.rand(_FEATURES, generator=g, dtype=torch.float64)) * scales
    y, w, v = normal((_SAMPLES,), g), normal((_FEATURES,), g), normal((3,), g)
    hessian, other = regression_hessian(x, y, w), regression_hessian(x, 3 * y, 5 * w)
    second = torch.einsum("ni,nj->ij", x, x) / _SAMPLES
    forms = data_forms(x)
    hessians = {form: regression_hessian(data, y, w) for form, data in forms.items()}
    centred = torch.cov(x.T, correction=0)
    shift = torch.outer(x.mean(0), x.mean(0))
    losses = {form: descent(data, y, _STEPS) for form, data in forms.items()}
    bounds = [
        loss / bound
        for form in _FORMS
        for t, loss in zip(_STEPS, losses[form], strict=True)
        if (bound := (1 - 1 / condition(hessians[form])) ** (2 * t)) > 1e-20  # below it there is only rounding
    ]
    conditions = {form: condition(matrix) for form, matrix in hessians.items()}
    numbers = {
        "Hessian against the mean of x xᵀ": apart(hessian, second),
        "Hessian at other weights and targets": apart(other, hessian),
        "Hessian against the covariance, centred data": apart(hessians["centred"], centred),
        "Hessian against the covariance and μμᵀ, raw data": apart(hessian, centred + shift),
        "Hessian against the covariance, raw data": apart(hessian, centred),
        "condition number, normalized over raw": conditions["normalized"] / conditions["raw"],
        "log10 condition number, normalized": math.log10(conditions["normalized"]),
        "condition number less 1, whitened": conditions["whitened"] - 1,
        "excess loss after one step, whitened": losses["whitened"][0],
        "decades of excess loss after 1,000 steps, raw over normalized": decades(
            [losses["normalized"][-1], losses["raw"][-1]]
        ),
        "excess loss over its bound": max(bounds),
        "block of a layer against v²·mean of x xᵀ": max(_layer_blocks(x, y, v, g)),
    }
    return numbers, {form: (losses[form], torch.linalg.eigvalsh(hessians[form]).flip(0).tolist()) for form in _FORMS}


def _layer_blocks(x: Tensor, y: Tensor, v: Tensor, g: torch.Generator) -> list[float]:
    """The relative difference of each neuron's block of the Hessian of vᵀWx from v² times the mean of x xᵀ."""
    weight, second = normal((len(v), x.shape[1]), g), x.T @ x / len(x)

    def loss(row: Tensor, i: int) -> Tensor:
        rows = torch.stack([row if j == i else weight[j] for j in range(len(v))])
        return 0.5 * (x @ rows.T @ v - y).square().mean()

    blocks = [torch.autograd.functional.hessian(lambda row, i=i: loss(row, i), weight[i]) for i in range(len(v))]
    return [apart(block, v[i] ** 2 * second) for i, block in enumerate(blocks)]
