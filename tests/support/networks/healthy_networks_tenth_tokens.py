"""Sound networks of the tenth set on words, series, graphs and noisy pictures, as practitioners write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, images, sentences, series, sound

OWN = {}
own = sound(OWN)


class PackedLSTM(nn.Module):
    """A bidirectional LSTM over packed sentences, and a classifier on its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 48, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(96, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        _, (state, _) = self.lstm(packed)
        return self.head(torch.cat([state[0], state[1]], 1))


@own
def packed_bidirectional_lstm() -> Case:
    return PackedLSTM(), *sentences(0), F.cross_entropy


class Forecaster(nn.Module):
    """A GRU over a series and a linear forecast of the next values."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 48, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


@own
def gru_forecaster() -> Case:
    steps = torch.arange(25.0)
    draw = generator(4)
    phase, pace = 6.3 * torch.rand(64, 1, 4, generator=draw), 0.2 + 0.4 * torch.rand(64, 1, 4, generator=draw)
    waves = torch.sin(phase + pace * steps[:, None])
    return Forecaster(), waves[:, :-1], waves[:, -1], F.mse_loss


class CausalConvolution(nn.Module):
    """Two dilated causal convolutions with weight normalization and a skip, as in a TCN."""

    def __init__(self, inputs: int, width: int, dilation: int) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.pad = 2 * dilation
        self.conv1 = norm(nn.Conv1d(inputs, width, 3, dilation=dilation))
        self.conv2 = norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.skip = nn.Conv1d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(F.pad(x, (self.pad, 0))))
        out = F.relu(self.conv2(F.pad(out, (self.pad, 0))))
        return F.relu(out + self.skip(x))


class TCN(nn.Module):
    """Dilations 1, 2 and 4, and a classifier on the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            CausalConvolution(4, 32, 1), CausalConvolution(32, 32, 2), CausalConvolution(32, 32, 4)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.transpose(1, 2)).mean(2))


@own
def temporal_convolutions() -> Case:
    return TCN(), *series(0), F.cross_entropy


class CausalBlock(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(out.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A decoder in the manner of nanoGPT, with GPT-2's weights at the start and a tied head."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, width), nn.Embedding(24, width)
        self.blocks = nn.ModuleList(CausalBlock(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                last = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


@own
def tiny_gpt() -> Case:
    return TinyGPT(), *chains(0), F.cross_entropy


class PostNormEncoder(nn.Module):
    """Two layers of torch's encoder with a mask for the padding, and the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 48, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(20, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        known = (tokens != 0)[..., None]
        x = self.encoder(self.embedding(tokens) + self.positions, src_key_padding_mask=tokens == 0)
        return self.head((x * known).sum(1) / known.sum(1))


@own
def post_norm_sentence_encoder() -> Case:
    return PostNormEncoder(), *sentences(0), F.cross_entropy


class GraphConvolutions(nn.Module):
    """A GCN of two layers on one graph, with the symmetric normalization."""

    links: Tensor

    def __init__(self, links: Tensor, features: int, classes: int) -> None:
        super().__init__()
        links = links + torch.eye(len(links))
        degree = links.sum(1) ** -0.5
        self.register_buffer("links", degree[:, None] * links * degree)
        self.first, self.second = nn.Linear(features, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(self.links @ x))
        return self.second(self.links @ F.dropout(x, 0.3, self.training))


@own
def gcn_of_two_layers() -> Case:
    draw = generator(5)
    labels = torch.arange(96) % 3
    chance = torch.where(labels[:, None] == labels, 0.15, 0.02)
    links = (torch.rand(96, 96, generator=draw) < chance).float().triu(1)
    features = F.one_hot(labels, 3).float() @ torch.randn(3, 12, generator=draw) + torch.randn(96, 12, generator=draw)
    return GraphConvolutions(links + links.T, 12, 3), features, labels, F.cross_entropy


class TimeBlock(nn.Module):
    """A residual block with group norm and SiLU to which the time is added, as in DDPM."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, width, 3, padding=1)
        self.time = nn.Linear(64, width)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[..., None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Denoiser(nn.Module):
    """A small U-Net that predicts the noise; the time is the picture's last channel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.stem, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.enc, self.mid, self.dec = TimeBlock(width, width), TimeBlock(width, 32), TimeBlock(32 + width, width)
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        angles = 1000 * x[:, 3, :1, 0] * 10000 ** (-torch.arange(16) / 16)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.enc(self.stem(x[:, :3]), time)
        coarse = F.interpolate(self.mid(self.down(fine), time), scale_factor=2)
        return self.head(F.silu(self.norm(self.dec(torch.cat([coarse, fine], 1), time))))


@own
def ddpm_denoiser() -> Case:
    pictures, _ = images(0, n=32)
    draw = generator(6)
    time, noise = torch.rand(32, 1, 1, 1, generator=draw), torch.randn(pictures.shape, generator=draw)
    noisy = torch.cos(1.5 * time) * pictures + torch.sin(1.5 * time) * noise
    return Denoiser(), torch.cat([noisy, time.expand(32, 1, 16, 16)], 1), noise, F.mse_loss
