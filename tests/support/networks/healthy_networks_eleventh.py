"""The eleventh set's healthy networks: twelve of timm, torchvision and transformers, and ordinary ones of our own.

Nothing is wrong with them at the start of training. The set was written without sight of the detector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_eleventh_own as own
import healthy_networks_eleventh_sequences as sequences
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, generator, images, scenes, sentences, subject


def _pictures(model: nn.Module, size: int) -> Case:
    return model, *images(0, n=8, size=size), F.cross_entropy


def _timm(name: str, size: int = 64, **kwargs: Any) -> Case:
    """Return a network of timm with ten classes and random weights."""
    import timm

    torch.manual_seed(0)
    return _pictures(timm.create_model(name, pretrained=False, num_classes=10, **kwargs), size)


def _torchvision(name: str, size: int = 64, **kwargs: Any) -> Case:
    """Return a network of torchvision with ten classes and random weights."""
    import torchvision

    torch.manual_seed(0)
    return _pictures(torchvision.models.get_model(name, weights=None, num_classes=10, **kwargs), size)


class Part(nn.Module):
    """A model whose output is one entry of what another returns."""

    def __init__(self, network: nn.Module, entry: str) -> None:
        super().__init__()
        self.network, self.entry = network, entry

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[self.entry]


def _deeplab() -> Case:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    return Part(model, "out"), *scenes(0, n=4, size=64), F.cross_entropy


class NextToken(nn.Module):
    """The scores of the next token, for all tokens of all rows in one table."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(input_ids=tokens).logits.flatten(0, 1)


def _llama() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return NextToken(transformers.LlamaForCausalLM(config)), *chains(0), F.cross_entropy


def _electra() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.ElectraConfig(
        vocab_size=40, embedding_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    return Part(transformers.ElectraForSequenceClassification(config), "logits"), *sentences(0), F.cross_entropy


def _vit() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_labels=10,
    )  # fmt: skip
    return Part(transformers.ViTForImageClassification(config), "logits"), *images(0, n=32, size=32), F.cross_entropy


def _bart() -> Case:
    """An encoder and a decoder that write the input again; the decoder is given the tokens before."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=40, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=32,
    )  # fmt: skip
    words = torch.randint(3, 40, (32, 12), generator=generator(41))
    return NextToken(transformers.BartForConditionalGeneration(config)), words, words.flatten(), F.cross_entropy


LIBRARY: dict[str, Callable[[], Case]] = {
    "timm_mobilenetv3_small_050": partial(_timm, "mobilenetv3_small_050"),
    "timm_repvgg_a0": partial(_timm, "repvgg_a0"),
    "timm_resnet10t": partial(_timm, "resnet10t"),
    "timm_efficientvit_b0": partial(_timm, "efficientvit_b0"),
    "timm_mobilevitv2_050": partial(_timm, "mobilevitv2_050"),
    "torchvision_mobilenet_v3_small": partial(_torchvision, "mobilenet_v3_small"),
    "torchvision_efficientnet_b0": partial(_torchvision, "efficientnet_b0"),
    "torchvision_deeplabv3_mobilenet_v3_large": _deeplab,
    "transformers_llama": _llama,
    "transformers_electra": _electra,
    "transformers_vit": _vit,
    "transformers_bart": _bart,
}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **own.OWN, **sequences.OWN}.items()]

HEALTHY_ELEVENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_eleventh(name: str) -> Subject:
    """Build a network of `HEALTHY_ELEVENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
