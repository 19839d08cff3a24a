"""Thirty sound networks of the eighth set: models of timm and transformers with random weights, and own ones."""

from functools import partial

import healthy_networks_eighth_own as own
import healthy_networks_eighth_tokens as tokens
from fault_cases import Subject
from fifth_parts import Healthy, subject
from healthy_networks_seventh import picture_classifier
from healthy_networks_sixth import SMALL, _language, _sentence_classifier, timm_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 8}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.3, "logits_scaling": 0.5}
PICTURE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}

HEALTHY = [
    Healthy("timm_starnet_s050", partial(timm_model, "starnet_s050", 32)),
    Healthy("timm_swiftformer_xs", partial(timm_model, "swiftformer_xs", 64)),
    Healthy("timm_xcit_nano", partial(timm_model, "xcit_nano_12_p16_224", 32, img_size=32)),
    Healthy("transformers_gpt_oss", partial(_language, "GptOssForCausalLM", "GptOssConfig", **EXPERTS, **SMALL)),
    Healthy("transformers_granite", partial(_language, "GraniteForCausalLM", "GraniteConfig", **MULTIPLIERS, **SMALL)),
    Healthy(
        "transformers_mamba",
        partial(_language, "MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8),
    ),
    Healthy(
        "transformers_fnet",
        partial(
            _sentence_classifier,
            "FNetForSequenceClassification",
            "FNetConfig",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
        ),
    ),
    Healthy(
        "transformers_dinov2",
        partial(picture_classifier, "Dinov2ForImageClassification", "Dinov2Config", layerscale_value=0.1, **PICTURE),
    ),
    Healthy(
        "transformers_convnext_v2",
        partial(
            picture_classifier,
            "ConvNextV2ForImageClassification",
            "ConvNextV2Config",
            hidden_sizes=[16, 24, 32, 48],
            depths=[1] * 4,
        ),
    ),
    Healthy(
        "transformers_swin_v2",
        partial(picture_classifier, "Swinv2ForImageClassification", "Swinv2Config", **WINDOWS),
    ),
    *(Healthy(name, make) for name, make in {**own.OWN, **tokens.OWN}.items()),
]

HEALTHY_EIGHTH = [healthy.name for healthy in HEALTHY]


def build_healthy_eighth(name: str) -> Subject:
    """Build a network of `HEALTHY_EIGHTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
