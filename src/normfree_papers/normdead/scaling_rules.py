"""The claim of `normdead` on scaling rules: mean and variance over depth under factors on shortcut and branch.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 3.2 (equation 5) and section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from normfree.models import Network, build
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect
from normfree_papers.claims.depth_curves import chart, means, table
from normfree_papers.normdead.float64_draws import apart, generator, normal

_DEPTH, _WIDTH, _BATCH = 16, 256, 64  # of a quick run
_FULL_DEPTH, _FULL_WIDTH = 40, 320
_SEEDS, _FULL_SEEDS = 10, 16


@dataclass(frozen=True)
class _Rule:
    """A method with its options at depth L, and the factors (a_l, β_l) of the survey, independent of `theory`."""

    method: Callable[[int], str]
    factors: Callable[[int, int], tuple[float, float]]
    text: str

    def growth(self, depth: int) -> list[float]:
        """Mean square after each block relative to the input of the first: Π (a² + β²)."""
        found = [1.0]
        for l in range(1, depth + 1):
            a, beta = self.factors(l, depth)
            found.append(found[-1] * (a**2 + beta**2))
        return found

    def error(self, depth: int, width: int, seeds: int) -> float:
        """Standard error of the logarithm of the growth for one input.

        A branch of two layers varies by √(7/width) in the mean square, and its product with the shortcut by
        √(1/width) of the two norms.
        """
        total = 0.0
        for l in range(1, depth + 1):
            a, beta = self.factors(l, depth)
            total += (7 * beta**4 + 4 * a**2 * beta**2) / (a**2 + beta**2) ** 2 / width
        return math.sqrt(total / seeds)


_HALF = math.sqrt(0.5)
RULES: dict[str, _Rule] = {
    "plain sum": _Rule(lambda L: "he_in", lambda l, L: (1.0, 1.0), "2^L"),
    "√½": _Rule(lambda L: "sqrt_half", lambda l, L: (_HALF, _HALF), "1"),
    "β = 0.1": _Rule(lambda L: "small_branch:beta=0.1", lambda l, L: (1.0, 0.1), "(1 + β²)^L"),
    "β = 0.3": _Rule(lambda L: "small_branch:beta=0.3", lambda l, L: (1.0, 0.3), "(1 + β²)^L"),
    "β = 0.9^l": _Rule(lambda L: "hanin:r=0.9", lambda l, L: (1.0, 0.9**l), "Π(1 + 0.81^l)"),
    "β = 1/L": _Rule(lambda L: f"small_branch:beta={1 / L!r}", lambda l, L: (1.0, 1 / L), "(1 + 1/L²)^L"),
    "β = 1/√L": _Rule(lambda L: f"small_branch:beta={L**-0.5!r}", lambda l, L: (1.0, L**-0.5), "(1 + 1/L)^L"),
    "weight norm": _Rule(lambda L: "wn", lambda l, L: (1.0, L**-0.5), "(1 + 1/L)^L"),
    "Shao": _Rule(lambda L: "shao", lambda l, L: (math.sqrt(1 - 1 / (l + L)), math.sqrt(1 / (l + L))), "1"),
    "SkipInit": _Rule(lambda L: "skipinit", lambda l, L: (1.0, 0.0), "1"),
    "Fixup": _Rule(lambda L: "fixup", lambda l, L: (1.0, 0.0), "1"),
}


def _tolerance(rule: _Rule) -> float:
    """Four standard errors, of the scale that has the larger ones."""
    quick, full = rule.error(_DEPTH, _WIDTH, _SEEDS), rule.error(_FULL_DEPTH, _FULL_WIDTH, _FULL_SEEDS)
    return 4 * max(quick, full) + 1e-6


@torch.no_grad()
def stream(model: Network, x: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Mean, mean square, and the channels' share of squared means in it, before the first block and after each."""
    x = model.stem(x)
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for block in (nn.Identity(), *model.body[0].children()):
        x = block(x)
        square = float(x.square().mean())
        found[0].append(float(x.mean()))
        found[1].append(square)
        found[2].append(float(x.mean(0).square().mean()) / square)
    return found


def scalars(model: nn.Module, names: tuple[str, str]) -> list[tuple[float, float]]:
    """Two scalars of every block; 1 for a scalar that a block lacks."""
    found = []
    for block in (m for m in model.modules() if isinstance(m, Residual)):
        held = [getattr(block, name) for name in names]
        one, two = (float(s.value) if isinstance(s, ScalarMultiplier) else 1.0 for s in held)
        found.append((one, two))
    return found


