"""The claim of `normdead` on invariances of normalizers: to shifts and scales of data, samples, neurons and weights.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 2.3; Ba 2016 (the terms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.normalizers import ActivationName, NormName, activation, normalizer
from normfree.nn.weight_layers import CONVOLUTIONS, LINEARS, WeightKind
from normfree.report import Table
from normfree_papers.claims.claim import Check, Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import table
from normfree_papers.normdead.float64_draws import ROUNDING, generator, normal, undisturbed

_FACTOR = 3.0  # no power of two, which would change no digit

# Takes inputs (N, C, …), weights (out, in, …) and a generator, and returns changed inputs and weights.
Change = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


def _per(tensor: Tensor, dim: int, g: torch.Generator) -> Tensor:
    """Draws from N(0, 1), one per index of a dimension, shaped to broadcast."""
    shape = [1] * tensor.dim()
    shape[dim] = tensor.shape[dim]
    return normal(shape, g)


def _factors(tensor: Tensor, dim: int, g: torch.Generator) -> Tensor:
    """Positive factors around 1, one per index of a dimension."""
    return _per(tensor, dim, g).exp()


CHANGES: dict[str, tuple[str, Change]] = {
    "data scale": ("all inputs times 3", lambda x, w, g: (_FACTOR * x, w)),
    "data shift": ("one vector added to all inputs", lambda x, w, g: (x + _per(x, 1, g), w)),
    "sample scale": ("every input times a factor of its own", lambda x, w, g: (x * _factors(x, 0, g), w)),
    "sample shift": ("a number of its own added to all of an input", lambda x, w, g: (x + _per(x, 0, g), w)),
    "weight scale": ("all weights times 3", lambda x, w, g: (x, _FACTOR * w)),
    "weight shift": ("one vector added to the weights of all neurons", lambda x, w, g: (x, w + normal(w[:1].shape, g))),
    "neuron scale": ("the weights of every neuron times a factor", lambda x, w, g: (x, w * _factors(w, 0, g))),
    "neuron shift": ("a number added to all weights of a neuron", lambda x, w, g: (x, w + _per(w, 0, g))),
    "other samples": (
        "all inputs but the first replaced, and the first output looked at",
        lambda x, w, g: (torch.cat([x[:1], normal(x[1:].shape, g)]), w),
    ),
}


@dataclass(frozen=True)
class _Normalizer:
    """A normalizer of the survey, with the changes to which it is invariant by algebra.

    `of_vectors` are further changes for vectors only. `kinds` tells whether it exists for vectors and images.
    """

    keeps: frozenset[str]
    of_vectors: frozenset[str] = frozenset()
    norm: NormName | None = None
    weight: WeightKind = "plain"
    act: ActivationName | None = None
    inference: bool = False
    kinds: tuple[str, ...] = ("vectors", "images")

    def kept(self, kind: str) -> frozenset[str]:
        """The changes to which it is invariant, for vectors or images."""
        return self.keeps | self.of_vectors if kind == "vectors" else self.keeps


_ALONE = frozenset({"other samples"})
_SAMPLE = frozenset({"data scale", "sample scale", "weight scale"}) | _ALONE
# A common shift of all neurons adds one number to the features of an input; of an image, one number per pixel.
_COMMON = frozenset({"weight shift"})
NORMALIZERS: dict[str, _Normalizer] = {
    "none": _Normalizer(_ALONE),
    "batch norm": _Normalizer(frozenset({"data scale", "data shift", "weight scale", "neuron scale"}), norm="batch"),
    "batch norm, inference": _Normalizer(_ALONE, norm="batch", inference=True),
    "layer norm": _Normalizer(_SAMPLE, of_vectors=_COMMON, norm="layer"),
    "group norm": _Normalizer(_SAMPLE, of_vectors=_COMMON, norm="group"),
    "instance norm": _Normalizer(
        _SAMPLE | {"data shift", "sample shift", "neuron scale"}, norm="instance", kinds=("images",)
    ),
    "weight norm": _Normalizer(frozenset({"weight scale", "neuron scale"}) | _ALONE, weight="weight_norm"),
    "normalization propagation": _Normalizer(
        frozenset({"weight scale", "neuron scale"}) | _ALONE, weight="weight_norm", act="normprop"
    ),
    "centred weight norm": _Normalizer(
        frozenset({"sample shift", "weight scale", "neuron scale", "neuron shift"}) | _ALONE, weight="standardized"
    ),
    "spectral norm": _Normalizer(frozenset({"weight scale"}) | _ALONE, weight="spectral"),
    "self-normalizing": _Normalizer(_ALONE, act="selu"),
}


def weighted(spec: _Normalizer, x: Tensor, weight: Tensor) -> Tensor:
    """The output of the weight layer with these raw weights; images have circular padding."""
    outputs, inputs = weight.shape[:2]
    layer: nn.Module
    if x.dim() > 2:
        layer = CONVOLUTIONS[spec.weight](inputs, outputs, 3, padding=1, padding_mode="circular", bias=False)
    else:
        layer = LINEARS[spec.weight](inputs, outputs, bias=False)
    layer = layer.double().eval()
    with torch.no_grad():
        if spec.weight == "spectral":
            layer.set_weight_(weight)  # type: ignore[operator]  # sets its singular vectors as well
        else:
            layer.weight.copy_(weight)
        return layer(x)  # type: ignore[no-any-return]


def normalized(spec: _Normalizer, out: Tensor, seen: Tensor) -> Tensor:
    """The normalizer and activation after a weight layer; statistics for inference are those of `seen`."""
    if spec.norm is not None:
        norm: Any = normalizer(spec.norm, out.shape[1], spatial=out.dim() > 2).double()
        norm.eps = 1e-300  # torch refuses 0; the rest of a change is then rounding
        if spec.inference:
            norm.momentum = 1.0
            norm(seen)
            norm.eval()
        out = norm(out).detach()
    return out if spec.act is None else activation(spec.act).double()(out)


def measure_changes(kind: str, seed: int) -> dict[tuple[str, str], float]:
    """The relative change ‖y' - y‖/‖y‖ of the output, for every normalizer and change."""
    g = generator(seed)
    x, weight = (
        (normal((32, 24), g), normal((16, 24), g))
        if kind == "vectors"
        else (normal((8, 6, 5, 5), g), normal((16, 6, 3, 3), g))
    )
    x = x + _per(x, 1, g)  # with a mean, as of real data
    found = {}
    for number, (change, (_, apply)) in enumerate(CHANGES.items()):
        changed_x, changed_weight = apply(x, weight, generator(1000 * (seed + 1) + number))
        for name, spec in NORMALIZERS.items():
            if kind in spec.kinds:
                seen = weighted(spec, x, weight)
                before = normalized(spec, seen, seen)
                after = normalized(spec, weighted(spec, changed_x, changed_weight), seen)
                if change == "other samples":
                    before, after = before[:1], after[:1]
                found[name, change] = float((after - before).norm() / before.norm())
    return found


