"""Thirty sound networks of the sixth set: models of timm and transformers with random weights, and own ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_sixth_own as own
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, images, sentences, subject

VOCABULARY = 60


def timm_model(name: str, size: int, **options: Any) -> Case:
    """Return a model of timm with random weights and a batch of pictures."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, *images(0, n=8, size=size), nn.CrossEntropyLoss()


class Wrapped(nn.Module):
    """A model of transformers that returns one tensor, made by `read` from its output."""

    def __init__(self, body: nn.Module, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.body, self.read = body, read

    def forward(self, inputs: Tensor) -> Tensor:
        return self.read(self.body(inputs))


def _language(family: str, config: str, **options: Any) -> Case:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, config)(vocab_size=VOCABULARY, pad_token_id=0, **options)
    model = getattr(transformers, family)(settings)
    tokens, following = chains(0, n=8, vocabulary=VOCABULARY)
    return Wrapped(model, lambda out: out.logits.flatten(0, 1)), tokens, following, nn.CrossEntropyLoss()


def _sentence_classifier(family: str, config: str, **options: Any) -> Case:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, config)(vocab_size=VOCABULARY, num_labels=2, **options)
    model = getattr(transformers, family)(settings)
    return Wrapped(model, lambda out: out.logits), *sentences(0, n=16), nn.CrossEntropyLoss()


class MarianPair(nn.Module):
    """Marian with the tokens as source and as the decoder's input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = F.pad(tokens[:, :-1], (1, 0), value=1)
        return self.body(input_ids=tokens, decoder_input_ids=shifted).logits.flatten(0, 1)


def marian() -> Case:
    """An encoder-decoder transformer that writes its input backwards."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    settings = MarianConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64)
    settings.update({"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1})
    for part in ("encoder", "decoder"):
        settings.update({f"{part}_layers": 2, f"{part}_ffn_dim": 64, f"{part}_attention_heads": 4})
    model = MarianMTModel(settings)
    tokens = chains(0, n=8, length=12, vocabulary=VOCABULARY)[0]
    return MarianPair(model), tokens, tokens.flip(1).flatten(), nn.CrossEntropyLoss()


def time_series_mixer() -> Case:
    """PatchTSMixer as a forecaster."""
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    torch.manual_seed(0)
    settings = PatchTSMixerConfig(context_length=32, patch_length=8, patch_stride=8, num_input_channels=2)
    settings.update({"d_model": 16, "num_layers": 2, "prediction_length": 8})
    model = PatchTSMixerForPrediction(settings)
    time = torch.arange(40.0)[None, :, None] + 6 * torch.rand(32, 1, 2)
    waves = torch.sin(time / 3) + 0.1 * torch.randn(32, 40, 2)
    return Wrapped(model, lambda out: out.prediction_outputs), waves[:, :32], waves[:, 32:], nn.MSELoss()


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}

HEALTHY = [
    Healthy("timm_dla34", partial(timm_model, "dla34", 64)),
    Healthy("timm_skresnet18", partial(timm_model, "skresnet18", 64)),
    Healthy("timm_tresnet_m", partial(timm_model, "tresnet_m", 64)),
    Healthy("timm_sequencer2d_s", partial(timm_model, "sequencer2d_s", 64, img_size=64)),
    Healthy("timm_efficientvit_b0", partial(timm_model, "efficientvit_b0", 64)),
    Healthy("timm_davit_tiny", partial(timm_model, "davit_tiny", 64)),
    Healthy(
        "transformers_helium",
        partial(_language, "HeliumForCausalLM", "HeliumConfig", num_key_value_heads=2, head_dim=8, **SMALL),
    ),
    Healthy(
        "transformers_olmoe",
        partial(_language, "OlmoeForCausalLM", "OlmoeConfig", num_experts=4, num_experts_per_tok=2, **SMALL),
    ),
    Healthy(
        "transformers_openai_gpt",
        partial(_language, "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    ),
    Healthy(
        "transformers_convbert",
        partial(
            _sentence_classifier, "ConvBertForSequenceClassification", "ConvBertConfig", embedding_size=32, **SMALL
        ),
    ),
    Healthy("transformers_marian", marian),
    Healthy("transformers_patchtsmixer", time_series_mixer),
    *(Healthy(name, make) for name, make in own.OWN.items()),
]

HEALTHY_SIXTH = [healthy.name for healthy in HEALTHY]


def build_healthy_sixth(name: str) -> Subject:
    """Build a network of `HEALTHY_SIXTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
