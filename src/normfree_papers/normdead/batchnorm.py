"""The claim of `normdead` on the backward pass of batch norm: equation 3, which centres the gradient.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 2.2, equations 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.normalizers import normalizer
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect, near
from normfree_papers.claims.depth_curves import chart, means
from normfree_papers.normdead.float64_draws import apart, generator, normal, rounding

_IMAGES = (16, 6, 6, 6)  # as many channels as columns, so that the listing runs
_OVER = (0, 2, 3)


def batch_normalize(x: Tensor, *, hold: bool = False, correction: int = 0) -> Tensor:
    """Equation 2 without ε; `hold` detaches the statistics, and `correction=1` is the default variance of torch."""
    mu, var = x.mean(_OVER, keepdim=True), x.var(_OVER, correction=correction, keepdim=True)
    return (x - mu.detach()) / var.detach().sqrt() if hold else (x - mu) / var.sqrt()


def equation3(g: Tensor, x_hat: Tensor, sigma: Tensor, *, summed: bool = False) -> Tensor:
    """(g - μ_g - cov(g, x̂)·x̂)/σ, with μ_g the mean over the batch, or the sum, as the text prints it."""
    mu = g.sum(_OVER, keepdim=True) if summed else g.mean(_OVER, keepdim=True)
    return (g - mu - (g * x_hat).mean(_OVER, keepdim=True) * x_hat) / sigma


def listing(x: Tensor) -> Tensor:
    """Batch norm as in the listing of the survey, which drops the reduced dimensions."""
    return (x - torch.mean(x, dim=(0, -1, -2))) / torch.sqrt(torch.var(x, dim=(0, -1, -2)) + 1e-5)


def remaining_mean(gradient: Tensor) -> Tensor:
    """The mean over the batch relative to the root mean square, for every channel."""
    return gradient.mean(_OVER).abs() / gradient.square().mean(_OVER).sqrt()


def _through(
    normalize: Callable[[Tensor], Tensor], x: Tensor, gamma: Tensor, beta: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x̂ and the gradients at y = γx̂ + β, x̂ and x of ½‖ReLU(y) - target‖²."""
    x = x.clone().requires_grad_()
    x_hat = normalize(x)
    y = gamma * x_hat + beta
    loss = 0.5 * (torch.relu(y) - target).square().sum()
    at_y, at_hat, at_x = torch.autograd.grad(loss, (y, x_hat, x))
    return x_hat.detach(), at_y, at_hat, at_x


@claim(
    id="normdead/eq3",
    where="Section 2.2, equations 2 and 3",
    statement="Batch norm centres the gradient over the batch and removes its part along the normalized signal.",
    paper_value="equation 3, an identity",
    how="Gradients of a loss after batch norm by automatic differentiation in float64, compared with equation 3, with "
    "statistics held fixed and with layer norm.",
    cost=Cost(quick_seconds=1, full_seconds=1),
    precision="float64",
    seeds=10,
    quick_seeds=10,
    version=2,
    checks=(
        *(
            rounding(name, statement)
            for name, statement in (
                ("gradient against equation 3", "equation 3 with μ_g the mean of g, relative difference"),
                (
                    "the library's batch norm against equation 3",
                    "equation 3 for the library's batch norm, its ε in σ, relative difference",
                ),
                ("gradient at x̂ against γ times that at y", "the affine part only scales the gradient"),
                (
                    "mean of the gradient, batch norm",
                    "the gradient is centred: largest |mean|/rms of a channel over the batch",
                ),
                ("gradient along x̂, batch norm", "the gradient has no part along x̂: largest |mean of product|/rms"),
            )
        ),
        expect("printed μ_g against the gradient", paper=0.0, low=1.0).derived(
            "relative error of the formula with μ_g = Σ g, as printed",
            why="the sum is 576 times the mean; the mean would have to be below 1/576 of g, as it is by chance only "
            "if g is centred already",
            erratum="μ_g lacks the factor 1/|B| that cov(g, x̂) has beside it",
        ),
        *(
            expect(f"mean of the gradient, {name}", paper=paper, low=0.05).derived(
                statement,
                why="a centred gradient leaves 1e-16, and 576 independent numbers of mean 0 would leave 1/√576 = 0.04 "
                "by chance; a rectified loss has gradients of one sign in most places",
            )
            for name, statement, paper in (
                ("before", "the gradient that arrives is not centred (the control)", None),
                (
                    "statistics held fixed",
                    "the gradient is not centred where the statistics are computed outside the gradient step (the "
                    "control)",
                    "blows up when computed outside the gradient descent step",
                ),
                (
                    "layer norm",
                    "the gradient is not centred by layer norm, which centres over features (the control)",
                    None,
                ),
            )
        ),
        near("weight of x̂ over cov(g, x̂), listing's variance", 576 / 575, 1e-9, paper=1.0).derived(
            "with torch.var, as in the listing, the part along x̂ is n/(n - 1) times that of equation 3",
            why="the unbiased variance, n = 16·6·6; rounding",
            erratum="torch.var divides by n - 1, so that x̂ has variance (n - 1)/n and equation 3 is off by 1/n",
        ),
        expect("channel mean after the listing", paper=0.0, low=0.1).derived(
            "the listing as printed: largest |mean| of a channel that should have mean 0",
            why="channels were given means of one standard deviation, and it subtracts them from columns; the largest "
            "of six is below a tenth with a probability of 1e-6",
            erratum="its means have the shape (C,), which broadcasts over the last dimension: it raises an error "
            "unless there are as many columns as channels, and then normalizes the columns; keepdim=True is missing",
        ),
    ),
)
def eq3(settings: Settings) -> Measurement:
    """Gradients through batch norm compared with equation 3. Reference: normdead, section 2.2, equations 2 and 3."""
    numbers, shown = settings.over_seeds(_measured)
    words = "raises an error" if all(_listing_is_refused(seed) for seed in settings.seeds) else "runs"
    return Measurement(
        values=numbers,
        panels=(
            chart(
                "what is left of the gradient's mean over the batch",
                {name: [max(v, 1e-18) for v in means(of)] for name, of in shown.items()},
                "|mean| over root mean square",
                "channel",
                note="before is at x̂, the others at x; with statistics held fixed it is the same as before",
            ),
        ),
        notes=(f"on images with fewer columns than channels the listing {words}",),
    )


