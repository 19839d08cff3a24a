"""Thirty networks that look unusual and train, for counting false alarms; none of them is in the earlier sets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fault_cases import CLASSES, Plain, Subject, images
from healthy_networks import SIZES, WORDS, Build, _load_torchvision, _made, _own, _text, _timm
from third_healthy_parts import (
    DeepNormEncoder,
    DiffusionMLP,
    EulerNetwork,
    GraphAttention,
    Maxout,
    Perceiver,
    PointwiseGated,
    Quantized,
    ReZeroEncoder,
    ScaledBlock,
    SharedLayer,
    Sine,
    TiedLanguageModel,
    TwoTowers,
    critic,
)


def _tied_language_model() -> Subject:
    ids = torch.randint(WORDS, (8, 13))
    return Subject(TiedLanguageModel(), ids[:, :-1], ids[:, 1:], F.cross_entropy)


def _layer_scales() -> nn.Module:
    layers = [nn.Conv2d(3, 24, 4, 4), nn.GroupNorm(1, 24), *(ScaledBlock(24) for _ in range(6))]
    return Plain(layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, CLASSES)))


def _sines() -> Subject:
    """The brightness of an image at each of 256 points."""
    line = torch.linspace(-1, 1, 16)
    points = torch.cartesian_prod(line, line)
    model = Plain([Sine(2, 48, first=True), Sine(48, 48), Sine(48, 48)], nn.Linear(48, 1))
    bound = (6 / 48) ** 0.5 / 30
    nn.init.uniform_(model.head.get_parameter("weight"), -bound, bound)
    return Subject(model, points, (3 * points[:, :1]).sin() * (4 * points[:, 1:]).cos(), F.mse_loss)


def _diffusion() -> Subject:
    time, noise = torch.rand(64, 1), torch.randn(64, 16)
    noisy = (1 - time) * torch.randn(64, 16).sign() + time * noise
    return Subject(DiffusionMLP(), torch.cat([noisy, time], 1), noise, F.mse_loss)


def _quantized() -> Subject:
    example = torch.randn(32, 4) @ torch.randn(4, 32)
    return Subject(Quantized(), example, example, F.mse_loss)


def _two_towers() -> Subject:
    left = torch.randn(16, 16)
    return Subject(TwoTowers(), torch.stack([left, left.flip(1)], 1), torch.arange(16))


def _critic() -> Subject:
    example = images(batch=16)[0]
    return Subject(critic(), example, (torch.arange(16) % 2).float()[:, None], F.binary_cross_entropy_with_logits)


def _rare_objects() -> Subject:
    """A score at each place with the bias that rare objects ask for, and a loss that forgives easy places."""

    def focal(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.binary_cross_entropy_with_logits(out, targets, reduction="none")
        return (loss * (targets - out.sigmoid()).square()).sum() / targets.sum()

    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()]
    head = nn.Conv2d(16, 3, 3, padding=1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.constant_(head.get_parameter("bias"), -4.6)
    return Subject(Plain(layers, head), images(batch=8)[0], (torch.rand(8, 3, 8, 8) < 0.02).float(), focal)


def _maxout() -> nn.Module:
    return Plain([Maxout(32, 32), Maxout(32, 32), Maxout(32, 32)], nn.Linear(32, CLASSES))


def _converted(name: str, method: str) -> Build:
    """A model of torchvision, from which `nf.convert_` took the norms."""

    def build() -> Subject:
        _load_torchvision()
        import torchvision

        import normfree as nf

        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
        example, targets = images(64, 8)
        nf.convert_(model, method, example)
        return Subject(model, example, targets)

    return build


BUILDERS: dict[str, Build] = {
    **{
        f"timm {name}": _timm(name)
        for name in (
            "efficientvit_b0", "nf_regnet_b0", "repghostnet_050", "selecsls42", "tf_efficientnetv2_b0",
        )
    },
    "transformers DeBERTa": _text("DebertaV2", **SIZES),
    "transformers Gemma 2": _text("Gemma2", "CausalLM", num_key_value_heads=2, head_dim=16, **SIZES),
    "transformers OLMo 2": _text("Olmo2", "CausalLM", num_key_value_heads=2, **SIZES),
    "transformers Phi": _text("Phi", "CausalLM", **SIZES),
    "transformers Qwen3": _text("Qwen3", "CausalLM", num_key_value_heads=2, head_dim=16, **SIZES),
    "transformers XLNet": _text("XLNet", d_model=64, n_layer=4, n_head=4, d_inner=128),
    "own resnet56 wn": _own("resnet56", "wn"),
    "torchvision resnet18 fixup": _converted("resnet18", "fixup"),
    "torchvision resnet18 nf": _converted("resnet18", "nf"),
    "tied language model": _tied_language_model,
    "ReZero encoder": _made(ReZeroEncoder, 8, 32),
    "layer scales of 1e-6": _made(_layer_scales, 3, 16, 16),
    "shared post-norm layer": _made(SharedLayer, 8, 32),
    "DeepNorm encoder": _made(DeepNormEncoder, 8, 32),
    "sines": _sines,
    "diffusion with zero gates": _diffusion,
    "Euler steps": _made(EulerNetwork, 32),
    "Perceiver": _made(Perceiver, 20, 6),
    "gMLP": _made(PointwiseGated, 8, 32),
    "rounded code": _quantized,
    "graph attention": _made(GraphAttention, 12, 6),
    "two towers": _two_towers,
    "spectral norm": _critic,
    "rare objects": _rare_objects,
    "maxout": _made(_maxout, 32),
}  # fmt: skip
HEALTHY_THIRD: tuple[str, ...] = tuple(BUILDERS)


def build_healthy_third(name: str) -> Subject:
    """Build a network and its batch; two calls give the same weights and the same batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()
