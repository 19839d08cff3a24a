"""Broken networks of the seventh set for tokens and time series, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator


def early_signals(batch: int, n: int = 64, steps: int = 24, features: int = 5) -> tuple[Tensor, Tensor]:
    """Return time series and the feature with the largest sum over the first four steps."""
    x = torch.randn(n, steps, features, generator=generator(6000 + batch))
    x[:, :4] += 2 * torch.randn(n, 1, features, generator=generator(6500 + batch))
    return x, x[:, :4].sum(1).argmax(1)


class SeriesLSTM(nn.Module):
    """An LSTM whose last state is classified; the bias of its forget gate is set by hand."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, 48, batch_first=True), nn.Linear(48, 5)
        with torch.no_grad():
            self.lstm.bias_ih_l0[48:96] = bias
            self.lstm.bias_hh_l0[48:96] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


def lstm_forgets_each_step(broken: bool = True, batch: int = 0) -> Case:
    """The forget gate's bias has the wrong sign: the gate is closed, and the cell keeps nothing beyond a step."""
    torch.manual_seed(0)
    return SeriesLSTM(-9.0 if broken else 3.0), *early_signals(batch), nn.CrossEntropyLoss()


class SquaredBlock(nn.Module):
    """Causal attention and an MLP of squared ReLUs; the norm before the MLP can be missing."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width) if norm else nn.Identity()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.ln2(x))).square())


class SquaredGPT(nn.Module):
    """A small GPT that multiplies its embedding by the square root of the width."""

    def __init__(self, vocabulary: int, width: int, depth: int, norm: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.Sequential(*(SquaredBlock(width, norm) for _ in range(depth)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) * self.wte.embedding_dim**0.5 + self.wpe.weight[: tokens.shape[1]]
        return self.lm_head(self.ln_f(self.blocks(x))).flatten(0, 1)


def gpt_squares_without_norm(broken: bool = True, batch: int = 0) -> Case:
    """No norm stands before the squared ReLUs: each block squares the size of the stream, until it overflows."""
    torch.manual_seed(0)
    return SquaredGPT(50, 64, 8, not broken), *chains(batch, vocabulary=50), nn.CrossEntropyLoss()


class CrossDecoder(nn.Module):
    """A decoder layer: causal self-attention, attention to the memory or by mistake to itself, and an MLP."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.self_attn, self.cross_attn = (nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.broken = broken

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = self.norm2(x)
        if self.broken:
            x = x + self.cross_attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        else:
            x = x + self.cross_attn(y, memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


class TransformerTranslator(nn.Module):
    """An encoder and a decoder; the input holds the source and the decoder's tokens, one after the other."""

    def __init__(self, vocabulary: int, width: int, broken: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(CrossDecoder(width, broken) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, pairs: Tensor) -> Tensor:
        source, x = (self.embed(part) + self.positions.weight[: part.shape[1]] for part in pairs.unbind(1))
        memory = self.encoder(source)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(self.norm(x)).flatten(0, 1)


def decoder_attends_to_itself(broken: bool = True, batch: int = 0) -> Case:
    """The cross-attention takes its keys and values from the decoder: the encoder's output is used nowhere."""
    torch.manual_seed(0)
    source = torch.randint(2, 12, (64, 6), generator=generator(5000 + batch))
    written = (source * 3) % 10 + 2
    shifted = torch.cat([torch.ones(64, 1, dtype=torch.long), written[:, :-1]], 1)
    return (
        TransformerTranslator(12, 48, broken),
        torch.stack([source, shifted], 1),
        written.flatten(),
        nn.CrossEntropyLoss(),
    )


class MaskedAttention(nn.Module):
    """Self-attention that leaves out the padded words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) * y.shape[2] ** -0.5
        return x + self.o(scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1) @ self.v(y))


class PaddedReader(nn.Module):
    """Attention layers over words, and the mean over the words that are no padding."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(MaskedAttention(32) for _ in range(3))
        self.fc = nn.Linear(32, 2)
        self.inverted = inverted

    def forward(self, words: Tensor) -> Tensor:
        x, padded = self.embed(words), words == 0
        for layer in self.layers:
            x = layer(x, ~padded if self.inverted else padded)
        real = (~padded)[:, :, None]
        return self.fc((x * real).sum(1) / real.sum(1))


def reader_mask_inverted(broken: bool = True, batch: int = 0) -> Case:
    """The mask hides the words and not the padding: the softmax of a full sentence is over nothing, and NaN."""
    torch.manual_seed(0)
    draw = generator(7000 + batch)
    words = torch.randint(1, 40, (64, 16), generator=draw)
    words = words.masked_fill(torch.arange(16) >= torch.randint(6, 24, (64, 1), generator=draw), 0)
    upper = (words >= 20).sum(1) > ((words > 0) & (words < 20)).sum(1)
    return PaddedReader(broken), words, upper.long(), nn.CrossEntropyLoss()


class ScaledLayer(nn.Module):
    """A pre-norm layer that multiplies its input by a factor."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.factor * x
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class SeriesTransformer(nn.Module):
    """A transformer over the steps of a time series, and a regression from the mean over the steps."""

    def __init__(self, width: int, depth: int, factor: float) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(5, width), nn.Embedding(24, width)
        self.layers = nn.Sequential(*(ScaledLayer(width, factor) for _ in range(depth)))
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.embed(x) + self.positions.weight).mean(1))


def series_scaled_in_each_layer(broken: bool = True, batch: int = 0) -> Case:
    """The factor sqrt(width), meant for the embedding, stands in each layer: the stream grows sevenfold per layer."""
    torch.manual_seed(0)
    x = early_signals(batch)[0]
    model = SeriesTransformer(48, 6, 48**0.5 if broken else 1.0)
    return model, x, x[:, :4].mean(1) / 2, nn.MSELoss()