def output_weights(factors: list[tuple[float, float]]) -> list[float]:
    """The factor of each branch at the output, after the factors of all later shortcuts.

    >>> output_weights([(0.5, 1.0), (0.5, 1.0)])
    [0.5, 1.0]
    """
    return [beta * math.prod(a for a, _ in factors[l + 1 :]) for l, (_, beta) in enumerate(factors)]


@claim(
    id="normdead/sec4_1",
    where="Sections 3.2 (equation 5) and 4.1",
    statement="Scaled sums keep the variance, or bound it: √½, small β, Hanin's b^l, 1/L, Shao's, SkipInit and Fixup.",
    paper_value="no numbers; each check quotes the paper",
    how="Mean, mean square and channels' squared mean over residual MLPs of 16 branches (full: 40) under each rule, "
    "compared with the products of the formulas.",
    cost=Cost(quick_seconds=6, full_seconds=30),
    precision="float64; scalars in float32",
    version=2,
    quick_seeds=_SEEDS,
    seeds=_FULL_SEEDS,
    checks=(
        *(
            expect(
                f"mean square over {rule.text}, {name}",
                paper="explodes" if name == "plain sum" else "under control",
                low=math.exp(-_tolerance(rule)),
                high=math.exp(_tolerance(rule)),
            ).derived(
                f"growth of the mean square over all blocks over its closed form, {name}",
                why="four standard errors: a branch of width W varies by √(7/W), its product with the shortcut by "
                "√(1/W)",
            )
            for name, rule in RULES.items()
        ),
        expect(
            "growth, plain sum", paper="explodes", low=2.0**_DEPTH / math.exp(_tolerance(RULES["plain sum"]))
        ).derived(
            "the mean square of plain sums doubles at every block (the control)",
            why="2^L for the smaller L, four standard errors",
        ),
        expect("growth over exp(r²/(1 - r²)), Hanin", paper="converges", high=1.0).derived(
            "Hanin's stays below the bound of its converging sum of factors", why="Π(1 + r^(2l)) ≤ exp(Σ r^(2l))"
        ),
        expect("largest |mean| over rms", high=4 / math.sqrt(_WIDTH)).derived(
            "no rule makes the mean of the stream drift: largest |mean| over the rules",
            why="branches end in weights of mean 0, so that the mean over a width of W is N(0, 1/W): four standard "
            "deviations, for there are eleven rules; a single branch that ends in ReLU would add 1/√π = 0.56",
        ),
        expect("spread of output weights, Shao", paper=1.0, low=1.0, high=1 + 1e-4).derived(
            "under Shao's rule all branches weigh the same at the output: largest over smallest weight",
            why="β_l·Π√(1 - β²) = 1/√(2L) for every l; factors are kept in float32",
            exact=True,
        ),
        expect("output weight of Shao over 1/√(2L)", low=1 - 1e-4, high=1 + 1e-4).derived(
            "under Shao's rule the weight of a branch at the output is 1/√(2L)",
            why="the product telescopes with c = L; float32",
            exact=True,
        ),
        expect("spread of output weights, √½", paper="more general", low=100.0).derived(
            "under √½ the last branch outweighs the first (the control)",
            why="2^((L - 1)/2) = 181 for 16 branches",
            exact=True,
        ),
        expect("Shao against √½, one block", paper=0.0, high=1e-6).derived(
            "for a single block Shao's rule is the same as √½",
            why="f(√½·x) = √½·f(x) for ReLU without biases; factors are kept in float32",
        ),
        aside("Shao against √½, one block, tanh", paper="equivalent", low=0.01).derived(
            "Shao's rule differs from √½ where the branch is not homogeneous (the control)",
            why="equation 5 scales the branch's input by α, Shao's rule its output; a percent is no rounding",
        ),
        expect(
            "branch over shortcut mean square times L, weight norm",
            paper="1/L: β = L^-1 gives a variance of L^-2",
            low=0.75,
            high=1.25,
        ).derived(
            "Arpit's branches have variance 1/L, so β = L^-1/2, in a stage of L",
            why="1; a branch varies by √(7/256) = 17 %, 10 seeds leave 5 %: more than four standard errors",
            erratum="Arpit et al. scale by 1/√B in every stage of B branches; the survey's L^-1 also keeps the "
            "variance, with branches that hardly count",
        ),
    ),
)
def sec4_1(settings: Settings) -> Measurement:
    """Moments of the stream under every rule of the survey. Reference: normdead, sections 3.2 and 4.1."""
    depth, width = (_DEPTH, _WIDTH) if settings.quick else (_FULL_DEPTH, _FULL_WIDTH)

    def drawn(name: str, g: torch.Generator) -> Network:
        method = RULES[name].method(depth)
        return build(f"resmlp-{depth}-{width}", method, size=1, in_channels=width, generator=g).double()

    def measured(name: str, seed: int) -> tuple[list[float], list[float], list[float]]:
        g = generator(seed)
        return stream(drawn(name, g), normal((_BATCH, width), g))

    found = settings.over_seeds_of(RULES, measured)
    values: dict[str, float | list[float]] = {}
    for name, rule in RULES.items():
        exact = rule.growth(depth)[-1]
        values[f"mean square over {rule.text}, {name}"] = [q[-1] / q[0] / exact for _, q, _ in found[name]]
    fixed = {"Shao": ("a", "beta"), "√½": ("c", "c")}  # the scalars on shortcut and branch
    weights = {name: output_weights(scalars(drawn(name, generator(0)), of)) for name, of in fixed.items()}
    drift = [[abs(m[-1]) / math.sqrt(q[-1]) for m, q, _ in ones] for ones in found.values()]
    values |= {
        "growth, plain sum": [q[-1] / q[0] for _, q, _ in found["plain sum"]],
        "growth over exp(r²/(1 - r²)), Hanin": [q[-1] / q[0] / math.exp(0.81 / 0.19) for _, q, _ in found["β = 0.9^l"]],
        "largest |mean| over rms": [max(rules) for rules in zip(*drift, strict=True)],
        "spread of output weights, Shao": max(weights["Shao"]) / min(weights["Shao"]),
        "output weight of Shao over 1/√(2L)": fmean(weights["Shao"]) * math.sqrt(2 * depth),
        "spread of output weights, √½": max(weights["√½"]) / min(weights["√½"]),
        "Shao against √½, one block": [one_block(seed) for seed in settings.seeds],
        "Shao against √½, one block, tanh": [one_block(seed, nn.Tanh()) for seed in settings.seeds],
        "branch over shortcut mean square times L, weight norm": [
            (q[1] / q[0] - 1) * depth for _, q, _ in found["weight norm"]
        ],
    }
    positions = range(depth + 1)
    growth = {name: means([[v / q[0] for v in q] for _, q, _ in ones]) for name, ones in found.items()}
    shares = {name: means([share for _, _, share in ones]) for name, ones in found.items()}
    return Measurement(
        values=values,
        panels=(
            chart("growth of the mean square", growth, "over that of the input", "block", x=positions),
            chart(
                "without the plain sum, beside Hanin's closed form",
                {name: growth[name] for name in RULES if name != "plain sum"}
                | {"Π(1 + 0.81^l)": RULES["β = 0.9^l"].growth(depth)},
                "over that of the input",
                "block",
                x=positions,
                log_y=False,
            ),
            chart(
                "squared mean of channels",
                shares,
                "share of the mean square",
                "block",
                x=positions,
                log_y=False,
                note="the larger, the more alike the signals of different inputs",
            ),
        ),
        tables=table(
            f"After {depth} blocks",
            ("rule", "formula", "mean square", "expected", "share of channels' squared mean"),
            (
                (name, r.text, f"{growth[name][-1]:.4g}", f"{r.growth(depth)[-1]:.4g}", f"{shares[name][-1]:.2f}")
                for name, r in RULES.items()
            ),
        ),
        notes=(
            "in equation 5 the plain α scales the branch's input as well as the shortcut; for ReLU without biases that "
            "is the same as scaling the sum",
            "Fixup's exponent is -1/(2m - 2) with m the number of layers of a branch; the survey's 'for all layers k' "
            "reads as if it changed from layer to layer",
            f"√½ keeps the mean square, of which {shares['√½'][-1]:.0%} is the squared mean of channels at the end: "
            "what inputs differ in fades all the same",
            "SkipInit starts at 0 here; at its upper end, β = 1/√L, the variance grows by less than e",
        ),
    )


@torch.no_grad()
def one_block(seed: int, activation: nn.Module | None = None) -> float:
    """Relative difference of one block under Shao's rule and √½ with the same weights."""
    outs = []
    for method in ("shao", "sqrt_half"):
        g = generator(seed)
        model = build("resmlp-1-64", method, size=1, in_channels=64, generator=g).double()
        block: Any = next(m for m in model.modules() if isinstance(m, Residual))
        x = normal((32, 64), g)
        if activation is None:
            outs.append(block(x))
            continue
        block.branch.act = activation
        # Equation 5 with α = √½: the branch reads the scaled signal too.
        outs.append(block(x) if method == "shao" else _HALF * x + block.branch(_HALF * x))
    return apart(outs[0], outs[1])
