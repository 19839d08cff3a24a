"""The twelfth set's healthy networks: fifteen of timm, torchvision and transformers, and fifteen of our own.

Nothing is wrong with them at the start of training. The set was written without sight of the detector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_twelfth_own as own
import healthy_networks_twelfth_sequences as sequences
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, generator, images, sentences, subject


def _timm(name: str, size: int = 64, **options: Any) -> Case:
    """Return a network of timm with ten classes and random weights."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, *images(0, n=8, size=size), F.cross_entropy


def _alexnet() -> Case:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.alexnet(weights=None, num_classes=10), *images(0, n=8, size=64), F.cross_entropy


def _maxvit() -> Case:
    """A small MaxViT of torchvision."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.MaxVit(
        (64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[1, 2], head_dim=8,
        stochastic_depth_prob=0.0, num_classes=10,
    )  # fmt: skip
    return model, *images(0, n=8, size=64), F.cross_entropy


def _film() -> Case:
    """A network of torchvision for films, here of four frames that hardly differ."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.video.mc3_18(weights=None, num_classes=10)
    frames, labels = images(0, n=6, size=32)
    changes = 0.3 * torch.randn(6, 3, 4, 32, 32, generator=generator(81))
    return model, frames[:, :, None] + changes, labels, F.cross_entropy


class Logits(nn.Module):
    """A model of transformers that returns its logits alone, for tokens in one table."""

    def __init__(self, network: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.network, self.padded = network, padded

    def forward(self, x: Tensor) -> Tensor:
        options = {"attention_mask": (x != 0).long()} if self.padded else {}
        logits = self.network(x, **options).logits
        return logits.flatten(0, 1) if logits.dim() == 3 else logits


def _gptj() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        vocab_size=100, n_positions=32, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, bos_token_id=0, eos_token_id=1
    )
    return Logits(transformers.GPTJForCausalLM(config)), *chains(0), F.cross_entropy


def _stablelm() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.StableLmConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return Logits(transformers.StableLmForCausalLM(config)), *chains(0), F.cross_entropy


def _squeezebert() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.SqueezeBertConfig(
        vocab_size=40, hidden_size=64, embedding_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    return (
        Logits(transformers.SqueezeBertForSequenceClassification(config), padded=True),
        *sentences(0),
        F.cross_entropy,
    )


def _cvt() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.CvtConfig(
        embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.0], num_labels=10
    )
    return Logits(transformers.CvtForImageClassification(config)), *images(0, n=16, size=64), F.cross_entropy


def _spectrograms() -> Case:
    """An Audio Spectrogram Transformer, whose input is time by bands."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ASTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, patch_size=8,
        frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=32, num_labels=10,
    )  # fmt: skip
    sounds, labels = images(0, n=32, size=32, channels=1)
    return Logits(transformers.ASTForAudioClassification(config)), 0.5 * sounds[:, 0], labels, F.cross_entropy


class LettersOfWaves(nn.Module):
    """The logarithms of the probabilities of letters by a Wav2Vec2 of transformers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, waves: Tensor) -> Tensor:
        return self.network(waves).logits.log_softmax(2)


def _wav2vec2() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_stride=(5, 4, 4), conv_kernel=(10, 4, 4), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    letters = torch.randint(1, 8, (8, 6), generator=generator(82))
    pitch = (0.05 * letters).repeat_interleave(400, 1)
    waves = torch.sin(pitch.cumsum(1)) + 0.1 * torch.randn(pitch.shape, generator=generator(83))
    waves = (waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True)
    return LettersOfWaves(transformers.Wav2Vec2ForCTC(config)), waves, letters, sequences.ctc


LIBRARY: dict[str, Callable[[], Case]] = {
    "timm_seresnet18": partial(_timm, "seresnet18"),
    "timm_coat_lite_tiny": partial(_timm, "coat_lite_tiny", img_size=64),
    "timm_efficientformerv2_s0": partial(_timm, "efficientformerv2_s0", img_size=64),
    "timm_ghostnetv2_100": partial(_timm, "ghostnetv2_100"),
    "timm_shvit_s1": partial(_timm, "shvit_s1"),
    "timm_cs3darknet_s": partial(_timm, "cs3darknet_s"),
    "torchvision_alexnet": _alexnet,
    "torchvision_maxvit": _maxvit,
    "torchvision_mc3_18": _film,
    "transformers_gptj": _gptj,
    "transformers_stablelm": _stablelm,
    "transformers_squeezebert": _squeezebert,
    "transformers_cvt": _cvt,
    "transformers_audio_spectrogram": _spectrograms,
    "transformers_wav2vec2": _wav2vec2,
}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **own.OWN, **sequences.OWN}.items()]

HEALTHY_TWELFTH = [healthy.name for healthy in HEALTHY]


def build_healthy_twelfth(name: str) -> Subject:
    """Build a network of `HEALTHY_TWELFTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
