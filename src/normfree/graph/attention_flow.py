"""Torch's own multi-head attention, which is one function to whoever records it, opened into its weight layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from normfree.graph.flow import Flow, Node, tensors_of
from normfree.graph.functions import ATTENTION, MULTIHEAD_ATTENTION

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def attend(flow: Flow, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Write down what `F.multi_head_attention_forward` does: project query, key and value, multiply them, project.

    A fused `in_proj_weight` is one layer of three parts, even where query and key come from different signals.
    """
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    sources = [given[name] for name in ("query", "key", "value")]
    separate = bool(given.get("use_separate_proj_weight"))
    if separate:
        projected = [_project(flow, given[n], (s,), 1) for n, s in zip(_SEPARATE, sources, strict=True)]
    else:
        projected = [_project(flow, given["in_proj_weight"], sources, 3)] * 3
    flow.weights.use((given["bias_k"], given["bias_v"]), "beside")
    factors = tuple(node for node in projected if node is not None)
    attended, *maps = tensors_of(out)
    shape = tuple(attended.shape)
    product = flow.step("other", ATTENTION, tuple(dict.fromkeys(factors)), shape, factors=factors)
    weights = flow.weights.meet("linear", (), [given["out_proj_weight"]])
    flow.add("weight", "linear", (product,), attended, weights=weights)
    flow.add("other", MULTIHEAD_ATTENTION, factors[:2], maps, factors=factors[:2])


def _project(flow: Flow, matrix: Any, sources: Sequence[Any], parts: int) -> Node | None:
    """One projection of its sources, or None where none of them depends on the input."""
    inputs = flow.read(sources)
    if not inputs:
        flow.weights.use([matrix], "beside")
        return None
    weights = tuple(replace(w, parts=parts) for w in flow.weights.meet("linear", (), [matrix]))
    return flow.step("weight", "linear", tuple(dict.fromkeys(inputs)), inputs[0].shape, weights=weights)
