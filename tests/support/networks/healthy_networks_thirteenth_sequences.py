"""The thirteenth set's healthy networks of our own over sequences, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fifth_parts import Case, chains, generator, sentences, series, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)

TEXT = """The wind had gone down in the night, and the sea lay flat and gray as slate under the low sky. From the end
of the pier the old man could see the boats come in, one after the other, with their lamps still lit. He counted them
as he did each morning, though there was nobody left for whom he had to wait. When the last of them had passed the
light he folded his hands, looked once more over the water, and went back along the pier to the house."""


class Letters(nn.Module):
    """A language model of letters: two LSTM layers with dropout."""

    def __init__(self, letters: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, 64)
        self.lstm = nn.LSTM(64, width, num_layers=2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.lstm(self.embed(x))[0])).flatten(0, 1)


@own
def letters_by_lstm() -> Case:
    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(letter) for letter in TEXT])
    pieces = codes.unfold(0, 33, 12)
    return Letters(len(letters)), pieces[:, :-1], pieces[:, 1:].flatten(), F.cross_entropy


class Tagger(nn.Module):
    """The kind of each word, by an LSTM in both directions; 0 pads."""

    def __init__(self, words: int, tags: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(2 * width, tags)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.lstm(self.embed(x))[0])).flatten(0, 1)


@own
def tagger_of_words() -> Case:
    """A word's kind depends on the word and, for some words, on the word before."""
    words, _ = sentences(0, n=32, length=16, vocabulary=60)
    before = torch.cat([torch.zeros(32, 1, dtype=torch.long), words[:, :-1]], 1)
    tags = torch.where(words % 6 == 0, before % 5, words % 5)
    return Tagger(60, 5), words, tags.masked_fill(words == 0, -100).flatten(), F.cross_entropy


class AttentiveTranslator(nn.Module):
    """A GRU that reads, and one that writes and looks at what was read by the attention of Bahdanau et al."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.reader = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.of_state, self.of_read = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.score = nn.Linear(width, 1)
        self.writer = nn.GRUCell(3 * width, width)
        self.head = nn.Linear(3 * width, words)

    def forward(self, pairs: Tensor) -> Tensor:
        read, last = self.reader(self.source(pairs[:, 0]))
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
        keys = self.of_read(read)
        logits = []
        for word in self.target(pairs[:, 1]).unbind(1):
            scores = self.score(torch.tanh(self.of_state(state)[:, None] + keys))
            seen = (scores.softmax(1) * read).sum(1)
            state = self.writer(torch.cat([word, seen], 1), state)
            logits.append(self.head(torch.cat([state, seen], 1)))
        return torch.stack(logits, 1).flatten(0, 1)


@own
def translator_with_additive_attention() -> Case:
    source = torch.randint(2, 30, (32, 9), generator=generator(170))
    target = source.flip(1)
    begun = torch.cat([torch.ones(32, 1, dtype=torch.long), target[:, :-1]], 1)
    return AttentiveTranslator(30), torch.stack([source, begun], 1), target.flatten(), F.cross_entropy


class SentenceCNN(nn.Module):
    """The network of Kim: convolutions of three widths over words, the largest of each, dropout and a classifier."""

    def __init__(self, words: int, classes: int, width: int = 64, maps: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(width, maps, kernel) for kernel in (3, 4, 5))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(3 * maps, classes)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.embed(x).transpose(1, 2)
        largest = [F.relu(conv(vectors)).amax(2) for conv in self.convs]
        return self.head(self.drop(torch.cat(largest, 1)))


@own
def sentence_convolutions_of_kim() -> Case:
    return SentenceCNN(40, 2), *sentences(0), F.cross_entropy


class TemporalBlock(nn.Module):
    """A block of a TCN: two causal dilated convolutions with weight norm, ReLU and dropout, and the shortcut."""

    def __init__(self, inputs: int, outputs: int, dilation: int, kernel: int = 3) -> None:
        super().__init__()
        self.past = (kernel - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, kernel, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, kernel, dilation=dilation))
        self.drop = nn.Dropout(0.1)
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(F.relu(self.conv1(F.pad(x, (self.past, 0)))))
        out = self.drop(F.relu(self.conv2(F.pad(out, (self.past, 0)))))
        return F.relu(self.shortcut(x) + out)


class TemporalConvolutions(nn.Module):
    """A TCN whose last step is classified."""

    def __init__(self, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[TemporalBlock(width if i else features, width, 2**i) for i in range(4)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.transpose(1, 2))[:, :, -1])


@own
def temporal_convolutions_with_weight_norm() -> Case:
    return TemporalConvolutions(4, 4), *series(0), F.cross_entropy


@own
def eegnet_of_brain_waves() -> Case:
    """EEGNet: filters in time, then over electrodes, then separable ones, with batch norm, ELU and dropout."""
    electrodes, filters, deep = 16, 8, 2
    model = nn.Sequential(
        nn.Conv2d(1, filters, (1, 32), padding="same", bias=False), nn.BatchNorm2d(filters),
        nn.Conv2d(filters, deep * filters, (electrodes, 1), groups=filters, bias=False),
        nn.BatchNorm2d(deep * filters), nn.ELU(), nn.AvgPool2d((1, 4)), nn.Dropout(0.25),
        nn.Conv2d(deep * filters, deep * filters, (1, 16), padding="same", groups=deep * filters, bias=False),
        nn.Conv2d(deep * filters, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 8)),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    draw = generator(171)
    labels = torch.arange(32) % 4
    heads = torch.randn(4, electrodes, generator=draw)
    pace = torch.tensor([0.2, 0.5, 0.9, 1.4])[labels][:, None] * torch.arange(128.0)
    source = torch.sin(pace + 6.3 * torch.rand(32, 1, generator=draw))
    waves = heads[labels][:, :, None] * source[:, None] + torch.randn(32, electrodes, 128, generator=draw)
    waves = (waves - waves.mean(2, keepdim=True)) / waves.std(2, keepdim=True)
    return model, waves[:, None], labels, F.cross_entropy


class Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_fc, self.mlp_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp_proj(F.gelu(self.mlp_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """nanoGPT with its initialization; the head shares the words' table."""

    def __init__(self, words: int, length: int, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5 if "proj" in name else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)).flatten(0, 1)


@own
def nano_gpt() -> Case:
    return NanoGPT(100, 24), *chains(0), F.cross_entropy
