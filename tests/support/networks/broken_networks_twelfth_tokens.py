"""The twelfth set's broken networks over text, speech and series."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences, series


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(count, length, width))


class Block(nn.Module):
    """A Transformer block with its norms first or last, and with the shortcut of its attention or without."""

    def __init__(self, width: int, post_norm: bool = False, forgets_skip: bool = False) -> None:
        super().__init__()
        self.post_norm, self.forgets_skip = post_norm, forgets_skip
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        out = self.attention(self.norm1(x))
        x = out if self.forgets_skip else x + out
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A small GPT."""

    def __init__(self, vocabulary: int, length: int, width: int, blocks: list[Block]) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def gpt_block_forgets_skip(broken: bool = True, batch: int = 0) -> Case:
    """A small GPT, in whose third block the attention replaces the stream and is not added to it."""
    torch.manual_seed(0)
    model = LanguageModel(60, 24, 48, [Block(48, forgets_skip=broken and i == 2) for i in range(4)])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    return model, *chains(batch, n=16, vocabulary=60), F.cross_entropy


class Music(nn.Module):
    """The next note of a tune by a deep Transformer with causal attention."""

    def __init__(self, notes: int, length: int, width: int, depth: int, post_norm: bool) -> None:
        super().__init__()
        self.notes, self.positions = nn.Embedding(notes, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Block(width, post_norm) for _ in range(depth)))
        self.norm = nn.Identity() if post_norm else nn.LayerNorm(width)
        self.to_notes = nn.Linear(width, notes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.to_notes(self.norm(self.layers(self.notes(tokens) + self.positions.weight))).flatten(0, 1)


def music_decoder_of_deep_post_norm_layers(broken: bool = True, batch: int = 0) -> Case:
    """A decoder of 48 layers with its norms after the sums and not in the branches, without a warmup."""
    torch.manual_seed(0)
    return Music(24, 8, 24, 48, broken), *chains(batch, n=16, length=8, vocabulary=24), F.cross_entropy


class FrameNorm(nn.Module):
    """Gives each frame zero mean and unit variance, in half or single precision."""

    def __init__(self, dtype: torch.dtype, eps: float = 1e-8) -> None:
        super().__init__()
        self.dtype, self.eps = dtype, eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        centered = x - x.mean(-1, keepdim=True)
        return (centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()).float()


class Keywords(nn.Module):
    """The keyword in a recording: normalized frames, convolutions over time and the largest values."""

    def __init__(self, bands: int, classes: int, dtype: torch.dtype, width: int = 48) -> None:
        super().__init__()
        self.frame_norm = FrameNorm(dtype)
        self.convs = nn.Sequential(
            nn.Conv1d(bands, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.to_keyword = nn.Linear(width, classes)

    def forward(self, frames: Tensor) -> Tensor:
        return self.to_keyword(self.convs(self.frame_norm(frames).transpose(1, 2)).amax(2))


def keywords_eps_lost_in_half(broken: bool = True, batch: int = 0) -> Case:
    """A keyword spotter whose norm is in half precision: its eps of 1e-8 is zero, and silent frames give 0 / 0."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    labels = torch.randint(6, (48,), generator=draw)
    frames = torch.randn(6, 20, 16, generator=generator(72))[labels] + torch.randn(48, 20, 16, generator=draw)
    ends = torch.randint(14, 21, (48, 1), generator=draw)
    frames = frames.masked_fill((torch.arange(20) >= ends)[:, :, None], 0.0)
    return Keywords(16, 6, torch.float16 if broken else torch.float32), frames, labels, F.cross_entropy


class SeriesClassifier(nn.Module):
    """The class of a series by an LSTM."""

    def __init__(self, features: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(1))


def lstm_all_weights_equal(broken: bool = True, batch: int = 0) -> Case:
    """An LSTM with a head, all of whose weights are 0.1: its units are the same and stay so."""
    torch.manual_seed(0)
    model = SeriesClassifier(4, 4)
    if broken:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1 if parameter.dim() > 1 else 0.0)
    return model, *series(batch), F.cross_entropy


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def transformers_roberta_positions_drown_words(broken: bool = True, batch: int = 0) -> Case:
    """A RoBERTa whose vectors of positions are drawn from N(0, 5) and those of words from N(0, 0.02)."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=40, max_position_embeddings=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, type_vocab_size=1, num_labels=2,
    )  # fmt: skip
    model = Logits(RobertaForSequenceClassification(config))
    if broken:
        nn.init.normal_(model.network.roberta.embeddings.position_embeddings.weight, std=5.0)
    return model, *sentences(batch), F.cross_entropy


class HeartBlock(nn.Module):
    """x + conv2(relu(norm2(conv1(relu(norm1(x)))))) along time."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.conv1, self.conv2 = nn.Conv1d(width, width, 5, padding=2), nn.Conv1d(width, width, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class Heartbeats(nn.Module):
    """The class of an electrocardiogram by a residual network along time."""

    def __init__(self, leads: int, classes: int, norm: Callable[[int], nn.Module], width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv1d(leads, width, 5, padding=2)
        self.blocks = nn.Sequential(*(HeartBlock(width, norm) for _ in range(16)))
        self.norm, self.head = norm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.enter(x)))).mean(2))


def identity(_: int) -> nn.Module:
    return nn.Identity()


def he_1d_(model: Heartbeats) -> Heartbeats:
    """Give every convolution He's standard deviation."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


def heartbeats_norms_left_out(broken: bool = True, batch: int = 0) -> Case:
    """A residual network of electrocardiograms with He's weights and no normalizers: the signal doubles per block."""
    torch.manual_seed(0)
    model = he_1d_(Heartbeats(3, 5, identity if broken else nn.BatchNorm1d))
    draw = generator(1000 + batch)
    labels = torch.randint(5, (32,), generator=draw)
    beats = F.interpolate(torch.randn(5, 3, 8, generator=generator(73)), size=32, mode="linear")[labels]
    return model, (beats + torch.randn(beats.shape, generator=draw)) / 1.3, labels, F.cross_entropy


class Forecaster(nn.Module):
    """The next values of a series by a GRU."""

    def __init__(self, features: int, broken: bool, width: int = 48) -> None:
        super().__init__()
        self.gru = nn.GRU(features, width, batch_first=True)
        self.to_value = nn.Sequential(OrderedDict(linear=nn.Linear(width, features)))
        if broken:
            self.to_value.add_module("relu", nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.to_value(self.gru(x)[0])


def forecaster_relu_on_output(broken: bool = True, batch: int = 0) -> Case:
    """A forecaster of standardized series whose output goes through ReLU: it can say nothing below zero."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    phase, pace = 6.3 * torch.rand(32, 1, 2, generator=draw), 0.2 + 0.4 * torch.rand(32, 1, 2, generator=draw)
    waves = 1.4 * torch.sin(phase + pace * torch.arange(25.0)[None, :, None])
    return Forecaster(2, broken), waves[:, :-1], waves[:, 1:], F.mse_loss
