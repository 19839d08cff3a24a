"""The thirteenth set's healthy networks: thirty of torchvision, timm and transformers, and thirty of our own.

Nothing is wrong with them at the start of training. The set was written without sight of the detector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_thirteenth_own as own
import healthy_networks_thirteenth_pictures as pictures
import healthy_networks_thirteenth_science as science
import healthy_networks_thirteenth_sequences as sequences
from fault_cases import Subject
from fifth_parts import Case, Healthy, chains, generator, scenes, sentences, subject


def photos(n: int, size: int) -> tuple[Tensor, Tensor]:
    """Return standardized pictures with coarse and fine parts, as photographs have, and their classes, ten at most."""
    draw = generator(130)
    labels = torch.arange(n) % 10
    patterns = torch.randn(10, 3, 8, 8, generator=generator(131))
    result = F.interpolate(patterns, size=size, mode="bilinear")[labels]
    for cells, weight in ((2, 1.0), (6, 0.8), (16, 0.5), (48, 0.3), (size, 0.2)):
        field = torch.randn(n, 3, cells, cells, generator=draw)
        result = result + weight * F.interpolate(field, size=size, mode="bilinear")
    return (result - result.mean((0, 2, 3), keepdim=True)) / result.std((0, 2, 3), keepdim=True), labels


def _torchvision(name: str, n: int = 8, classes: int = 10, **options: Any) -> Case:
    """Return a classifier of torchvision with random weights, for pictures of 224 pixels."""
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=classes, **options)
    seen, labels = photos(n, 224)
    return model, seen, labels * (classes // 10), F.cross_entropy


class OutputNamed(nn.Module):
    """A model of which one output is meant, for instance the logits."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[self.name]


def _lraspp() -> Case:
    """A network of torchvision that gives each pixel a class."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    return OutputNamed(model, "out"), *scenes(0, n=4, size=224), F.cross_entropy


def _timm(name: str, n: int = 8, size: int = 224, **options: Any) -> Case:
    """Return a classifier of timm with ten classes and random weights."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, *photos(n, size), F.cross_entropy


class Words(nn.Module):
    """A model of transformers for words, of which 0 pads; it returns one row of logits per word or per sentence."""

    def __init__(self, network: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.network, self.padded = network, padded

    def forward(self, x: Tensor) -> Tensor:
        options = {"attention_mask": (x != 0).long()} if self.padded else {}
        logits = self.network(x, **options).logits
        return logits.flatten(0, 1) if logits.dim() == 3 else logits


def _masked_words() -> Case:
    """BERT, which guesses the words that are masked."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=64,
    )  # fmt: skip
    words, _ = chains(0, n=8, length=48, vocabulary=198)
    words = words + 2
    masked = torch.rand(words.shape, generator=generator(132)) < 0.15
    targets = torch.where(masked, words, torch.tensor(-100)).flatten()
    return Words(transformers.BertForMaskedLM(config)), words.masked_fill(masked, 1), targets, F.cross_entropy


def _deberta() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
        position_biased_input=False, share_att_key=True, norm_rel_ebd="layer_norm", num_labels=2,
    )  # fmt: skip
    model = transformers.DebertaV2ForSequenceClassification(config)
    return Words(model, padded=True), *sentences(0, n=8), F.cross_entropy


class Translates(nn.Module):
    """An encoder and a decoder of transformers, for sentences whose translation so far is beside them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(input_ids=x[:, 0], decoder_input_ids=x[:, 1]).logits.flatten(0, 1)


def _t5() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    source = torch.randint(2, 100, (8, 16), generator=generator(133))
    target = (source.flip(1) * 7) % 98 + 2
    begun = torch.cat([torch.zeros(8, 1, dtype=torch.long), target[:, :-1]], 1)
    model = transformers.T5ForConditionalGeneration(config)
    return Translates(model), torch.stack([source, begun], 1), target.flatten(), F.cross_entropy


def _writer(kind: str, **options: Any) -> Case:
    """Return a language model of transformers and sentences whose words are to be guessed."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(vocab_size=200, hidden_size=64, **options)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    return Words(model), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


def _fnet() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.FNetConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, intermediate_size=256, max_position_embeddings=32,
        num_labels=2,
    )  # fmt: skip
    return Words(transformers.FNetForSequenceClassification(config)), *sentences(0, n=8), F.cross_entropy


class AtFullSize(nn.Module):
    """A segmentation model of transformers whose coarse scores are brought to the picture's size."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.network(x).logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def _segformer() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1, 1, 2, 1], hidden_sizes=[16, 32, 64, 96], decoder_hidden_size=64, num_labels=4
    )
    return AtFullSize(transformers.SegformerForSemanticSegmentation(config)), *scenes(0, n=4, size=128), F.cross_entropy


