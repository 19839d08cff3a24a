"""Table 1 of `robust`: the parameters and FLOPs of its networks, counted.

Reference: "A robust initialization of residual blocks", ICLR 2022 submission, appendix A.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from normfree.models import build
from normfree_papers.claims.claim import Check, Cost, Measurement, Settings, claim, near
from normfree_papers.claims.depth_curves import chart, table

_SHORTCUTS = {
    "BatchNorm": "batchnorm_convshort",
    "IdShort": "idshort",
    "LearnScalar": "learnscalar",
    "ConvShort": "convshort",
}
# Appendix A, Table 1: millions of parameters and billions of FLOPs, by depth and kind of shortcut. BatchNorm and
# ConvShort have the same printed numbers, and so have IdShort and LearnScalar.
_CONVOLUTION = {18: (11.52, 1.16), 50: (38.02, 4.2), 101: (74.78, 8.92), 152: (105.06, 13.62)}
_IDENTITY = {18: (11.16, 1.12), 50: (23.47, 2.6), 101: (42.41, 5.02), 152: (58.01, 3.72)}
_PRINTED = {
    depth: {kind: (_IDENTITY if kind in ("IdShort", "LearnScalar") else _CONVOLUTION)[depth] for kind in _SHORTCUTS}
    for depth in _IDENTITY
}
_MACS = {(152, "IdShort"), (152, "LearnScalar")}  # these rows print multiply-accumulates


def _table1_checks() -> tuple[Check, ...]:
    checks = []
    for depth, row in _PRINTED.items():
        for kind, (parameters, flops) in row.items():
            checks.append(
                near(f"parameters, ResNet-{depth} {kind}", parameters, 0.005, paper=parameters).printed(
                    f"millions of parameters of ResNet-{depth} with {kind}",
                    why="half of the last printed digit",
                    exact=True,
                )
            )
            wrong = (depth, kind) in _MACS
            right = 2 * flops if wrong else flops
            checks.append(
                near(f"GFLOPs, ResNet-{depth} {kind}", right, 0.01, paper=flops).printed(
                    f"billions of FLOPs of ResNet-{depth} with {kind} on one 32×32 image",
                    why="the printed numbers are even in the last digit: multiply-accumulates were rounded to two "
                    "decimals and then doubled, so half a digit counts twice",
                    exact=True,
                    erratum="the row prints multiply-accumulates, half of the FLOPs, so that ResNet-152 would cost "
                    "less than ResNet-101"
                    if wrong
                    else "",
                )
            )
    return tuple(checks)


@claim(
    id="robust/table1",
    where="Table 1",
    statement="Parameters and FLOPs of ResNet-18, 50, 101 and 152 with four kinds of shortcut are as printed.",
    paper_value="16 rows, from 11.16 M and 1.12 G to 105.06 M and 13.62 G",
    how="Counted on networks without data at 32×32, FLOPs as twice the multiply-accumulates, without the affine "
    "parameters of batch norm.",
    cost=Cost(quick_seconds=3, full_seconds=3),
    seeds=1,
    precision="counts",
    checks=_table1_checks(),
)
def table1(settings: Settings) -> Measurement:
    """Parameters and FLOPs of the networks. Reference: robust, appendix A, Table 1."""
    values: dict[str, float] = {}
    rows = []
    counted: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _SHORTCUTS}
    for step, (depth, row) in enumerate(_PRINTED.items()):
        settings.progress(step, len(_PRINTED), f"ResNet-{depth}")
        for kind, (parameters, flops) in row.items():
            model = build(f"preact_resnet{depth}", _SHORTCUTS[kind], num_classes=10, device="meta")
            counts = _millions(model), _gigaflops(model)
            values[f"parameters, ResNet-{depth} {kind}"], values[f"GFLOPs, ResNet-{depth} {kind}"] = counts
            counted[kind].append(counts)
            measured = f"{counts[0]:.2f}", f"{counts[1]:.2f}"
            rows.append((f"ResNet-{depth} {kind}", f"{parameters:.2f}", measured[0], f"{flops:g}", measured[1]))
    # BatchNorm has the counts of ConvShort, and LearnScalar those of IdShort: one curve each.
    alike = {"ConvShort and BatchNorm": "ConvShort", "IdShort and LearnScalar": "IdShort"}
    printed = {kind: [row[kind] for row in _PRINTED.values()] for kind in _SHORTCUTS}
    panels = tuple(
        chart(
            title,
            {
                f"{name}, {source}": [counts[i] for counts in of[kind]]
                for name, kind in alike.items()
                for source, of in (("counted", counted), ("printed", printed))
            },
            label,
            "layers",
            x=_PRINTED,
            log_y=False,
            note=note,
        )
        for i, (title, label, note) in enumerate(
            (
                ("parameters", "millions", "counted and printed lie on each other"),
                ("FLOPs at 32×32", "billions", "the printed 3.72 of ResNet-152 is half of what is right"),
            )
        )
    )
    columns = ("network", "M parameters, paper", "counted", "GFLOPs, paper", "counted ")
    return Measurement(
        values=values,
        panels=panels,
        tables=table("Parameters and FLOPs", columns, rows),
        notes=("the BatchNorm rows have a 1×1 convolution in every shortcut, which is why they count as ConvShort",),
    )


def _millions(model: nn.Module) -> float:
    """Parameters in millions, without those of normalizers."""
    norms = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in norms) / 1e6


def _gigaflops(model: nn.Module) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 32, 32, device="meta"))
    return float(counter.get_total_flops()) / 1e9
