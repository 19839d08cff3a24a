"""The fourteenth set's healthy networks: thirty of torchvision, timm and transformers, and thirty of our own.

Nothing is wrong with them at the start of training. The set was written without sight of the detector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_fourteenth_pictures as pictures
import healthy_networks_fourteenth_science as science
import healthy_networks_fourteenth_sequences as sequences
import healthy_networks_fourteenth_tables as tables
import healthy_networks_fourteenth_words as words
from fault_cases import Subject
from fifth_parts import Case, Healthy, generator, scenes, subject


def photos(n: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return standardized pictures whose spectrum falls as that of photographs, and their classes.

    A class has a hue and a direction of stripes.
    """
    draw = generator(230)
    labels = torch.arange(n) % classes
    rows, columns = torch.fft.fftfreq(size)[:, None] * size, torch.fft.rfftfreq(size) * size
    fall = 1 / (rows.square() + columns.square()).sqrt().clamp(min=1)
    scene = torch.fft.irfft2(torch.fft.rfft2(torch.randn(n, 3, size, size, generator=draw)) * fall, s=(size, size))
    scene = scene / scene.std((2, 3), keepdim=True)
    hue = torch.randn(classes, 3, 1, 1, generator=draw)[labels]
    line = torch.linspace(-1, 1, size)
    angle = (labels * 3.1416 / classes)[:, None, None]
    stripes = torch.sin(20 * (line[:, None] * angle.cos() + line * angle.sin()))[:, None]
    result = scene + 0.5 * hue + 0.7 * stripes
    return (result - result.mean((0, 2, 3), keepdim=True)) / result.std((0, 2, 3), keepdim=True), labels


def _torchvision(name: str, n: int = 4, **options: Any) -> Case:
    """Return a classifier of torchvision with random weights, for pictures of 224 pixels."""
    import torchvision

    torch.manual_seed(0)
    return getattr(torchvision.models, name)(num_classes=10, **options), *photos(n, 224), F.cross_entropy


def _resnext() -> Case:
    """A ResNeXt of one block per stage, with 32 groups."""
    from torchvision.models.resnet import Bottleneck

    return _torchvision("ResNet", block=Bottleneck, layers=[1, 1, 1, 1], groups=32, width_per_group=4)


class Scores(nn.Module):
    """A segmentation model of torchvision without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)["out"]


def _deeplab() -> Case:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    return Scores(model), *scenes(0, n=4, size=224), F.cross_entropy


def clips(n: int, frames: int, size: int) -> tuple[Tensor, Tensor]:
    """Return films (n, 3, frames, size, size) of scenes that move up, down, left or right, and in which direction."""
    labels = torch.arange(n) % 4
    scenery, _ = photos(n, size)
    moves = torch.tensor([[-4, 0], [4, 0], [0, -4], [0, 4]])
    film = [
        torch.stack([scenery[i].roll((step * moves[labels[i]]).tolist(), (1, 2)) for step in range(frames)], 1)
        for i in range(n)
    ]
    return torch.stack(film), labels


def _films_of_torchvision() -> Case:
    """R(2+1)D of one block per stage."""
    from torchvision.models.video.resnet import BasicBlock, Conv2Plus1D, R2Plus1dStem, VideoResNet

    torch.manual_seed(0)
    model = VideoResNet(BasicBlock, [Conv2Plus1D] * 4, [1, 1, 1, 1], R2Plus1dStem, num_classes=4)
    return model, *clips(4, 8, 112), F.cross_entropy


def _timm(name: str, n: int = 4, size: int = 224, classes: int = 10) -> Case:
    """Return a classifier of timm with random weights, for ten classes or more of which ten occur."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=classes)
    seen, labels = photos(n, size)
    return model, seen, labels * (classes // 10), F.cross_entropy


class Logits(nn.Module):
    """A classifier of transformers without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


def _wav2vec2() -> Case:
    """Half a second of sound at 16 kHz, of one of four pitches with overtones."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        conv_dim=(32,) * 7, feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True,
        num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0,
        classifier_proj_size=64, num_labels=4,
    )  # fmt: skip
    labels = torch.arange(8) % 4
    pitch = torch.tensor([150.0, 320.0, 700.0, 1500.0])[labels][:, None]
    phase = 6.2832 * pitch * torch.arange(8000) / 16000 + 6.2832 * torch.rand(8, 1, generator=generator(231))
    sounds = phase.sin() + 0.5 * (2 * phase).sin() + 0.3 * torch.randn(8, 8000, generator=generator(232))
    sounds = (sounds - sounds.mean(1, keepdim=True)) / sounds.std(1, keepdim=True)
    return Logits(transformers.Wav2Vec2ForSequenceClassification(config)), sounds, labels, F.cross_entropy