def _patchtst() -> Case:
    """A transformer over pieces of time series, which says how they go on."""
    import transformers

    torch.manual_seed(0)
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=64, prediction_length=16, patch_length=8, patch_stride=8, d_model=64,
        num_attention_heads=4, ffn_dim=128, num_hidden_layers=2, loss="mse",
    )  # fmt: skip
    draw = generator(134)
    phase, pace = 6.3 * torch.rand(8, 1, 3, generator=draw), 0.1 + 0.3 * torch.rand(8, 1, 3, generator=draw)
    waves = torch.sin(phase + pace * torch.arange(80.0)[:, None]) + 0.1 * torch.randn(8, 80, 3, generator=draw)
    model = OutputNamed(transformers.PatchTSTForPrediction(config), "prediction_outputs")
    return model, waves[:, :64] / 0.7, waves[:, 64:] / 0.7, F.mse_loss


def _whisper() -> Case:
    """Whisper's encoder, which says of which kind a sound is."""
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=100, num_mel_bins=80, d_model=64, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=256, max_source_positions=100, num_labels=5,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, classifier_proj_size=64,
    )  # fmt: skip
    labels = torch.arange(8) % 5
    tones = torch.exp(-((torch.arange(80.0) - 12 - 14 * labels[:, None]) / 6).square())[:, :, None]
    loud = F.interpolate(torch.rand(8, 1, 10, generator=generator(135)), size=200, mode="linear")
    bands = tones * loud * 2 + 0.3 * torch.randn(8, 80, 200, generator=generator(136))
    bands = (bands - bands.mean()) / bands.std()
    return OutputNamed(transformers.WhisperForAudioClassification(config), "logits"), bands, labels, F.cross_entropy


LIBRARY: dict[str, Callable[[], Case]] = {
    "torchvision_squeezenet1_1": partial(_torchvision, "squeezenet1_1"),
    "torchvision_shufflenet_v2_x0_5": partial(_torchvision, "shufflenet_v2_x0_5"),
    "torchvision_mobilenet_v3_small": partial(_torchvision, "mobilenet_v3_small"),
    "torchvision_mnasnet0_5": partial(_torchvision, "mnasnet0_5", classes=1000),
    "torchvision_efficientnet_b0": partial(_torchvision, "efficientnet_b0", classes=1000),
    "torchvision_regnet_x_400mf": partial(_torchvision, "regnet_x_400mf", n=4),
    "torchvision_densenet": partial(
        _torchvision, "DenseNet", n=4, growth_rate=16, block_config=(4, 6, 8, 6), num_init_features=32
    ),
    "torchvision_swin": partial(
        _torchvision, "SwinTransformer", n=4, patch_size=[4, 4], embed_dim=32, depths=[2, 2, 2, 2],
        num_heads=[2, 4, 8, 16], window_size=[7, 7],
    ),
    "torchvision_vit": partial(
        _torchvision, "VisionTransformer", image_size=224, patch_size=16, num_layers=6, num_heads=4, hidden_dim=128,
        mlp_dim=512,
    ),
    "torchvision_lraspp_mobilenet_v3_large": _lraspp,
    "timm_mixer_s32_224": partial(_timm, "mixer_s32_224", n=4),
    "timm_convnextv2_atto": partial(_timm, "convnextv2_atto", n=4),
    "timm_mobilevit_xxs": partial(_timm, "mobilevit_xxs", n=4, size=256),
    "timm_levit_128s": partial(_timm, "levit_128s"),
    "timm_nf_regnet_b0": partial(_timm, "nf_regnet_b0", n=4, size=192),
    "timm_xcit_nano_12_p16_224": partial(_timm, "xcit_nano_12_p16_224", n=4),
    "timm_pvt_v2_b0": partial(_timm, "pvt_v2_b0", n=4),
    "timm_starnet_s1": partial(_timm, "starnet_s1", n=4),
    "timm_inception_next_atto": partial(_timm, "inception_next_atto", n=4),
    "timm_hgnetv2_b0": partial(_timm, "hgnetv2_b0", n=4),
    "transformers_bert_masked_words": _masked_words,
    "transformers_deberta_v2": _deberta,
    "transformers_t5": _t5,
    "transformers_bloom": partial(_writer, "Bloom", n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1),
    "transformers_qwen3": partial(
        _writer, "Qwen3", intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64,
    ),
    "transformers_mamba": partial(_writer, "Mamba", state_size=8, num_hidden_layers=3, use_mambapy=False),
    "transformers_fnet": _fnet,
    "transformers_segformer": _segformer,
    "transformers_patchtst": _patchtst,
    "transformers_whisper_sounds": _whisper,
}  # fmt: skip

OWN = {**own.OWN, **science.OWN, **pictures.OWN, **sequences.OWN}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **OWN}.items()]

HEALTHY_THIRTEENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_thirteenth(name: str) -> Subject:
    """Build a network of `HEALTHY_THIRTEENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
