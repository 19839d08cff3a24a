"""Thirty sound networks of the seventh set: models of timm and transformers with random weights, and own ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import healthy_networks_seventh_own as own
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, images, scenes, subject
from healthy_networks_sixth import SMALL, VOCABULARY, MarianPair, Wrapped, _language, timm_model


def bart() -> Case:
    """Return an encoder-decoder transformer that writes its input backwards."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    settings = BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64)
    settings.update({"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1})
    for part in ("encoder", "decoder"):
        settings.update({f"{part}_layers": 2, f"{part}_ffn_dim": 64, f"{part}_attention_heads": 4})
    tokens = chains(0, n=8, length=12, vocabulary=VOCABULARY)[0]
    return MarianPair(BartForConditionalGeneration(settings)), tokens, tokens.flip(1).flatten(), nn.CrossEntropyLoss()


def picture_classifier(family: str, config: str, **options: Any) -> Case:
    """Return a picture classifier of transformers."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, config)(num_labels=10, **options)
    model = getattr(transformers, family)(settings)
    return Wrapped(model, lambda out: out.logits), *images(0, n=16, size=32), nn.CrossEntropyLoss()


def segformer() -> Case:
    """Return SegFormer on pictures of 32x32 pixels, with labels at a quarter of the size."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    settings = SegformerConfig(hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2])
    settings.update({"decoder_hidden_size": 32, "num_labels": 4})
    pictures, labels = scenes(0, n=8, size=32)
    body = SegformerForSemanticSegmentation(settings)
    return Wrapped(body, lambda out: out.logits), pictures, labels[:, ::4, ::4], nn.CrossEntropyLoss()


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    return partial(timm_model, name, size, **options)


HEALTHY = [
    Healthy("timm_regnetx_002", _timm("regnetx_002")),
    Healthy("timm_ghostnet_050", _timm("ghostnet_050")),
    Healthy("timm_mobilevit_xxs", _timm("mobilevit_xxs")),
    Healthy("timm_levit_128s", _timm("levit_128s", 224)),
    Healthy("timm_poolformer_s12", _timm("poolformer_s12")),
    Healthy(
        "transformers_gpt_neox",
        partial(_language, "GPTNeoXForCausalLM", "GPTNeoXConfig", max_position_embeddings=64, **SMALL),
    ),
    Healthy(
        "transformers_qwen3",
        partial(_language, "Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=8, **SMALL),
    ),
    Healthy(
        "transformers_bloom", partial(_language, "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4)
    ),
    Healthy("transformers_phi", partial(_language, "PhiForCausalLM", "PhiConfig", **SMALL)),
    Healthy("transformers_bart", bart),
    Healthy(
        "transformers_resnet",
        partial(
            picture_classifier,
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[16, 32, 48],
            depths=[1, 1, 1],
            layer_type="basic",
        ),
    ),
    Healthy("transformers_segformer", segformer),
    *(Healthy(name, make) for name, make in own.OWN.items()),
]

HEALTHY_SEVENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_seventh(name: str) -> Subject:
    """Build a network of `HEALTHY_SEVENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
