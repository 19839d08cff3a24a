"""Compare one output of a converted model with the original's: its size, and how much it differs between samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from normfree.conversion.forward_passes import FoundBy, floats_of, root_mean_square
from normfree.report.tables import compact

# Outputs k times as large as the targets have a squared error of k² + 1, where an output of 0 has 1.
LARGE_NOTED, LARGE = 3.0, 10.0
_WORSE_NOTED = 1.5  # times the squared error of the original, with targets of unit variance
# Gradients shrink with the output. A usual gradient of 1e-3, times 1e-5, is as small as Adam's ε: nothing learns.
SMALL_NOTED, SMALLEST = 1e-3, 1e-5
ALIKE = 1e-3  # samples that differ by less than this part of their difference in the original count as the same


@dataclass
class OutputComparison:
    """The result of a comparison.

    Attributes:
        reasons: The reasons to refuse the model.
        notes: Notes on what needs care.
        found_by: How the reasons were found.
    """

    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    found_by: FoundBy = "forward"


def output_names(out: Any) -> list[str]:
    """A name for each floating-point output: its number, or its path if outputs are nested, such as 'logits[2]'.

    >>> import torch
    >>> output_names({"logits": [torch.zeros(1), torch.zeros(1)]}), output_names((torch.zeros(1), torch.zeros(1)))
    (["'logits[0]'", "'logits[1]'"], ['0', '1'])
    """
    count = len(floats_of(out))
    leaves = [(path, t) for path, t in tree_flatten_with_path(out)[0] if isinstance(t, Tensor)]
    paths = [path for path, t in leaves if t.is_floating_point()]
    if len(paths) != count or all(len(path) < 2 and not hasattr((*path, None)[0], "key") for path in paths):
        return [str(i) for i in range(count)]
    return [f"'{''.join(map(_step, path)).removeprefix('.')}'" for path in paths]


def _step(key: Any) -> str:
    """A step of a path, as code writes it."""
    return f"[{key.idx}]" if hasattr(key, "idx") else f".{getattr(key, 'key', getattr(key, 'name', key))}"


def compare_start(name: str, old: Tensor, start: Tensor, growth: float, found: OutputComparison) -> None:
    """Compare the squared error of an output at the start, or its value if that is one number, as a loss is."""
    was, now = root_mean_square(old), root_mean_square(start)
    if old.numel() > 1:
        noted = any(note.startswith(f"output {name} is") for note in found.notes)
        if was and not noted and now**2 + 1 > _WORSE_NOTED * (was**2 + 1):
            found.notes.append(
                f"output {name} is {compact(now / was)} times as large as the original's, so that a squared error "
                "starts higher; a smaller learning rate at the start may be needed"
            )
    elif start.numel() == 1:
        value, before = start.item(), old.item()
        excess = (value - before) / max(abs(before), 1.0)
        text = f"output {name}, a single number, is {compact(value)}, in the original {compact(before)}"
        if excess > LARGE**2 * growth:
            found.reasons.append(text)
        elif excess > _WORSE_NOTED - 1:
            found.notes.append(f"{text}; if it is a loss, a smaller learning rate at the start may be needed")


def note_constant_start(name: str, old: Tensor, start: Tensor, found: OutputComparison) -> None:
    """Note an output that starts out the same for all samples, though the original's differ."""
    if old.dim() and old.shape[0] > 1 and spread(old) > ALIKE and bool((start == start[:1]).all()):
        found.notes.append(
            f"output {name} starts out the same for all samples, because the branches that make it differ start at "
            "zero; it learns as they grow"
        )


def spread(tensor: Tensor) -> float:
    """The standard deviation between samples, as a part of the root mean square."""
    tensor = tensor.double()
    return root_mean_square(tensor - tensor.mean(0)) / (root_mean_square(tensor) or 1.0)


def differs_less(limit: float, tensor: Tensor) -> bool:
    """Whether samples differ by less than a part of the root mean square."""
    return spread(tensor) < limit


def is_extreme(large: bool, tensor: Tensor) -> bool:
    """Whether a tensor is large, or else small; NaN is both."""
    return not root_mean_square(tensor) < LARGE if large else not root_mean_square(tensor) > SMALL_NOTED


def uniform_loss(scores: Tensor, axis: int) -> float:
    """The mean cross-entropy of scores over targets that are uniform over the classes."""
    scores = scores.double()
    return float((scores.logsumexp(axis) - scores.mean(axis)).mean())
