"""The verdict on a signal: one word, the findings with their places, and the remedy.

The words are *preserved*, *growing* (by less and less per block, as with batch norm), *drifting* (exponentially, but
not yet a failure at this depth), *vanishing*, *exploding*, *faulty* (at one place, whatever the depth) and *dead
branch*. The verdict is a pure function of the signal. `docs/diagnosis.md` explains the words and their limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from normfree.diagnostics.rules import module_rules
from normfree.diagnostics.rules.depth_series import DepthSeries
from normfree.diagnostics.rules.findings import (
    HARMLESS,
    SEVERITY,
    Finding,
    RuleInput,
    SignalStatus,
    by_priority,
    faulty_facts,
)
from normfree.diagnostics.rules.growth import LARGE, NOTICEABLE, Direction, growth_advice, growth_finding
from normfree.diagnostics.rules.loss_rules import LOSS_RULES, faults_of_the_head
from normfree.diagnostics.rules.module_rules import MODULE_RULES
from normfree.diagnostics.rules.outliers import Outlier, find_outliers, look_at, strong_outliers
from normfree.diagnostics.rules.signal_rules import SIGNAL_RULES, drowning_branches
from normfree.diagnostics.signals import Signal, SumSignal
from normfree.report.tables import compact, shorten_names

RULES = (*SIGNAL_RULES, *MODULE_RULES, *LOSS_RULES)
_MOST_FINDINGS = 3  # that are named beside the first


@dataclass(frozen=True)
class Verdict:
    """The verdict on a signal.

    Attributes:
        status: The word for the network, the worst of both directions and of all findings.
        forward: The verdict on the forward signal.
        backward: The verdict on the gradient.
        dead: The branches in which no weight gets a gradient.
        sentence: A description of the signal.
        recommendation: The remedy, or the place to look at.
        outliers: The blocks that stand out, if the network is preserved, growing or drifting without them.
        findings: The faults, the cause before its consequences.
    """

    status: SignalStatus
    forward: Direction
    backward: Direction
    dead: tuple[str, ...]
    sentence: str
    recommendation: str
    outliers: tuple[Outlier, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def word(self) -> str:
        """The status and the first finding, or the name of the first outlier if that is all."""
        if self.findings:
            first = self.findings[0]
            return str(first) if first.cause.startswith(self.status) else f"{self.status}: {first}"
        return f"{self.status}, except {self.outliers[0].name}" if self.outliers else self.status

    @property
    def more(self) -> str:
        """A note on the findings after the first, whose remedies the recommendation does not name; '' without any."""
        if len(self.findings) < 2:
            return ""
        others = ", ".join(map(str, self.findings[1 : 1 + _MOST_FINDINGS]))
        rest = f", … ({len(self.findings) - 1} in all)" if len(self.findings) > 1 + _MOST_FINDINGS else ""
        return f"then look at the other findings, each with its remedy in verdict.findings: {others}{rest}"

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing to do: no finding, no outlier, and no change that fails at a larger depth."""
        large = any(max(d.inside, d.total) >= LARGE for d in (self.forward, self.backward))
        return self.status in ("preserved", "growing") and not self.findings and not self.outliers and not large

    def at_least(self, status: SignalStatus) -> bool:
        """Tell whether the verdict is this bad or worse.

        An outlier counts as growing, and as vanishing if it differs tenfold, which normalization cannot
        compensate.

        Args:
            status: 'preserved', 'growing', 'drifting', 'vanishing', 'exploding', 'faulty' or 'dead branch', in order
                of severity.

        Returns:
            True if the status of the network or of an outlier is at least as severe.
        """
        found: list[SignalStatus] = [self.status]
        found += ["vanishing" if outlier.excess >= NOTICEABLE else "growing" for outlier in self.outliers]
        return max(map(SEVERITY.index, found)) >= SEVERITY.index(status)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data; numbers may be NaN or infinite."""
        data = asdict(self)
        data["odd"] = data.pop("outliers")  # key kept for compatibility with 0.1
        return data


def judge(signal: Signal, *, method: str = "", supports: Callable[[str], bool] = lambda _name: True) -> Verdict:
    """Judge a signal.

    Both directions are judged by `judge_direction`, and single places by the rules. A branch is *dead*
    if none of its weights gets a gradient although one arrives at its sum; a branch that merely starts at zero, as with
    Fixup, is not. Sums that no gradient reaches because the branch around them starts at zero are left out of the
    backward direction. If the signal is harmless without its outliers, the verdict recommends to look at them and not
    to use a method.

    Args:
        signal: The result of `propagate`.
        method: The method that the network has, which is not recommended.
        supports: Tells whether the network can have the method of this name. Other methods are not recommended.

    Returns:
        One word for the network, both directions, the findings, a description, and the remedy.
    """
    starting = module_rules.starting_layers(signal)
    depth = DepthSeries(signal, starting)
    forward, backward = depth.judge()
    # A branch of zeros may wait for a layer beside the branches that makes its gate, and learns.
    gates = starting & module_rules.gating_layers(signal)
    without = (s for s in depth.reached if s.sum_gradient.norm > 0 and not s.learns)
    dead = tuple(s for s in without if s.branch.norm > 0 or not gates)
    case = RuleInput(signal, forward, backward, dead, starting)
    found = by_priority([*faulty_facts(case), *(f for rule in RULES for f in rule(case))])
    local = [f for f in found if not f.unless]
    drowned = [f for f in local if f.word == "samples drowned"]  # a bias may make a layer dead, which says more
    local = [f for f in local if f not in drowned] or [f for f in found if f.unless == "another place"]
    local += [f for f in drowned if f.place not in {other.place for other in local}]
    outliers = () if dead or forward.broken_at or backward.broken_at or signal.unmeasured else find_outliers(signal)
    if outliers and not {forward.status, backward.status} <= {"preserved", "growing", "not measured"}:
        corrected = depth.judge_without(outliers)
        outliers = outliers if all(d.status in (*HARMLESS, "not measured") for d in corrected) else ()
        if outliers:  # a drift may be the step of one block
            forward, backward = (
                new if old.status == "drifting" else old
                for old, new in zip((forward, backward), corrected, strict=True)
            )
    findings = [*local, *strong_outliers(outliers, signal)]
    measured: list[SignalStatus] = [d.status for d in (forward, backward) if d.status != "not measured"]
    worst: SignalStatus = max(measured, key=SEVERITY.index, default="preserved")
    advice = growth_advice(signal, forward, backward, method, supports)
    if not findings and not outliers and worst not in ("preserved", "growing"):
        findings.append(growth_finding(signal, forward, backward, worst, advice))
    if forward.status in HARMLESS and (not findings or worst == "drifting"):
        drifting = bool(findings) and forward.status == "drifting"
        ends = list(faults_of_the_head(signal, drifting=drifting))
        if drifting and [f.word for f in ends] == ["first loss"]:
            findings = [
                replace(findings[0], status="exploding" if forward.factor > 1 else "vanishing")
            ]  # the loss shows it
        else:
            findings = [*ends, *findings]
        local += ends
    if not outliers and all(f.status == "drifting" for f in findings):
        local += [f for f in found if f.unless == "anything"]
        local += [] if local else drowning_branches(case)
        findings = [*local, *findings]
    status = max([worst, *(f.status for f in findings)], key=SEVERITY.index)
    texts = [f.text for f in local if f.text]
    sentence = "; ".join([*_sentences(signal, forward, backward, dead, depth.waiting, outliers), *texts])
    if findings or outliers:
        advice = findings[0].remedy if findings else look_at(outliers)
    names = tuple(s.name for s in dead)
    return Verdict(status, forward, backward, names, sentence, advice, outliers, tuple(findings))


def _sentences(
    signal: Signal,
    forward: Direction,
    backward: Direction,
    dead: Sequence[SumSignal],
    waiting: Sequence[str],
    outliers: Sequence[Outlier],
) -> Iterator[str]:
    yield _describe("the forward signal", forward, signal)
    yield _describe("the gradient", backward, signal)
    if dead:
        names = shorten_names([s.name for s in dead])
        yield f"{len(dead)} branch{'es are' if len(dead) > 1 else ' is'} dead ({names}): no weight gets a gradient"
    if waiting:
        whom = "them" if len(waiting) > 1 else "it"
        yield f"no gradient reaches {shorten_names(waiting)} yet: the branch around {whom} starts at zero"
    yield from map(str, outliers[:3])


def _describe(what: str, d: Direction, signal: Signal) -> str:
    block = "layer" if signal.plain else "block"
    stages = "" if signal.plain else " inside stages"
    if d.status == "not measured":
        why = "every sum starts at zero, or its gradient is the same for all samples"
        return f"{what} is {not_measured(signal.unmeasured) if signal.unmeasured else f'not measured: {why}'}"
    if d.broken_at:
        return f"{what} {'overflows' if math.isinf(d.total) else 'is exactly 0'} at {d.broken_at}"
    if d.status == "preserved":
        word = "is preserved" if 1 / NOTICEABLE <= d.total <= NOTICEABLE else "stays within bounds"
        return f"{what} {word} (×{d.factor:.2f} per {block}{stages}, ×{compact(d.total)} in all)"
    if d.status == "growing":
        changes = f"×{compact(d.inside)}{stages}, ×{compact(d.total)} in all"
        return f"{what} grows as a power of the depth, by less and less per {block} ({changes})"
    if d.status == "drifting":
        fails = f"which fails from about {d.fails_at} {block}s on"
        return f"{what} is drifting: ×{d.factor:.2f} per {block}, ×{compact(d.inside)} in all{stages}, {fails}"
    inside = f", ×{compact(d.inside)} inside stages" if abs(math.log10(d.inside / d.total)) > 1 else ""
    return f"{what} is {d.status}: ×{d.factor:.2f} per {block}{inside}, ×{compact(d.total)} in all, worst at {d.worst}"


def not_measured(place: str) -> str:
    """The reason for missing gradients: the forward signal ended at a place.

    >>> not_measured("body.0.7")
    'not measured: the forward signal is not finite from body.0.7 on'
    """
    return f"not measured: the forward signal is not finite from {place} on"