def _images(g: torch.Generator) -> Tensor:
    """Images whose channels have different means and deviations."""
    channels = (1, _IMAGES[1], 1, 1)
    return normal(_IMAGES, g) * (1 + torch.rand(channels, generator=g, dtype=torch.float64)) + normal(channels, g)


def _measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The numbers of one draw, and what is left of the mean of four gradients, by channel."""
    g = generator(seed)
    x, channels = _images(g), (1, _IMAGES[1], 1, 1)
    gamma, beta, target = 0.5 + normal(channels, g).abs(), normal(channels, g), normal(_IMAGES, g)
    x_hat, at_y, at_hat, at_x = _through(batch_normalize, x, gamma, beta, target)
    sigma = x.std(_OVER, correction=0, keepdim=True)
    held = _through(lambda t: batch_normalize(t, hold=True), x, gamma, beta, target)[-1]
    layer = _through(nn.LayerNorm(_IMAGES[1:], elementwise_affine=False, eps=0.0), x, gamma, beta, target)[-1]
    module: Any = normalizer("batch", _IMAGES[1]).double()
    its_hat, _, its_arriving, its_gradient = _through(module, x, gamma, beta, target)
    its_sigma = (sigma.square() + module.eps).sqrt()
    gradients = {"before": at_hat, "batch norm": at_x, "statistics held fixed": held, "layer norm": layer}
    left = {name: remaining_mean(gradient).tolist() for name, gradient in gradients.items()}
    numbers = {
        "gradient against equation 3": apart(at_x, equation3(at_hat, x_hat, sigma)),
        "the library's batch norm against equation 3": apart(its_gradient, equation3(its_arriving, its_hat, its_sigma)),
        "printed μ_g against the gradient": apart(equation3(at_hat, x_hat, sigma, summed=True), at_x),
        "gradient at x̂ against γ times that at y": apart(at_hat, gamma * at_y),
        "gradient along x̂, batch norm": float(remaining_mean(at_x * x_hat).max()),
        "weight of x̂ over cov(g, x̂), listing's variance": _weight_along(x, gamma, beta, target),
        "channel mean after the listing": float(listing(x).mean(_OVER).abs().max()),
        **{f"mean of the gradient, {name}": max(of) for name, of in left.items()},
    }
    return numbers, left


def _weight_along(x: Tensor, gamma: Tensor, beta: Tensor, target: Tensor) -> float:
    """The part along x̂ that the unbiased variance removes, relative to cov(g, x̂); mean over channels."""
    x_hat, _, g, at_x = _through(lambda t: batch_normalize(t, correction=1), x, gamma, beta, target)
    removed = g - g.mean(_OVER, keepdim=True) - at_x * x.std(_OVER, correction=1, keepdim=True)
    weight = (removed * x_hat).sum(_OVER) / x_hat.square().sum(_OVER)
    return float((weight / (g * x_hat).mean(_OVER)).mean())


def _listing_is_refused(seed: int) -> bool:
    """Whether the listing raises an error on images with fewer columns than channels."""
    try:
        listing(_images(generator(seed))[..., :-1])
    except RuntimeError:
        return True
    return False
