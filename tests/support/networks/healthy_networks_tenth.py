"""The tenth set of healthy networks: of timm, torchvision and transformers, small or shrunk, and ordinary own ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_tenth_own as own
import healthy_networks_tenth_tokens as tokens
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, generator, images, scenes, sentences, subject


def _timm(name: str) -> Case:
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10), *images(0, n=16, size=64), F.cross_entropy


def _torchvision(name: str, **options: Any) -> Case:
    from torchvision.models import get_model

    torch.manual_seed(0)
    return get_model(name, weights=None, num_classes=10, **options), *images(0, n=16, size=64), F.cross_entropy


def _masks(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], targets)


def _lraspp() -> Case:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    torch.manual_seed(0)
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return model, *scenes(0, n=8, size=96), _masks


class Outputs(nn.Module):
    """A model of transformers, of whose outputs only one is returned."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(x), self.name)


def _transformers(model: str, config: str, name: str = "logits", **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return Outputs(getattr(transformers, model)(getattr(transformers, config)(**options)), name)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _albert() -> Case:
    model = _transformers(
        "AlbertForSequenceClassification", "AlbertConfig", vocab_size=40, embedding_size=32, num_labels=2, **SMALL
    )
    return model, *sentences(0), F.cross_entropy


def _next_words(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets)


def _qwen() -> Case:
    model = _transformers("Qwen2ForCausalLM", "Qwen2Config", vocab_size=100, num_key_value_heads=2, **SMALL)
    return model, *chains(0), _next_words


def _segformer() -> Case:
    model = _transformers(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_labels=4,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        decoder_hidden_size=64,
    )
    pictures, labels = scenes(0, n=8, size=64)
    return model, pictures, labels[:, ::4, ::4], F.cross_entropy


def _patchtst() -> Case:
    model = _transformers(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        "prediction_outputs",
        num_input_channels=3,
        context_length=32,
        prediction_length=4,
        patch_length=8,
        patch_stride=4,
        d_model=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    draw = generator(16)
    phase, pace = 6.3 * torch.rand(32, 1, 3, generator=draw), 0.2 + 0.4 * torch.rand(32, 1, 3, generator=draw)
    waves = torch.sin(phase + pace * torch.arange(36.0)[:, None])
    return model, waves[:, :32], waves[:, 32:], F.mse_loss


LIBRARY: dict[str, Callable[[], Case]] = {
    "timm_ghostnet_050": partial(_timm, "ghostnet_050"),
    "timm_edgenext_xx_small": partial(_timm, "edgenext_xx_small"),
    "timm_fasternet_t0": partial(_timm, "fasternet_t0"),
    "timm_inception_next_atto": partial(_timm, "inception_next_atto"),
    "torchvision_shufflenet_v2_x0_5": partial(_torchvision, "shufflenet_v2_x0_5"),
    "torchvision_regnet_x_400mf": partial(_torchvision, "regnet_x_400mf"),
    "torchvision_googlenet": partial(_torchvision, "googlenet", aux_logits=False, init_weights=True),
    "torchvision_lraspp_mobilenet_v3_large": _lraspp,
    "transformers_albert": _albert,
    "transformers_qwen2": _qwen,
    "transformers_segformer": _segformer,
    "transformers_patchtst": _patchtst,
}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **own.OWN, **tokens.OWN}.items()]

HEALTHY_TENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_tenth(name: str) -> Subject:
    """Build a network of `HEALTHY_TENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
