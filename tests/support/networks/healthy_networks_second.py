"""Thirty more networks that train, for counting false alarms; none of them is in `healthy_networks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fault_cases import CLASSES, Plain, Subject, features, he_
from healthy_networks import PATCHES, SIZES, Build, _image_transformer, _made, _text, _timm, _torchvision


class SELUNet(Plain):
    """A self-normalizing network: LeCun's weights and SELU."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for i in range(12):
            layers += [nn.Linear(64 if i else 32, 64), nn.SELU()]
        super().__init__(layers, nn.Linear(64, CLASSES))
        he_(self, 0.5**0.5)


class Highway(nn.Module):
    """t · h + (1 - t) · x with gates that start nearly shut."""

    def __init__(self, depth: int = 8, width: int = 48) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            t = gate(x).sigmoid()
            x = t * F.relu(layer(x)) + (1 - t) * x
        return self.head(x)


class Tagger(nn.Module):
    """Words, an LSTM of two layers in both directions, and a class for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embedding(ids))[0]).mT


class PointNet(nn.Module):
    """A shared MLP with batch norm on each point, and the maximum over the points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 128, 1), nn.BatchNorm1d(128), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


class FactorizationMachine(nn.Module):
    """First and second order of embedded columns, and an MLP, added up (DeepFM)."""

    def __init__(self, columns: int = 6, values: int = 20, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(values, CLASSES), nn.Embedding(values, width)
        nn.init.normal_(self.first.weight, std=0.01)
        nn.init.normal_(self.second.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(columns * width, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.pairs = nn.Linear(width, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.second(ids)
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1))
        return self.first(ids).sum(1) + self.pairs(pairs) + self.mlp(rows.flatten(1))


class PostNormLoop(nn.Module):
    """Four post-norm layers of attention and MLP, added in the forward pass of the model."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = self.norms[2 * i](x + attention(x, x, x, need_weights=False)[0])
            x = self.norms[2 * i + 1](x + mlp(x))
        return self.head(x.mean(1))


class TemporalConvolutions(nn.Module):
    """Causal convolutions with weight norm and growing dilation; the last step is classified."""

    def __init__(self, depth: int = 4, width: int = 24) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv1d(4, width, 1), nn.Linear(width, CLASSES)
        self.convolutions = nn.ModuleList(weight_norm(nn.Conv1d(width, width, 3, dilation=2**i)) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, convolution in enumerate(self.convolutions):
            x = x + F.relu(convolution(F.pad(x, (2 * 2**i, 0))))
        return self.fc(x[..., -1])


def _tagger() -> Subject:
    ids = torch.randint(50, (8, 12))
    return Subject(Tagger(), ids, ids % CLASSES, F.cross_entropy)


def _factorization_machine() -> Subject:
    return Subject(FactorizationMachine(), torch.randint(20, (16, 6)), torch.arange(16) % CLASSES)


def _convolutional_autoencoder() -> Subject:
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU()]
    decoder = nn.Sequential(nn.ConvTranspose2d(24, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2))
    example = F.interpolate(torch.randn(8, 3, 4, 4), scale_factor=4.0, mode="bilinear")
    return Subject(he_(Plain(layers, decoder)), example, example, F.mse_loss)


def _regression() -> Subject:
    layers = [nn.Linear(32, 64), nn.SiLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.SiLU()]
    example, _ = features()
    return Subject(Plain(layers, nn.Linear(64, 1)), example, example.mean(-1, keepdim=True), F.mse_loss)


BUILDERS: dict[str, Build] = {
    **{
        f"torchvision {name}": _torchvision(name)
        for name in ("mobilenet_v3_large", "resnet34", "resnext50_32x4d", "shufflenet_v2_x1_0")
    },
    **{
        f"timm {name}": _timm(name)
        for name in (
            "dla46_c", "ese_vovnet19b_dw", "hardcorenas_a", "mobileone_s0", "res2net50_26w_4s", "resnet10t",
            "rexnet_100", "tinynet_e",
        )
    },
    "timm deit_tiny_patch16_224": _timm("deit_tiny_patch16_224", img_size=64),
    "timm gmlp_s16_224": _timm("gmlp_s16_224", img_size=64),
    "transformers ALBERT": _text("Albert", embedding_size=32, **SIZES),
    "transformers BART": _text(
        "Bart", "ConditionalGeneration", d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_start_token_id=2,
    ),
    "transformers BLOOM": _text("Bloom", "CausalLM", hidden_size=64, n_layer=4, n_head=4),
    "transformers Gemma": _text("Gemma", "CausalLM", num_key_value_heads=2, head_dim=16, **SIZES),
    "transformers Mistral": _text("Mistral", "CausalLM", num_key_value_heads=2, **SIZES),
    "transformers OPT": _text(
        "OPT", "CausalLM", hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=4, num_attention_heads=4,
        ffn_dim=256,
    ),
    "transformers DeiT": _image_transformer("DeiT", **PATCHES),
    "self-normalizing MLP": _made(SELUNet, 32),
    "highway network": _made(Highway, 32),
    "bidirectional LSTM": _tagger,
    "PointNet": _made(PointNet, 3, 40),
    "factorization machine": _factorization_machine,
    "post-norm loop of 4 layers": _made(PostNormLoop, 8, 32),
    "temporal convolutional network": _made(TemporalConvolutions, 4, 32),
    "convolutional autoencoder": _convolutional_autoencoder,
    "regression": _regression,
}  # fmt: skip
HEALTHY_SECOND: tuple[str, ...] = tuple(BUILDERS)


def build_healthy_second(name: str) -> Subject:
    """Build a network and its batch; two calls give the same weights and the same batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()
