"""The claim of `fixup` on Transformers before training: its template gives an update of Θ(η) at any depth.

Reference: Zhang, Dauphin, Ma 2019, section 3 (the template) and section 4.3, which applies it to a Transformer.
"""

from __future__ import annotations

import torch

from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.updates import measure_updates
from normfree.models import build
from normfree.models.base import BaseModel
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect
from normfree_papers.claims.depth_curves import chart, exponent, means

_FIXUP, _BOUNDED, _UNSCALED = "Fixup", "Fixup, bounded", "Fixup without L-scaling"
_ROWS = {_FIXUP: "fixup", _BOUNDED: "fixup_bounded", _UNSCALED: "fixup"}
_WORDS, _SENTENCES, _LENGTH = 20, 8, 10


def _transformer(row: str, layers: int, seed: int, device: str) -> BaseModel:
    """A Transformer with half of its layers in the encoder; the embeddings, which also classify, keep their draws."""
    half, generator = layers // 2, torch.Generator().manual_seed(seed)
    model = build(
        f"transformer-{half}-{half}-16-32-4",
        _ROWS[row],
        num_classes=_WORDS,
        dropout=0.0,
        dtype=torch.float64,
        generator=generator,
        device=device,
    )
    if row == _UNSCALED:
        branches = model.plan.branches
        for branch in branches:
            for layer in branch.layers:
                weight = model.get_parameter(f"{layer.name}.weight")
                weight.data.mul_(len(branches) ** (1 / (2 * branch.degree - 2)))
    return model


@claim(
    id="fixup/sec4_3",
    where="Section 4.3, by section 3",
    statement="The template of Fixup, followed in a Transformer, lets one SGD step change it by Θ(η) at any depth.",
    paper_value="‖Δf‖ = Θ(η) is the goal of the template; the paper does not measure it for Transformers",
    how="One gradient step on the branch weights of the authors' encoder-decoder Transformers of 6 to 96 layers, 16 "
    "wide, in float64; an attention counts as m = 4 layers, as in the authors' code; 6 to 24 layers (quick).",
    cost=Cost(quick_seconds=4, full_seconds=40),
    checks=(
        expect("largest output of a branch at the start", paper=0.0, low=0.0, high=0.0).printed(
            "largest norm of a branch's output for a sentence: every branch outputs 0 at the start",
            why="the last layer of a branch is 0, rule 1 of the template",
            exact=True,
        ),
        expect(f"spread over depth, {_FIXUP}", paper="Θ(1)", high=2.0).reading(
            "‖Δf‖/η: largest over smallest of all depths",
            why="our reading of the word 'Θ(η)': a factor of more than 2 refutes it, which L^(1/4) has over 16-fold "
            "depth",
        ),
        aside(f"exponent, {_FIXUP}", low=0.57, high=0.77).derived(
            "exponent of ‖Δf‖/η in L: 2/3, since the softmax is bounded, so that of query, key and value × L^(-1/6) "
            "the output sees the value's factor alone",
            why="L branches, each by L^(-1/6) squared, give 1 - 2/6; a tenth more or less is a factor of 1.3 over "
            "16-fold depth; ours",
        ),
        aside(f"spread over depth, {_BOUNDED}", high=2.0).reading(
            "‖Δf‖/η with values × L^(-1/2) and unscaled queries and keys (method fixup_bounded): largest over smallest "
            "of all depths",
            why="our reading of the word 'Θ(η)': as above; this method is ours",
        ),
        expect(f"exponent, {_UNSCALED}", paper="Θ(L)", low=0.9, high=1.1).derived(
            "without the factor the update grows in proportion to depth (the control)",
            why="appendix B.1: proportional to L; a tenth more or less is a factor of 1.3 over 16-fold depth",
        ),
    ),
    precision="float64",
    departures=(
        "16 wide, random sentences of ten words, no dropout",
        "a random output layer, which shares its weights with the embeddings: at 0 no branch would get a gradient",
        "one step of SGD, for which the theory is; the paper trains with Adam",
    ),
    version=2,
)
def sec4_3(settings: Settings) -> Measurement:
    """The first update of Transformers over depth. Reference: fixup, sections 3 and 4.3, equation 5."""
    depths = (6, 12, 24) if settings.quick else (6, 12, 24, 48, 96)

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        g = torch.Generator().manual_seed(1000 + seed)
        source, target, answer = (torch.randint(4, _WORDS, (_SENTENCES, _LENGTH), generator=g) for _ in range(3))
        inputs, answer = (source.to(settings.device), target.to(settings.device)), answer.to(settings.device)
        numbers, curves = {}, {}
        for row in _ROWS:
            models = [_transformer(row, depth, seed, settings.device) for depth in depths]
            steps = [measure_updates(model, inputs, answer, rates=(1e-6,), share_limit=0) for model in models]
            curves[row] = [step.per_unit for step in steps]
            numbers[f"spread over depth, {row}"] = max(curves[row]) / min(curves[row])
            numbers[f"exponent, {row}"] = exponent(depths, curves[row])
            if row == _FIXUP:
                outputs = [n for model in models for n in propagate(model, inputs).series("branch", "norm")]
                numbers["largest output of a branch at the start"] = max(outputs)
        return numbers, curves

    numbers, curves = settings.over_seeds(measured)
    averages = {row: means(of) for row, of in curves.items()}
    label = "‖Δf‖/η, root mean square over sentences"
    return Measurement(
        values=numbers,
        panels=(chart("encoder-decoder Transformers", averages, label, "layers", x=depths, log_x=True),),
    )
