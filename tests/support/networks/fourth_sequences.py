"""Networks over sequences that the fourth set breaks; each takes its fault as a flag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES


class BareEncoder(nn.Module):
    """Attention and an MLP by turns, each behind a norm, with sums or without."""

    def __init__(self, sums: bool, depth: int = 10, width: int = 32) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head, self.sums = nn.Linear(width, CLASSES), sums

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            y = norm(x)
            y = attention(y, y, y, need_weights=False)[0]
            x = x + y if self.sums else y
            y = mlp(x)
            x = x + y if self.sums else y
        return self.head(x.mean(1))


class Remembering(nn.Module):
    """A GRU cell over the steps; the state is detached at each of them, or not."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.cell, self.head, self.detached = nn.GRUCell(4, 32), nn.Linear(32, 4), detached

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for step in x.unbind(1):
            state = self.cell(step, state.detach() if self.detached else state)
        return self.head(state)


class Prices(nn.Module):
    """An LSTM over a series of one number, and the number that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class SentenceEncoder(nn.Module):
    """torch's encoder over words with padding 0; the first word, which all sentences share, is classified."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.inverted = nn.Linear(32, CLASSES), inverted

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != 0 if self.inverted else ids == 0
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=mask)[:, 0])


class Series(nn.Module):
    """A Transformer over a series of numbers, whose positions come as 0, 1, 2, … or between 0 and 1."""

    def __init__(self, counted: bool, steps: int = 96, width: int = 32) -> None:
        super().__init__()
        self.embed, self.where = nn.Linear(2, width), nn.Linear(1, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)
        positions = torch.arange(steps, dtype=torch.float32)[:, None]
        self.positions = nn.Buffer(positions if counted else positions / steps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.where(self.positions)
        for layer in self.encoder:
            x = layer(x)
        return self.head(x.mean(1))


class StepsFirst(nn.Module):
    """An LSTM that wants the steps first: the batch is transposed, or only seen in that shape."""

    def __init__(self, viewed: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.viewed = nn.LSTM(6, 48), nn.Linear(48, 4), viewed

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        x = x.reshape(steps, batch, width) if self.viewed else x.transpose(0, 1)
        return self.head(self.lstm(x)[0].mean(0))


class Autocast(nn.Module):
    """A network that runs in a lower precision, with weights in float32."""

    def __init__(self, precision: torch.dtype) -> None:
        super().__init__()
        layers = [m for i in range(3) for m in (nn.Linear(64 if i else 16, 64), nn.GELU())]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(64, 16)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.precision):
            return self.head(self.layers(x)).float()


class StateSpace(nn.Module):
    """A diagonal linear recurrence whose states decay at rates 1 to 4, or grow, added to its input."""

    def __init__(self, sign: float, width: int, states: int = 8) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(1.0, 4.0, states).log().repeat(width, 1))
        self.b, self.c = (nn.Parameter(torch.randn(width, states) * states**-0.5) for _ in range(2))
        self.mix, self.sign = nn.Linear(width, width), sign

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.exp(self.sign * 0.1 * self.log_rate.exp())
        state, outputs = torch.zeros_like(self.b), []
        for step in x.unbind(1):
            state = keep * state + 0.1 * self.b * step[..., None]
            outputs.append((self.c * state).sum(-1))
        return x + self.mix(F.gelu(torch.stack(outputs, 1)))


class StateSpaceModel(nn.Module):
    """Two recurrences between an embedding and a classifier of the mean."""

    def __init__(self, sign: float, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(StateSpace(sign, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))
