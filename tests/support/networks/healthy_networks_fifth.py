"""Thirty sound networks: twelve twins of broken ones, models of libraries, and own ones of unusual design."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_fifth_own as own
from broken_networks_fifth import BROKEN
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, images, sentences, subject

TWINS = (
    "vgg_without_norm", "resnet_forgotten_skip", "resnet_one_block_unlike", "resnet_zero_twice",
    "detector_prior_everywhere", "unet_view_of_scores", "transfer_all_frozen", "vae_sample",
    "recommender_default_embeddings", "text_inverted_mask", "graph_too_deep", "regression_broadcast",
)  # fmt: skip


def vision(name: str, size: int, **options: Any) -> Case:
    """Return a model of torchvision with random weights."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    return model, *images(0, n=16, size=size), nn.CrossEntropyLoss()


def from_timm(name: str, size: int, **options: Any) -> Case:
    """Return a model of timm with random weights."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, *images(0, n=16, size=size), nn.CrossEntropyLoss()


def _of_logits(output: Any, targets: Tensor) -> Tensor:
    logits = output.logits
    return F.cross_entropy(logits.flatten(0, -2), targets)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config).train(), *chains(0), _of_logits


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), *chains(0), _of_logits


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config).train(), *sentences(0), _of_logits


LIBRARY: dict[str, Callable[[], Case]] = {
    "torchvision_resnet18": partial(vision, "resnet18", 48),
    "torchvision_mobilenet_v3_small": partial(vision, "mobilenet_v3_small", 64),
    "timm_convnext_atto": partial(from_timm, "convnext_atto", 64),
    "timm_vit_tiny": partial(from_timm, "vit_tiny_patch16_224", 64, img_size=64, depth=6),
    "transformers_gpt2": gpt2,
    "transformers_llama": llama,
    "transformers_bert": bert,
}

HEALTHY: list[Healthy] = [
    *(Healthy(f"{case.name}_twin", partial(case.make, broken=False)) for case in BROKEN if case.name in TWINS),
    *(Healthy(name, make) for name, make in LIBRARY.items()),
    *(Healthy(make.__name__, make) for make in own.OWN),
]
HEALTHY_FIFTH = [healthy.name for healthy in HEALTHY]


def build_healthy_fifth(name: str) -> Subject:
    """Build a network of `HEALTHY_FIFTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
