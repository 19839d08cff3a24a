"""How many equal matrices a layer's weight holds, stacked along its outputs: read off how its output is split."""

from __future__ import annotations

from math import prod

from normfree.graph.flow import Node
from normfree.graph.functions import SPLITS, VIEWS


def parts(layer: Node) -> int:
    """3 for a fused query, key and value, 2 for a fused gate and value, 1 for a layer whose output stays whole.

    The output is followed through changes of its shape to the call that splits it. Pieces of unlike size (fewer keys
    than queries) are not told apart, nor is a split along anything but the outputs.
    """
    node = layer
    while len(node.users) == 1 and node.users[0].function in VIEWS:
        node = node.users[0]
    pieces = node.users
    if len(pieces) < 2 or not _are_split(pieces) or prod(pieces[0].shape) * len(pieces) != prod(node.shape):
        return 1
    if any(piece.shape != pieces[0].shape for piece in pieces):
        return 1
    if node is not layer:
        return 1 if pieces[0].function == "__getitem__" else len(pieces)  # halves of each head, for rotary embeddings
    outputs = 1 if layer.weights[0].convolution else len(node.shape) - 1
    return 1 if node.shape[outputs] == pieces[0].shape[outputs] else len(pieces)


def _are_split(pieces: list[Node]) -> bool:
    """Whether these are what one call, or one index each, makes of a tensor."""
    names = {piece.function for piece in pieces}
    return len(names) == 1 and (names <= SPLITS or names <= {"select", "__getitem__"})