def _timesformer() -> Case:
    """Films, the frames before the channels as the model wants them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.TimesformerConfig(
        image_size=112, patch_size=16, num_frames=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=256, num_labels=4,
    )  # fmt: skip
    films, labels = clips(8, 4, 112)
    return (
        Logits(transformers.TimesformerForVideoClassification(config)),
        films.transpose(1, 2),
        labels,
        F.cross_entropy,
    )


class Enlarged(nn.Module):
    """A super-resolution model of transformers without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).reconstruction


def _swin2sr() -> Case:
    """Swin2SR for twice the size, with pixels from 0 to 1."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Swin2SRConfig(
        image_size=32, embed_dim=48, depths=[2, 2], num_heads=[4, 4], window_size=8, upscale=2, upsampler="pixelshuffle"
    )
    large = (0.5 + 0.2 * photos(8, 64)[0]).clamp(0, 1)
    return Enlarged(transformers.Swin2SRForImageSuperResolution(config)), F.avg_pool2d(large, 2), large, F.l1_loss


class Plays(nn.Module):
    """A decision transformer; a step's row holds the state, the last action and the return still wanted."""

    def __init__(self, network: nn.Module, states: int, actions: int) -> None:
        super().__init__()
        self.network, self.sizes = network, (states, actions, 1)

    def forward(self, rows: Tensor) -> Tensor:
        states, actions, wanted = rows.split(self.sizes, 2)
        times = torch.arange(rows.shape[1]).expand(len(rows), -1)
        return self.network(states=states, actions=actions, returns_to_go=wanted, timesteps=times).action_preds


def _decision_transformer() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.DecisionTransformerConfig(
        state_dim=6, act_dim=2, hidden_size=64, max_ep_len=32, n_layer=3, n_head=1, bos_token_id=0, eos_token_id=0
    )
    draw = generator(233)
    states = torch.randn(8, 20, 6, generator=draw).cumsum(1) / 3.2
    chosen = torch.tanh(states @ torch.randn(6, 2, generator=draw))
    wanted = torch.linspace(1, 0, 20)[:, None] * (0.5 + torch.rand(8, 1, 1, generator=draw))
    model = Plays(transformers.DecisionTransformerModel(config), 6, 2)
    return model, torch.cat([states, chosen, wanted], 2), chosen, F.mse_loss


LIBRARY: dict[str, Callable[[], Case]] = {
    "torchvision_resnet18": partial(_torchvision, "resnet18"),
    "torchvision_mobilenet_v2": partial(_torchvision, "mobilenet_v2"),
    "torchvision_googlenet": partial(_torchvision, "googlenet", aux_logits=False, init_weights=True),
    "torchvision_resnext": _resnext,
    "torchvision_maxvit": partial(
        _torchvision, "MaxVit", input_size=(224, 224), stem_channels=32, partition_size=7,
        block_channels=[32, 64, 96, 128], block_layers=[1, 1, 2, 1], head_dim=16, stochastic_depth_prob=0.0,
    ),
    "torchvision_r2plus1d": _films_of_torchvision,
    "torchvision_deeplabv3_mobilenet_v3_large": _deeplab,
    "timm_ghostnet_100": partial(_timm, "ghostnet_100"),
    "timm_repvgg_a0": partial(_timm, "repvgg_a0"),
    "timm_edgenext_xx_small": partial(_timm, "edgenext_xx_small", size=256),
    "timm_gmlp_ti16_224": partial(_timm, "gmlp_ti16_224"),
    "timm_efficientvit_b0": partial(_timm, "efficientvit_b0"),
    "timm_repvit_m0_9": partial(_timm, "repvit_m0_9"),
    "timm_hrnet_w18_small": partial(_timm, "hrnet_w18_small"),
    "timm_dla46_c": partial(_timm, "dla46_c", classes=1000),
    "timm_fastvit_t8": partial(_timm, "fastvit_t8", size=256),
    "timm_mambaout_femto": partial(_timm, "mambaout_femto"),
    "timm_pit_ti_224": partial(_timm, "pit_ti_224"),
    "timm_ese_vovnet19b_slim_dw": partial(_timm, "ese_vovnet19b_slim_dw"),
    "timm_mobilenetv4_conv_small": partial(_timm, "mobilenetv4_conv_small", n=8, classes=1000),
    "transformers_wav2vec2_sounds": _wav2vec2,
    "transformers_timesformer": _timesformer,
    "transformers_swin2sr": _swin2sr,
    "transformers_decision_transformer": _decision_transformer,
    **words.LIBRARY,
}  # fmt: skip

OWN = {**tables.OWN, **pictures.OWN, **sequences.OWN, **science.OWN}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **OWN}.items()]

HEALTHY_FOURTEENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_fourteenth(name: str) -> Subject:
    """Build a network of `HEALTHY_FOURTEENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
