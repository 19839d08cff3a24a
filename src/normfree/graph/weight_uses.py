"""Follow parameters until they meet the signal: as weights, as layer scales, as lookup tables or in another way.

They are followed by identity, so that weights used through functions are found too.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor

from normfree.graph.observer import (
    BESIDE,
    CONVOLUTIONS,
    DIVISIONS,
    JOINS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    TRANSPOSITIONS,
    tensors_of,
)

_DIAGONALS = frozenset({"diag", "diag_embed"})

Use = Literal["weight", "embedding", "joined", "beside", "unknown"]
"""How a parameter meets the signal: as a weight, a lookup table, a part of the signal, elementwise, or unknown."""


@dataclass(frozen=True)
class Weight:
    """A parameter that multiplies the signal.

    Attributes:
        module: The module that holds it.
        parameter: Its attribute there.
        transposed: Whether it is stored as (in, out).
        parts: The number of equal matrices in it.
        convolution: Whether channels are the second dimension of the output, and not the last.
    """

    module: str
    parameter: str = "weight"
    transposed: bool = False
    parts: int = 1
    convolution: bool = False


@dataclass(frozen=True)
class _Origin:
    """The parameters that a tensor was made from, and whether they were transposed on the way."""

    paths: tuple[str, ...]
    transposed: bool = False


class WeightUses:
    """Follows every parameter, and tensors computed from it, until they meet the signal.

    `uses` maps each parameter of two or more dimensions that met the signal to its uses. A vector or number is followed
    because it may be a layer scale.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._origins = {id(p): _Origin((path,)) for path, p in parameters.items() if p.dim() >= 2}
        self._scales = {id(p): path for path, p in parameters.items() if p.numel() == max(p.shape, default=1)}
        self._diagonals: set[int] = set()  # the matrices made from them that are diagonal
        self._alive: list[object] = list(parameters.values())  # an id is only good as long as its tensor lives
        self.uses: defaultdict[str, set[Use]] = defaultdict(set)

    def release_tensors(self) -> None:
        """Drop the tensors once the recording is done."""
        self._origins.clear()
        self._scales.clear()
        self._diagonals.clear()
        self._alive.clear()

    def is_made_from_parameters(self, tensor: object) -> bool:
        """Whether a tensor is a parameter of two or more dimensions, or was made from such parameters alone."""
        return id(tensor) in self._origins

    def scale_of(self, tensors: Iterable[object]) -> str:
        """The vector or number among these tensors that is a parameter or was made from one; '' if there is none."""
        return next((self._scales[id(t)] for t in tensors if id(t) in self._scales), "")

    def scale_in(self, name: str, tensors: Sequence[Tensor], signal: tuple[int, ...], out: tuple[int, ...]) -> str:
        """The vector or number by which a function multiplies or divides a signal entry by entry; '' if it does not.

        This is a product, a matrix product with a diagonal matrix, a convolution with one weight per channel, or an
        `einsum` that sums over nothing. `signal` and `out` are the shapes before and after.
        """
        if name in PRODUCTS:
            return self.scale_of(tensors)
        if name in DIVISIONS:
            return self.scale_of(tensors[1:])
        if name not in MATRIX_PRODUCTS or out != signal:
            return ""
        if name in CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS:
            tensors = [t for t in tensors if prod(t.shape[2:]) == 1]
        return self.scale_of(t for t in tensors if t.numel() == max(t.shape, default=1) or id(t) in self._diagonals)

    def use(self, tensors: Iterable[object], use: Use) -> None:
        """Note how parameters, or tensors made from them, are used."""
        for origin in filter(None, (self._origins.get(id(t)) for t in tensors)):
            for path in origin.paths:
                self.uses[path].add(use)

    def derive(self, name: str, operands: Sequence[Tensor], out: Any) -> None:
        """Follow the result of a function of parameters alone."""
        path = self.scale_of(operands)
        diagonal = name in _DIAGONALS or any(id(t) in self._diagonals for t in operands)
        for tensor in tensors_of(out) if path else ():
            self._scales.setdefault(id(tensor), path)
            self._diagonals.update([id(tensor)] if diagonal else [])
            self._alive.append(tensor)
        origins = [self._origins[id(t)] for t in operands if id(t) in self._origins]
        if not origins:
            return
        paths = tuple(dict.fromkeys(path for origin in origins for path in origin.paths))
        turned = origins[0].transposed ^ (name in TRANSPOSITIONS)
        for tensor in tensors_of(out):
            if id(tensor) not in self._origins:
                self._origins[id(tensor)] = _Origin(paths, turned)
                self._alive.append(tensor)

    def meet(self, name: str, args: tuple[Any, ...], operands: Sequence[Tensor]) -> tuple[Weight, ...]:
        """The weights in a function of the signal and parameters; other uses of parameters are noted."""
        held = [t for t in operands if id(t) in self._origins]
        if name not in MATRIX_PRODUCTS:
            beside: Use = "joined" if name in JOINS else "beside" if name in BESIDE else "unknown"
            self.use(held, "embedding" if name.startswith("embedding") else beside)
            return ()
        self.use(held, "weight")
        found = []
        for t in held:
            transposed = _stored_transposed(name, args, operands, t, self._origins[id(t)].transposed)
            for path in self._origins[id(t)].paths:
                module, _, parameter = path.rpartition(".")
                found.append(Weight(module, parameter, transposed, convolution=name.startswith("conv")))
        return tuple(found)


def _stored_transposed(
    name: str, args: tuple[Any, ...], operands: Sequence[Tensor], weight: Tensor, turned: bool
) -> bool:
    """Whether the parameter that `weight` was made from is stored as (in, out).

    `turned` says whether it was transposed before use.
    """
    if name in TRANSPOSED_CONVOLUTIONS:
        return True
    if name == "einsum" and isinstance(args[0], str):
        return _contracts_first(args[0], next(i for i, t in enumerate(operands) if t is weight)) ^ turned
    if "matmul" in name or "mm" in name or name == "mv":
        others = [i for i, t in enumerate(operands) if t is not weight and t.dim() >= 2]
        after = bool(others) and min(others) < next(i for i, t in enumerate(operands) if t is weight)
        return after ^ turned ^ (name == "__rmatmul__")
    return turned


def _contracts_first(equation: str, operand: int) -> bool:
    """Whether `einsum` sums over the first dimension of an operand.

    >>> _contracts_first("bnd,de->bne", 1), _contracts_first("bnd,ed->bne", 1)
    (True, False)
    """
    inputs, _, output = equation.partition("->")
    letters = [c for c in inputs.split(",")[operand] if c in string.ascii_letters]
    return bool(letters) and letters[0] not in output
