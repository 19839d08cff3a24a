"""Broken networks for tables, sequences, sound and graphs, each with a healthy twin."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, chains, generator, sentences, series, table


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


def table_raw_columns(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    columns, labels = categories(batch)
    if broken:  # age, income, year, distance, score, ratio, count, balance
        mean = torch.tensor([45.0, 60000.0, 1990.0, 12.0, 600.0, 0.5, 3.0, 9000.0])
        std = torch.tensor([15.0, 25000.0, 15.0, 6.0, 80.0, 0.2, 1.5, 4000.0])
        columns = columns * std + mean
    return mlp(8, 64, 64, 4), columns, labels, nn.CrossEntropyLoss()


def table_price_targets(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    columns, targets = table(batch)
    return mlp(8, 64, 64, 1), columns, targets * 150000 + 320000 if broken else targets, nn.MSELoss()


def mlp_deep_sigmoid(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = mlp(8, *[48] * 8, 4, activation=nn.Sigmoid if broken else nn.ReLU)
    if not broken:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model, *categories(batch), nn.CrossEntropyLoss()


def regression_broadcast(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = mlp(8, 64, 64, 1)
    columns, targets = table(batch)
    return model, columns, targets.squeeze(1) if broken else targets, nn.MSELoss()


def mlp_constant_init(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = mlp(8, 64, 64, 4)
    if broken:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.02)
                nn.init.zeros_(layer.bias)
    return model, *categories(batch), nn.CrossEntropyLoss()


class Listed(nn.Module):
    """An MLP whose hidden layers stand in a list."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)]
        self.layers = layers if plain else nn.ModuleList(layers)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def mlp_plain_list(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return Listed(broken), *categories(batch), nn.CrossEntropyLoss()


class NormedMLP(nn.Module):
    """A helper of many code bases: each layer with a LayerNorm; the broken one has one behind the output as well."""

    def __init__(self, sizes: list[int], norm_last: bool) -> None:
        super().__init__()
        pairs = list(pairwise(sizes))
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.norms = nn.ModuleList(nn.LayerNorm(b) for _, b in (pairs if norm_last else pairs[:-1]))

    def forward(self, x: Tensor) -> Tensor:
        for index, linear in enumerate(self.linears):
            x = linear(x)
            if index < len(self.norms):
                x = self.norms[index](x)
            if index < len(self.linears) - 1:
                x = F.relu(x)
        return x


def regression_norm_on_output(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return NormedMLP([8, 64, 64, 1], broken), *table(batch), nn.MSELoss()


class MultiTask(nn.Module):
    """A shared trunk and one head per task."""

    def __init__(self, tasks: int, same: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        heads = [nn.Linear(64, 1)] * tasks if same else [nn.Linear(64, 1) for _ in range(tasks)]
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.cat([head(x) for head in self.heads], 1)


def multitask_one_head(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return MultiTask(4, broken), *table(batch, outputs=4), nn.MSELoss()


class TwoTowers(nn.Module):
    """Scores of pairs (user, item) as products of embeddings."""

    def __init__(self, count: int, width: int, std: float) -> None:
        super().__init__()
        self.users = nn.Embedding(count, width)
        self.items = nn.Embedding(count, width)
        nn.init.normal_(self.users.weight, std=std)
        nn.init.normal_(self.items.weight, std=std)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


def recommender_default_embeddings(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    fixed, draw = generator(7), generator(1000 + batch)
    tastes, kinds = torch.randn(60, 2, generator=fixed), torch.randn(60, 2, generator=fixed)
    pairs = torch.randint(60, (256, 2), generator=draw)
    likes = ((tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1) > 0).float()
    return TwoTowers(60, 64, 1.0 if broken else 0.1), pairs, likes, nn.BCEWithLogitsLoss()


class SeriesLSTM(nn.Module):
    """Classifies a time series by the last state of an LSTM."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 48, num_layers=2, batch_first=batch_first)
        self.fc = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


def lstm_batch_first(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return SeriesLSTM(not broken), *series(batch), nn.CrossEntropyLoss()


class TextEncoder(nn.Module):
    """Classifies sentences by the first token behind a Transformer encoder."""

    def __init__(self, vocabulary: int, length: int, inverted: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 48, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(length, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(48, 2)
        self.inverted = inverted

    def forward(self, words: Tensor) -> Tensor:
        padding = words != 0 if self.inverted else words == 0
        x = self.encoder(self.embed(words) + self.position, src_key_padding_mask=padding)
        return self.fc(x[:, 0])


def text_inverted_mask(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return TextEncoder(40, 20, broken), *sentences(batch), nn.CrossEntropyLoss()


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int, scaled: bool = True) -> None:
        super().__init__()
        self.heads, self.scaled = heads, scaled
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        for layer in (self.q, self.k, self.v, self.proj):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        if self.scaled:
            scores = scores / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, scaled: bool = True) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, scaled)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A small language model with a tied head."""

    def __init__(self, vocabulary: int, length: int, width: int, std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        nn.init.normal_(self.embed.weight, std=std)
        nn.init.normal_(self.position.weight, std=min(std, 0.1))
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(2))
        self.ln = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln(x)).flatten(0, 1)


def gpt_tied_default_embedding(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return GPT(400, 24, 128, 1.0 if broken else 0.02), *chains(batch, vocabulary=400), nn.CrossEntropyLoss()


class GraphNet(nn.Module):
    """Graph convolutions on a fixed sensor graph; the broken one is deep and has no skips."""

    def __init__(self, links: Tensor, layers: int, skips: bool) -> None:
        super().__init__()
        links = links + torch.eye(len(links))
        self.register_buffer("links", links / links.sum(1, keepdim=True))
        self.embed = nn.Linear(4, 32)
        self.convs = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        self.out = nn.Linear(32, 4)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for conv in self.convs:
            out = F.relu(conv(self.links @ x))
            x = x + 0.2 * out if self.skips else out
        return self.out(x).flatten(0, 1)


def graph_too_deep(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    group = torch.arange(60) // 20
    chance = torch.where(group[:, None] == group, 0.4, 0.05)
    links = (torch.rand(60, 60, generator=generator(7)) < chance).float().triu(1)
    draw = generator(1000 + batch)
    labels = torch.randint(4, (16, 3), generator=draw)[:, group]  # the nodes of a group have the same class
    x = torch.randn(16, 60, 4, generator=draw) + 0.8 * F.one_hot(labels, 4)
    return GraphNet(links + links.T, 16, not broken), x, labels.flatten(), nn.CrossEntropyLoss()


class LogSpectrum(nn.Module):
    """Turns a wave into the logarithm of its spectrum."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, wave: Tensor) -> Tensor:
        frames = wave.unfold(1, 32, 16)
        return torch.log(torch.fft.rfft(frames).abs() ** 2 + self.floor).transpose(1, 2)


def audio_log_of_zero(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    labels = torch.randint(5, (64,), generator=draw)
    time = torch.arange(320) * (labels[:, None] + 1.5) * 0.2 + 6.3 * torch.rand(64, 1, generator=draw)
    wave = torch.sin(time) + 0.5 * torch.randn(64, 320, generator=draw)
    wave[torch.arange(320) < torch.randint(0, 90, (64, 1), generator=draw)] = 0.0  # clips begin with digital silence
    model = nn.Sequential()
    model.add_module("spectrum", LogSpectrum(0.0 if broken else 1e-3))
    model.add_module("norm", nn.BatchNorm1d(17))
    model.add_module("conv1", nn.Sequential(nn.Conv1d(17, 32, 3, padding=1), nn.ReLU()))
    model.add_module("conv2", nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1)))
    model.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(32, 5)))
    return model, wave, labels, nn.CrossEntropyLoss()
