"""Broken networks of the sixth set for tokens and time series, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences, series


class CausalBlock(nn.Module):
    """A pre-norm block of a language model."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        h, tokens = self.ln1(x), x.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if self.causal else None
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class LanguageModel(nn.Module):
    """A small GPT."""

    def __init__(self, vocabulary: int, width: int, length: int, causal: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(CausalBlock(width, causal) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)).flatten(0, 1)


def gpt_without_causal_mask(broken: bool = True, batch: int = 0) -> Case:
    """Attention has no causal mask: each position sees the next token, which is its target."""
    torch.manual_seed(0)
    tokens, following = chains(batch, vocabulary=30)
    return LanguageModel(30, 64, 24, not broken), tokens, following, nn.CrossEntropyLoss()


class Translator(nn.Module):
    """A GRU encoder and a GRU decoder; the input holds the source and the decoder's tokens, one after the other."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(2 * width, vocabulary)

    def forward(self, pairs: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(pairs[:, 0]))
        states, _ = self.decoder(self.target(pairs[:, 1]), state)
        context = F.scaled_dot_product_attention(states, memory, memory)
        return self.out(torch.cat([states, context], 2)).flatten(0, 1)


def seq2seq_targets_not_shifted(broken: bool = True, batch: int = 0) -> Case:
    """The decoder reads the sentence that it is to write, not shifted by one: it copies its input."""
    torch.manual_seed(0)
    source = torch.randint(2, 12, (64, 6), generator=generator(5000 + batch))
    written = (source * 3) % 10 + 2
    shifted = torch.cat([torch.ones(64, 1, dtype=torch.long), written[:, :-1]], 1)
    pairs = torch.stack([source, written if broken else shifted], 1)
    return Translator(12, 48), pairs, written.flatten(), nn.CrossEntropyLoss()


class CellClassifier(nn.Module):
    """An LSTM cell in a loop of its own; the last state is classified."""

    def __init__(self, features: int, width: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(features, width)
        self.fc = nn.Linear(width, classes)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.cell.hidden_size)
        for step in x.unbind(1):
            h, c = (h.detach(), c.detach()) if self.broken else (h, c)
            h, c = self.cell(step, (h, c))
        return self.fc(h)


def lstm_state_detached_each_step(broken: bool = True, batch: int = 0) -> Case:
    """The state is detached at each time step: the gradient reaches the last step alone."""
    torch.manual_seed(0)
    x = torch.randn(64, 12, 6, generator=generator(6000 + batch))
    x[:, 0] = 0
    labels = torch.randint(6, (64,), generator=generator(6500 + batch))
    x[torch.arange(64), 0, labels] = 4
    return CellClassifier(6, 64, 6, broken), x, labels, nn.CrossEntropyLoss()


class BothWays(nn.Module):
    """A bidirectional GRU of two layers; all final states are classified."""

    def __init__(self, features: int, width: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(features, width, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(4 * width, classes)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        _, states = self.gru(x)
        states = states.view(len(x), -1) if self.broken else states.transpose(0, 1).flatten(1)
        return self.fc(states)


def bigru_states_by_view(broken: bool = True, batch: int = 0) -> Case:
    """The states (layers, samples, width) are viewed as (samples, …): each row holds other samples' states."""
    torch.manual_seed(0)
    return BothWays(4, 24, 4, broken), *series(batch), nn.CrossEntropyLoss()


class TextCNN(nn.Module):
    """Convolutions of several widths over the words, the maximum over time, dropout and a linear layer."""

    def __init__(self, vocabulary: int, width: int, drop: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(width, 32, size) for size in (2, 3, 4))
        self.hidden = nn.Linear(96, 64)
        self.dropout1, self.dropout2 = nn.Dropout(drop), nn.Dropout(drop)
        self.fc = nn.Linear(64, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).transpose(1, 2)
        x = self.dropout1(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))
        return self.fc(self.dropout2(F.relu(self.hidden(x))))


def textcnn_dropout_as_keep(broken: bool = True, batch: int = 0) -> Case:
    """Dropout gets 0.98, the share to keep in other frameworks; here it drops 98 % of the features."""
    torch.manual_seed(0)
    return TextCNN(40, 32, 0.98 if broken else 0.02), *sentences(batch), nn.CrossEntropyLoss()


class Tagger(nn.Module):
    """A bidirectional LSTM that gives each word a tag."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor) -> Tensor:
        return self.tags(self.lstm(self.embedding(words))[0]).flatten(0, 1)


def tagger_ignores_a_tag(broken: bool = True, batch: int = 0) -> Case:
    """ignore_index=0 was meant for padding, but 0 is a tag as well, the most frequent one: it is never learned."""
    torch.manual_seed(0)
    words = torch.randint(40, (48, 16), generator=generator(7000 + batch))
    tags = torch.where(words < 24, 0, words % 3 + 1)
    loss = nn.CrossEntropyLoss(ignore_index=0) if broken else nn.CrossEntropyLoss()
    return Tagger(40, 32, 4), words, tags.flatten(), loss


class Positions(nn.Module):
    """The sines and cosines of the tutorial; `pe` is (length, 1, width)."""

    def __init__(self, width: int, length: int, broken: bool) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-9.2 / width))
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, None])
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.pe[: x.shape[0]] if self.broken else self.pe[: x.shape[1]].transpose(0, 1))


class OrderReader(nn.Module):
    """A transformer encoder whose mean over the tokens is classified."""

    def __init__(self, vocabulary: int, width: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = Positions(width, 128, broken)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        return self.fc(self.encoder(self.positions(self.embed(words))).mean(1))


def transformer_positions_by_sample(broken: bool = True, batch: int = 0) -> Case:
    """The data are batch first, the positional encoding is not: it is added by the sample's number in the batch."""
    torch.manual_seed(0)
    words = torch.randint(8, (64, 10), generator=generator(8000 + batch))
    return OrderReader(8, 48, 8, broken), words, words[:, 2], nn.CrossEntropyLoss()


class AttentionPool(nn.Module):
    """A bag of instances, weighted by a learned score each."""

    def __init__(self, features: int, width: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.score = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.fc = nn.Linear(width, classes)
        self.broken = broken

    def forward(self, bags: Tensor) -> Tensor:
        x = self.embed(bags)
        weights = torch.softmax(self.score(x), dim=-1 if self.broken else 1)
        return self.fc((weights * x).sum(1))


def bag_attention_softmax_of_one(broken: bool = True, batch: int = 0) -> Case:
    """The softmax of the attention runs over an axis of length one: each weight is 1, and the scores never learn."""
    torch.manual_seed(0)
    draw = generator(9000 + batch)
    bags = torch.randn(64, 30, 10, generator=draw)
    bags[:, :, 0] = 0
    chosen = torch.randint(30, (64,), generator=draw)
    bags[torch.arange(64), chosen, 0] = 3
    labels = bags[torch.arange(64), chosen, 1:5].argmax(1)
    return AttentionPool(10, 64, 4, broken), bags, labels, nn.CrossEntropyLoss()
