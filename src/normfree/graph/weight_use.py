"""Which parameters multiply the signal: followed by identity, so that weights used through functions are found too."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from normfree.graph.functions import BESIDE, JOINS, MATRIX_PRODUCTS, TRANSPOSED_CONVOLUTIONS, TRANSPOSITIONS

Use = Literal["weight", "embedding", "joined", "beside", "unknown"]


@dataclass(frozen=True)
class Weight:
    """A parameter that multiplies the signal: the module that holds it, its attribute there, and how it is stored.

    `convolution` says that channels are the second dimension of what comes out, and not the last.
    """

    module: str
    parameter: str = "weight"
    transposed: bool = False
    parts: int = 1
    convolution: bool = False


@dataclass(frozen=True)
class _Origin:
    """What a tensor was made from: parameters alone, and whether they were transposed on the way."""

    paths: tuple[str, ...]
    transposed: bool = False


class Weights:
    """Follows every parameter of two or more dimensions, and what is made of it, until it meets the signal.

    `uses` says for every parameter that was met how it met the signal.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._origins = {id(p): _Origin((path,)) for path, p in parameters.items() if p.dim() >= 2}
        self._alive: list[object] = list(parameters.values())  # an id is only good as long as its tensor lives
        self.uses: defaultdict[str, set[Use]] = defaultdict(set)

    def use(self, tensors: Iterable[object], use: Use) -> None:
        """Note how parameters, or what was made of them, are used."""
        for origin in filter(None, (self._origins.get(id(t)) for t in tensors)):
            for path in origin.paths:
                self.uses[path].add(use)

    def derive(self, name: str, operands: Sequence[Tensor], out: Any) -> None:
        """The result of a function of parameters alone is followed further."""
        origins = [self._origins[id(t)] for t in operands if id(t) in self._origins]
        if not origins:
            return
        paths = tuple(dict.fromkeys(path for origin in origins for path in origin.paths))
        turned = origins[0].transposed ^ (name in TRANSPOSITIONS)
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if id(tensor) not in self._origins:
                self._origins[id(tensor)] = _Origin(paths, turned)
                self._alive.append(tensor)

    def meet(self, name: str, args: tuple[Any, ...], operands: Sequence[Tensor]) -> tuple[Weight, ...]:
        """The weights in a function of the signal and parameters; other parameters in it are noted as used beside."""
        held = [t for t in operands if id(t) in self._origins]
        if name not in MATRIX_PRODUCTS:
            beside: Use = "joined" if name in JOINS else "beside" if name in BESIDE else "unknown"
            self.use(held, "embedding" if name.startswith("embedding") else beside)
            return ()
        self.use(held, "weight")
        return tuple(
            _weight(path, _stored_transposed(name, args, operands, t, self._origins[id(t)].transposed), name)
            for t in held
            for path in self._origins[id(t)].paths
        )


def _weight(path: str, transposed: bool, function: str) -> Weight:
    """The weight whose parameter has this qualified name."""
    module, _, parameter = path.rpartition(".")
    return Weight(module, parameter, transposed, convolution=function.startswith("conv"))


def _stored_transposed(
    name: str, args: tuple[Any, ...], operands: Sequence[Tensor], weight: Tensor, turned: bool
) -> bool:
    """Whether the parameter behind `weight` is stored as (in, out); `turned` when it was transposed since."""
    if name in TRANSPOSED_CONVOLUTIONS:
        return True
    if name == "einsum" and isinstance(args[0], str):
        return _contracts_first(args[0], next(i for i, t in enumerate(operands) if t is weight)) ^ turned
    if "matmul" in name or "mm" in name or name == "mv":
        others = [i for i, t in enumerate(operands) if t is not weight and t.dim() >= 2]
        after = bool(others) and min(others) < next(i for i, t in enumerate(operands) if t is weight)
        return after ^ turned ^ (name == "__rmatmul__")
    return turned


def _contracts_first(equation: str, place: int) -> bool:
    """Whether the first dimension of an operand of `einsum` is summed over.

    >>> _contracts_first("bnd,de->bne", 1), _contracts_first("bnd,ed->bne", 1)
    (True, False)
    """
    inputs, _, output = equation.partition("->")
    letters = [c for c in inputs.split(",")[place] if c in string.ascii_letters]
    return bool(letters) and letters[0] not in output
