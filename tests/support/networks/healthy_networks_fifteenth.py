"""The fifteenth set's healthy networks: thirty of torchvision, timm and transformers, and thirty of our own.

Nothing is wrong with them at the start of training. The set was written without sight of the detector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import healthy_networks_fifteenth_pictures as pictures
import healthy_networks_fifteenth_science as science
import healthy_networks_fifteenth_sequences as sequences
import healthy_networks_fifteenth_tables as tables
import healthy_networks_fifteenth_transformers as transformers_part
import healthy_networks_fifteenth_views as views
from fault_cases import Subject
from fifth_parts import Case, Healthy, scenes, subject
from healthy_networks_fourteenth import Scores, photos


def _torchvision(name: str, n: int = 4, size: int = 224, **options: Any) -> Case:
    """Return a classifier of torchvision with random weights."""
    import torchvision

    torch.manual_seed(0)
    return getattr(torchvision.models, name)(num_classes=10, **options), *photos(n, size), F.cross_entropy


def _swin_v2() -> Case:
    """Swin V2 with cosine attention and norms after the branches, for pictures of 256 pixels."""
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return _torchvision(
        "SwinTransformer", size=256, patch_size=[4, 4], embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8],
        window_size=[8, 8], stochastic_depth_prob=0.0, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip


def _convnext() -> Case:
    """A ConvNeXt of half the width and two blocks per stage."""
    from torchvision.models.convnext import CNBlockConfig

    widths = (48, 96, 192, 384)
    stages = [CNBlockConfig(width, after, 2) for width, after in zip(widths, (*widths[1:], None), strict=True)]
    return _torchvision("ConvNeXt", block_setting=stages)


def _wide_resnet() -> Case:
    """A wide ResNet of bottlenecks, one block per stage."""
    from torchvision.models.resnet import Bottleneck

    return _torchvision("ResNet", block=Bottleneck, layers=[1, 1, 1, 1], width_per_group=128)


def _fcn() -> Case:
    """FCN over the features of a ResNet-18, with the class of each pixel."""
    import torchvision
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    torch.manual_seed(0)
    backbone = IntermediateLayerGetter(torchvision.models.resnet18(weights=None), return_layers={"layer4": "out"})
    return Scores(FCN(backbone, FCNHead(512, 4))), *scenes(0, n=4, size=224), F.cross_entropy


class Flows(nn.Module):
    """RAFT over pairs of pictures (n, 2, 3, height, width); its flow after each of six updates."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.network(x[:, 0], x[:, 1], num_flow_updates=6), 1)


def sequence_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return RAFT's loss: the mean distance of each flow, of which the later weigh more."""
    weights = 0.8 ** torch.arange(output.shape[1] - 1, -1, -1)
    return ((output - targets[:, None]).abs().mean((0, 2, 3, 4)) * weights).sum()


def _raft() -> Case:
    """Scenes with pixels from -1 to 1 that moved by up to six pixels."""
    import torchvision

    torch.manual_seed(0)
    scenery = (photos(4, 128)[0] / 3).clamp(-1, 1)
    moves = torch.tensor([[5, -3], [-6, 2], [3, 4], [-2, -5]])  # down and right
    moved = torch.stack([scene.roll(move.tolist(), (1, 2)) for scene, move in zip(scenery, moves, strict=True)])
    flow = moves.flip(1).float()[:, :, None, None].expand(-1, -1, 128, 128)
    model = Flows(torchvision.models.optical_flow.raft_small(weights=None))
    return model, torch.stack([scenery, moved], 1), flow, sequence_loss


def _timm(name: str, n: int = 4, size: int = 224, classes: int = 10) -> Case:
    """Return a classifier of timm with random weights, for ten classes or more of which ten occur."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=classes)
    seen, labels = photos(n, size)
    return model, seen, labels * (classes // 10), F.cross_entropy


LIBRARY: dict[str, Callable[[], Case]] = {
    "torchvision_swin_v2": _swin_v2,
    "torchvision_convnext": _convnext,
    "torchvision_inception_v3": partial(
        _torchvision, "inception_v3", size=299, aux_logits=False, init_weights=True, transform_input=False
    ),
    "torchvision_wide_resnet": _wide_resnet,
    "torchvision_fcn_resnet18": _fcn,
    "torchvision_raft_small": _raft,
    "timm_resmlp_12_224": partial(_timm, "resmlp_12_224"),
    "timm_poolformer_s12": partial(_timm, "poolformer_s12"),
    "timm_rexnet_100": partial(_timm, "rexnet_100"),
    "timm_convit_tiny": partial(_timm, "convit_tiny"),
    "timm_eva02_tiny_patch14_224": partial(_timm, "eva02_tiny_patch14_224"),
    "timm_efficientformerv2_s0": partial(_timm, "efficientformerv2_s0"),
    "timm_tiny_vit_5m_224": partial(_timm, "tiny_vit_5m_224"),
    "timm_visformer_tiny": partial(_timm, "visformer_tiny"),
    "timm_crossvit_tiny_240": partial(_timm, "crossvit_tiny_240", size=240),
    "timm_skresnet18": partial(_timm, "skresnet18"),
    "timm_mixnet_s": partial(_timm, "mixnet_s", n=8),
    "timm_swiftformer_xs": partial(_timm, "swiftformer_xs"),
    "timm_selecsls42": partial(_timm, "selecsls42"),
    **transformers_part.LIBRARY,
}

OWN = {**tables.OWN, **pictures.OWN, **views.OWN, **sequences.OWN, **science.OWN}

HEALTHY: list[Healthy] = [Healthy(name, make) for name, make in {**LIBRARY, **OWN}.items()]

HEALTHY_FIFTEENTH = [healthy.name for healthy in HEALTHY]


def build_healthy_fifteenth(name: str) -> Subject:
    """Build a network of `HEALTHY_FIFTEENTH`."""
    return subject(next(healthy for healthy in HEALTHY if healthy.name == name).make())