_NOTICED = 0.05


def _unnoticed(name: str, change: str, statement: str, *, kind: str = "vectors", paper: str = "invariant") -> Check:
    return expect(f"{name}, {change}, {kind}", paper=paper, high=ROUNDING).derived(
        statement, why="float64 without ε: rounding of sums of some hundred terms", exact=True
    )


def _noticed(
    name: str, change: str, statement: str, *, kind: str = "vectors", paper: str | None = None, main: bool = True
) -> Check:
    return expect(f"{name}, {change}, {kind}", paper=paper, low=_NOTICED, main=main).derived(
        statement,
        why="the changes are as large as the signal; an invariant output moves by 1e-16, so a twentieth is no rounding",
    )


@claim(
    id="normdead/sec2_3",
    where="Section 2.3 (invariances)",
    statement="Layer norm is invariant to weight shifts and scaling of samples, batch norm to data shifts and scaling "
    "of neurons, and weight normalizations to the scale of weights alone.",
    paper_value="no numbers; each check quotes the paper",
    how="Relative change of the output of one layer and each normalizer, of vectors and of images without a border, "
    "under nine changes of inputs and weights, in float64 without ε.",
    cost=Cost(quick_seconds=1, full_seconds=3),
    precision="float64",
    seeds=10,
    quick_seeds=10,
    checks=(
        _unnoticed("layer norm", "weight shift", "layer norm does not notice one vector added to all rows"),
        _unnoticed("layer norm", "sample scale", "layer norm does not notice the scale of single samples"),
        _unnoticed("batch norm", "data shift", "batch norm does not notice a vector added to all inputs"),
        _unnoticed("batch norm", "neuron scale", "batch norm does not notice the scale of single neurons"),
        _noticed("batch norm", "weight shift", "batch norm notices a weight shift (the control)"),
        _noticed("batch norm", "sample scale", "batch norm notices the scale of single samples (the control)"),
        _noticed("layer norm", "data shift", "layer norm notices a data shift (the control)"),
        _noticed("layer norm", "neuron scale", "layer norm notices the scale of single neurons (the control)"),
        _unnoticed(
            "batch norm", "weight scale", "batch norm does not notice the scale of all weights", paper="scale-invariant"
        ),
        _unnoticed(
            "instance norm", "sample scale", "instance norm does not notice the contrast of an image", kind="images"
        ),
        _noticed(
            "batch norm", "sample scale", "batch norm notices the contrast of an image (the control)", kind="images"
        ),
        _noticed(
            "batch norm",
            "other samples",
            "batch norm's output for one input depends on the others in the batch",
            paper="dependencies between samples",
        ),
        _unnoticed(
            "layer norm",
            "other samples",
            "layer norm's output for one input does not depend on the others in the batch",
            paper="the feature vector itself",
        ),
        _noticed(
            "batch norm, inference",
            "data shift",
            "with statistics of training, batch norm's invariances are gone",
            paper="different statistics for inference",
        ),
        _unnoticed(
            "weight norm", "neuron scale", "weight norm does not notice the scale of neurons", paper="unit norm"
        ),
        _unnoticed(
            "spectral norm",
            "weight scale",
            "spectral norm does not notice the scale of the matrix",
            paper="the entire weight matrix",
        ),
        _noticed("spectral norm", "neuron scale", "spectral norm notices the scale of neurons (the control)"),
        _noticed("weight norm", "data scale", "weight norm notices the scale of the data (the control)"),
        _noticed(
            "layer norm",
            "weight shift",
            "over whole images, the light region of Figure 2, layer norm does notice a weight shift",
            kind="images",
            paper="invariant, of feature vectors",
            main=False,
        ),
        expect("cells unlike the algebra", high=0.0).derived(
            "normalizers and changes, of all, for which measurement and algebra differ",
            why="a change counts as noticed above 1e-12; each cell of the table follows from one line of algebra",
            exact=True,
        ),
    ),
)
@undisturbed
def sec2_3(settings: Settings) -> Measurement:
    """How far changes of inputs and weights move the output of each normalizer. Reference: normdead, section 2.3."""
    found = settings.over_seeds_of(("vectors", "images"), measure_changes)
    values: dict[str, list[float]] = {
        f"{name}, {change}, {kind}": [one[name, change] for one in ones]
        for kind, ones in found.items()
        for name, change in ones[0]
    }
    values["cells unlike the algebra"] = [
        float(
            sum(
                (value <= ROUNDING) != (change in NORMALIZERS[name].kept(kind))
                for kind in found
                for (name, change), value in found[kind][i].items()
            )
        )
        for i in range(len(settings.seeds))
    ]
    return Measurement(
        values=values,
        tables=tuple(one for kind in found for one in _table(kind, values)),
        notes=(
            "; ".join(f"{name}: {text}" for name, (text, _) in CHANGES.items()),
            "a weight shift adds one number to all features of an input, and to all channels of a pixel: layer and "
            "group norm over a whole image do not subtract it, so the survey's sentence holds for feature vectors",
            "centred weight norm takes over batch norm's invariance to the scale of neurons, and of its invariance to "
            "data shifts only the part that all inputs share",
        ),
    )


def _table(kind: str, values: dict[str, list[float]]) -> tuple[Table, ...]:
    """The table of relative changes, with the invariances by name."""
    rows = []
    for name, spec in NORMALIZERS.items():
        if kind in spec.kinds:
            measured = (fmean(values[f"{name}, {change}, {kind}"]) for change in CHANGES)
            rows.append((name, *("invariant" if value <= ROUNDING else f"{value:.2g}" for value in measured)))
    return table(f"Relative change of the output, {kind}", ("normalizer", *CHANGES), rows)
