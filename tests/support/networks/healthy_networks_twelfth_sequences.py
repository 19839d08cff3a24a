"""The twelfth set's healthy networks of our own over sequences, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


def ctc(output: Tensor, letters: Tensor) -> Tensor:
    """Return the CTC loss of rows that all have the same length, with the blank 0."""
    count, frames, _ = output.shape
    lengths = torch.full((count,), letters.shape[1])
    return F.ctc_loss(output.transpose(0, 1), letters, torch.full((count,), frames), lengths)


class ReadsText(nn.Module):
    """CRNN: convolutions over the picture of a line of text, an LSTM along it, and letters."""

    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d((2, 1)),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d((2, 2)),
        )  # fmt: skip
        self.lstm = nn.LSTM(2 * width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters + 1)

    def forward(self, lines: Tensor) -> Tensor:
        columns = self.convs(lines).flatten(1, 2).transpose(1, 2)
        return self.head(self.lstm(columns)[0]).log_softmax(2)


@own
def text_reader_with_ctc() -> Case:
    glyphs = torch.randn(7, 8, 5, generator=generator(101))
    letters = torch.randint(1, 7, (32, 5), generator=generator(102))
    lines = F.pad(glyphs[letters], (0, 1)).permute(0, 2, 1, 3).flatten(2)
    lines = lines + 0.3 * torch.randn(lines.shape, generator=generator(103))
    return ReadsText(6), lines[:, None], letters, ctc


class TwoPartTransformer(nn.Module):
    """PyTorch's own encoder and decoder; the decoder is given the words before."""

    def __init__(self, vocabulary: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, sentences: Tensor) -> Tensor:
        x = self.words(sentences) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(sentences.shape[2])
        return self.head(self.transformer(x[:, 0], x[:, 1], tgt_mask=mask, tgt_is_causal=True)).flatten(0, 1)


@own
def transformer_of_two_parts() -> Case:
    source = torch.randint(1, 20, (32, 10), generator=generator(104))
    target = source % 19 + 1
    begun = torch.cat([torch.zeros(32, 1, dtype=torch.long), target[:, :-1]], 1)
    return TwoPartTransformer(20, 10), torch.stack([source, begun], 1), target.flatten(), F.cross_entropy


class BeatsBlock(nn.Module):
    """A block of N-BEATS: a perceptron over the window, and its shares of the past and of the future."""

    def __init__(self, past: int, future: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.backcast, self.forecast = nn.Linear(width, past), nn.Linear(width, future)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return x - self.backcast(hidden), self.forecast(hidden)


class Beats(nn.Module):
    """The sum of what the blocks say about the future; each sees what those before it left of the past."""

    def __init__(self, past: int, future: int, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BeatsBlock(past, future) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x, future = self.blocks[0](x)
        for block in self.blocks[1:]:
            x, share = block(x)
            future = future + share
        return future


@own
def nbeats_forecaster() -> Case:
    draw = generator(105)
    phase, pace = 6.3 * torch.rand(128, 1, generator=draw), 0.3 + 0.3 * torch.rand(128, 1, generator=draw)
    waves = 1.4 * torch.sin(phase + pace * torch.arange(24.0)) + 0.1 * torch.randn(128, 24, generator=draw)
    return Beats(18, 6), waves[:, :18], waves[:, 18:], F.mse_loss


class ConvLSTM(nn.Module):
    """An LSTM whose maps are convolutions, over the frames of a film; it says the next frame."""

    def __init__(self, channels: int, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(channels + width, 4 * width, 3, padding=1)
        self.to_frame = nn.Conv2d(width, channels, 1)

    def forward(self, film: Tensor) -> Tensor:
        state = cell = film.new_zeros(len(film), self.width, *film.shape[3:])
        for frame in film.unbind(1):
            enter, forget, leave, new = self.gates(torch.cat([frame, state], 1)).chunk(4, 1)
            cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
        return self.to_frame(state)


@own
def convlstm_of_films() -> Case:
    scene = F.interpolate(torch.randn(24, 1, 6, 6, generator=generator(109)), size=16, mode="bilinear") / 0.6
    film = torch.stack([scene.roll(step, 3) for step in range(6)], 1)
    return ConvLSTM(1), film[:, :-1], film[:, -1], F.mse_loss
