"""What a report says about a signal beside the verdict, in clauses."""

from __future__ import annotations

import math

from normfree.diagnostics.rules.module_rules import is_last_of_list
from normfree.diagnostics.signals import Signal
from normfree.report.tables import compact, shorten_names


def details(signal: Signal) -> list[str]:
    """Describe the first loss, frozen and unused layers, dead units and the sizes of updates, one clause each."""
    found: list[str] = []
    head = signal.head
    if head.classes and signal.plan.classifier and not math.isnan(head.chance_loss):
        known = not math.isnan(signal.loss)
        first = compact(signal.loss if known else head.chance_loss)
        chance = f"; a guess has log {head.classes} = {compact(math.log(head.classes))}"
        cross_entropy = not known or {"NllLoss", "NllLoss2D"} & set(signal.graph.loss)
        found.append(f"first loss {first}{'' if known else ' with random labels'}{chance if cross_entropy else ''}")
    for fact in signal.by_kind["outputs without a loss"]:
        found.append(
            f"the cross-entropy reads one of {fact.value + 1:.0f} outputs: pass a loss= of all outputs that train"
        )
    if signal.by_kind["running statistics"]:
        found.append("measured in evaluation mode: batch norms use their running statistics")
    if frozen := signal.frozen_layers:
        found.append(f"frozen: {shorten_names(frozen)} ({len(frozen)} of {len(signal.layers)} weight layers)")
    if unused := [name for name in signal.unused if is_last_of_list(name, signal)]:
        found.append(f"without a part in the output: {shorten_names(unused)}, the last of a list")
    layers = [layer for layer in signal.layers if layer.units]
    if worst := max(layers, key=lambda layer: layer.dead, default=None):
        share = sum(layer.dead * layer.units for layer in layers) / sum(layer.units for layer in layers)
        most = f", at most {100 * worst.dead:.0f} % in {worst.name}" if worst.dead else ""
        found.append(f"dead units: {100 * share:.1f} %{most}")
    ratios = sorted((layer.ratio, layer.name) for layer in signal.layers if 0 < layer.ratio < math.inf)
    if ratios:
        (low, first), (high, last) = ratios[0], ratios[-1]
        middle = compact(ratios[len(ratios) // 2][0])
        sizes = f"{middle} (median), from {compact(low)} ({first}) to {compact(high)} ({last})"
        if len(ratios) == 1:
            others = len(signal.layers) - 1
            rest = f"; gradient or weight of the {others} other weight layer{'s are' if others > 1 else ' is'} 0"
            sizes = f"{middle} in {first}{rest if others else ''}"
        found.append(f"update-to-weight ratio at learning rate 1: {sizes}")
    return found
