"""Thirty sound networks of the ninth set: models of timm and transformers with random weights, and own ones."""

from functools import partial

import healthy_networks_ninth_own as own
import healthy_networks_ninth_tokens as tokens
from fault_cases import Subject
from fifth_parts import Healthy, subject
from healthy_networks_seventh import picture_classifier
from healthy_networks_sixth import SMALL, _language, _sentence_classifier, timm_model

EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 2}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LANDMARKS = {"segment_means_seq_len": 20, "num_landmarks": 10, "max_position_embeddings": 40}
FOCAL = {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}

HEALTHY = [
    Healthy("timm_fastvit_t8", partial(timm_model, "fastvit_t8", 64)),
    Healthy("timm_hgnetv2_b0", partial(timm_model, "hgnetv2_b0", 64)),
    Healthy("timm_mambaout_femto", partial(timm_model, "mambaout_femto", 64)),
    Healthy("transformers_falcon", partial(_language, "FalconForCausalLM", "FalconConfig", **FALCON)),
    Healthy("transformers_mixtral", partial(_language, "MixtralForCausalLM", "MixtralConfig", **EXPERTS, **SMALL)),
    Healthy(
        "transformers_nemotron",
        partial(_language, "NemotronForCausalLM", "NemotronConfig", num_key_value_heads=2, **SMALL),
    ),
    Healthy(
        "transformers_rwkv",
        partial(
            _language, "RwkvForCausalLM", "RwkvConfig", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        ),
    ),
    Healthy(
        "transformers_nystromformer",
        partial(
            _sentence_classifier,
            "NystromformerForSequenceClassification",
            "NystromformerConfig",
            **LANDMARKS,
            **SMALL,
        ),
    ),
    Healthy(
        "transformers_beit",
        partial(picture_classifier, "BeitForImageClassification", "BeitConfig", image_size=32, patch_size=8, **SMALL),
    ),
    Healthy(
        "transformers_focalnet",
        partial(picture_classifier, "FocalNetForImageClassification", "FocalNetConfig", **FOCAL),
    ),
    *(Healthy(name, make) for name, make in {**own.OWN, **tokens.OWN}.items()),
]

HEALTHY_NINTH = [healthy.name for healthy in HEALTHY]


def build_healthy_ninth(name: str) -> Subject:
    """Build a network of `HEALTHY_NINTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
