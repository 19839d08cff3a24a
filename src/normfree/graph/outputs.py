"""How the outputs of a model follow from its output layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from normfree.graph.flow import Flow, Node
from normfree.graph.observer import JOINS, SPLITS, VIEWS

_SAME_VALUES = VIEWS | SPLITS | JOINS | {"identity", "__getitem__"}


def is_returned_as_it_is(flow: Flow, weight: str) -> bool:
    """Whether the model returns each product of a weight with the signal unchanged, up to its shape."""
    products = _products(flow, [weight])
    for product in products:
        steps = [product]
        for step in steps:
            steps += [user for user in step.users if user.function in _SAME_VALUES]
        if flow.outputs.isdisjoint(steps):
            return False
    return bool(products)


def returns_only_scores(flow: Flow, weights: Collection[str], shape: Sequence[int]) -> bool:
    """Whether an output of this shape, up to the batch, follows from the products of these weights alone.

    A flow returns its input, which its last layer scales and shifts: such an output holds no scores of classes. A mask
    or an index that selects scores may follow from the input.
    """
    alone = set(_products(flow, weights))
    for node in flow.nodes:
        if node.inputs and any(n in alone for n in node.inputs) and all(n in alone or n.discrete for n in node.inputs):
            alone.add(node)
    return any(node.shape[1:] == tuple(shape[1:]) for node in flow.outputs & alone)


def _products(flow: Flow, weights: Collection[str]) -> list[Node]:
    """The steps that multiply the signal by one of these weights."""
    return [node for node in flow.nodes if any(f"{w.module}.{w.parameter}" in weights for w in node.weights)]
