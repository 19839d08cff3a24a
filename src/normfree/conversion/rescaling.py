"""The level of the signal where a normalizer kept it: layer scales, embeddings, tokens, layers outside branches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Scaled
from normfree.graph.flow import Flow
from normfree.nn.normalizers import is_norm
from normfree.nn.scalar_wrapping import add_scalar_
from normfree.nn.weight_layers import WEIGHT_LAYERS, set_weight_, weight_kind
from normfree.plan import Layer, ResidualPlan

_LAYER_SCALE = re.compile(r"layer_?scale|^gamma(_?\d)?$|^lambda_?\d?$|^ls_?\d$")


@torch.no_grad()
def restart_layer_scales_(model: nn.Module) -> list[Scaled]:
    """Let layer scales (ConvNeXt's and CaiT's factor a channel, 1e-6 at the start) begin at 1: β is the scale now."""
    scaled = []
    for prefix, module in model.named_modules():
        if isinstance(module, (*WEIGHT_LAYERS, nn.Embedding)) or is_norm(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if _LAYER_SCALE.search(name) and parameter.numel() == max(parameter.shape, default=0):
                before = parameter.mean().item()
                parameter.fill_(1.0)
                if before != 1.0:
                    scaled.append(Scaled(f"{prefix}.{name}" if prefix else name, 1 / before if before else 0.0))
    return scaled


@torch.no_grad()
def scale_embeddings_(model: nn.Module, plan: ResidualPlan, called: set[str]) -> tuple[list[Scaled], list[Added]]:
    """Bring the embeddings that start the residual stream to unit variance, which a normalizer did until now.

    Those with one parent are added, so that together they have it. The weight itself is scaled, or what comes out of
    the embedding where the weight is the classifier's, too.
    """
    modules = dict(model.named_modules())
    width = _width(modules, plan)
    groups: dict[str, list[tuple[str, nn.Embedding]]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and name in called and module.embedding_dim == width:
            groups.setdefault(name.rpartition(".")[0], []).append((name, module))
    tied = {id(getattr(modules[layer.name], layer.parameter)) for layer in plan.layers()}
    scaled: list[Scaled] = []
    added: list[Added] = []
    done: set[int] = set()
    for group in groups.values():
        power = sum(e.weight.square().mean().item() * _scale(e) ** 2 for _, e in group)
        if not power or 0.7 < (factor := power**-0.5) < 1.4:
            continue
        for name, embedding in group:
            if id(embedding.weight) in tied:
                add_scalar_(embedding, "beta", factor, learnable=False)
                added.append(Added(f"{name}.beta", "multiplier of an embedding", factor, False))
            elif id(embedding.weight) not in done:
                embedding.weight.mul_(factor)
                scaled.append(Scaled(f"{name}.weight", factor))
            done.add(id(embedding.weight))
    return scaled, added


def _scale(embedding: nn.Embedding) -> float:
    """What an embedding multiplies its rows by, as ours and many others call it."""
    return float(getattr(embedding, "embed_scale", 1.0) or 1.0)


def _width(modules: dict[str, nn.Module], plan: ResidualPlan) -> int:
    """The number of channels of the residual stream where it begins."""
    for branch in plan.branches[:1]:
        for layer in branch.entries[:1]:
            weight = getattr(modules[layer.name], layer.parameter)
            assert isinstance(weight, Tensor)
            return weight.shape[0 if layer.transposed else 1]
    return -1


def class_tokens(model: nn.Module, plan: ResidualPlan, flow: Callable[[], Flow]) -> list[str]:
    """The parameters that are one vector of the stream and are put into it, rather than added or multiplied."""
    width = _width(dict(model.named_modules()), plan)
    parameters = dict(model.named_parameters())

    def is_vector(token: Tensor | None) -> bool:
        return token is not None and token.dim() >= 2 and token.numel() == token.shape[-1] == width

    vectors = [name for name in plan.aside if is_vector(parameters.get(name))]
    return [name for name in vectors if "joined" in flow().weights.uses[name]]


@torch.no_grad()
def start_tokens_(model: nn.Module, names: Sequence[str], generator: torch.Generator | None) -> list[Scaled]:
    """Draw class tokens from N(0, 1): they start near 0 in all libraries, and a normalizer made that unit variance."""
    parameters = dict(model.named_parameters())
    scaled = []
    for name in names:
        token = parameters[name]
        before = token.square().mean().sqrt().item()
        draw = torch.empty(token.shape, device=generator.device if generator else "cpu")
        token.copy_(draw.normal_(generator=generator))
        scaled.append(Scaled(name, 1 / before if before else 0.0))
    return scaled


@torch.no_grad()
def level_layers_(model: nn.Module, plan: ResidualPlan, run: Callable[[], Any]) -> tuple[list[Scaled], list[str]]:
    """Scale the layers outside the branches to unit variance on the example, which `run` sends through the model.

    Also gives the names of the weights that no module of their own puts a signal out for: they stay as they are.

    A network with blocks that are not residual (MobileNet, EfficientNet) would lose its signal there, at each gate and
    each activation that is no ReLU. The first layer and the classifier stay. So do gates, as in branches: the next
    layer makes up for what they take. What they read is pooled and hardly varies; magnified to unit variance, it makes
    them learn so fast that EfficientNet diverges at rates at which it trains otherwise.
    """
    modules = dict(model.named_modules())
    scaled: dict[str, Scaled] = {}

    def hook(layer: Layer) -> Callable[..., Tensor | None]:
        def rescale(module: nn.Module, _args: Any, out: Any) -> Tensor | None:
            if not isinstance(out, Tensor) or layer.path in scaled:
                return None
            std = out.std(unbiased=False).item()
            if not 1e-12 < std < 1e12:
                return None
            if weight_kind(module) != "plain":
                module.gain.div_(std)  # type: ignore[operator]
            else:
                set_weight_(module, getattr(module, layer.parameter) / std, layer.parameter, name=layer.path)
            scaled[layer.path] = Scaled(layer.path, 1 / std)
            return out / std  # what follows sees the signal at its new level already

        return rescale

    outside = [layer for layer in (*plan.stem[1:], *plan.body) if not layer.tied and not layer.gate]
    called = [layer for layer in outside if _is_a_module(layer, modules[layer.name])]
    handles = [modules[layer.name].register_forward_hook(hook(layer)) for layer in called]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return list(scaled.values()), [layer.path for layer in outside if layer not in called]


def _is_a_module(layer: Layer, module: nn.Module) -> bool:
    """Whether what a module puts out is what the layer does, and no more than that."""
    alone = isinstance(module, WEIGHT_LAYERS) or next(module.children(), None) is None
    return alone and bool(layer.name) and layer.parameter == "weight"
