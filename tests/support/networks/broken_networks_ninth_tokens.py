"""Broken networks of the ninth set for tokens, time series and sound, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from broken_networks_seventh_images import tones
from fifth_parts import Case, generator, sentences


def topics(batch: int, n: int = 64, length: int = 16, vocabulary: int = 300) -> tuple[Tensor, Tensor]:
    """Return sentences (n, length) and the kind, of two, that most of their words are of; any number may be of any."""
    kinds = torch.randint(2, (vocabulary,), generator=generator(63))
    draw = generator(9600 + batch)
    labels = torch.randint(2, (n,), generator=draw)
    words = torch.randint(vocabulary, (n, 3 * length), generator=draw)
    keep = torch.rand(n, 3 * length, generator=draw) + 0.5 * (kinds[words] == labels[:, None])
    return words.gather(1, keep.argsort(1, descending=True)[:, :length]), labels


class TextCNN(nn.Module):
    """Frozen word vectors, convolutions of two widths, and their maxima."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(vectors)
        self.convs = nn.ModuleList(nn.Conv1d(32, 48, size, padding=size // 2) for size in (1, 3))
        self.fc = nn.Linear(96, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).transpose(1, 2)
        return self.fc(torch.cat([F.relu(conv(x)).mean(2) for conv in self.convs], 1))


def textcnn_word_vectors_never_filled(broken: bool = True, batch: int = 0) -> Case:
    """No word was found in the file of vectors: the frozen table stays at the zeros that it was made of."""
    torch.manual_seed(0)
    vectors = torch.randn(300, 32, generator=generator(64))
    return TextCNN(torch.zeros(300, 32) if broken else vectors), *topics(batch), nn.CrossEntropyLoss()


class CausalBlock(nn.Module):
    """Pre-norm causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPTClassifier(nn.Module):
    """A small GPT whose state at one position is classified."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(40, 32), nn.Embedding(20, 32)
        self.blocks = nn.Sequential(CausalBlock(32), CausalBlock(32))
        self.norm, self.score = nn.LayerNorm(32), nn.Linear(32, 2)
        self.position = position

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks(self.embed(words) + self.positions.weight[: words.shape[1]])
        return self.score(self.norm(x[:, self.position]))


def gpt_classifier_reads_first_token(broken: bool = True, batch: int = 0) -> Case:
    """The first token is classified, as in BERT, but under a causal mask it sees no other: it is always the same."""
    torch.manual_seed(0)
    return GPTClassifier(0 if broken else -1), *sentences(batch), nn.CrossEntropyLoss()


class Recognizer(nn.Module):
    """Convolutions over a sound, and the scores of five letters and the blank for each frame that is left."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, stride in zip((1, 32, 48), strides, strict=True):
            after = 32 if before == 1 else 48
            layers += [nn.Conv1d(before, after, 9, stride, 4), nn.BatchNorm1d(after), nn.ReLU()]
        self.convs, self.letters = nn.Sequential(*layers), nn.Linear(48, 6)

    def forward(self, sound: Tensor) -> Tensor:
        return self.letters(self.convs(sound[:, None]).transpose(1, 2))


def ctc_loss(output: Tensor, letters: Tensor) -> Tensor:
    """Return the CTC loss of scores (batch, frames, letters), with the last letter as the blank."""
    frames, lengths = (torch.full((len(output),), size) for size in (output.shape[1], letters.shape[1]))
    return F.ctc_loss(output.transpose(0, 1).log_softmax(2), letters, frames, lengths, blank=5)


def ctc_fewer_frames_than_letters(broken: bool = True, batch: int = 0) -> Case:
    """The strides leave four frames for six letters: no alignment exists, and the CTC loss is infinite."""
    torch.manual_seed(0)
    draw = generator(9700 + batch)
    letters = torch.randint(5, (48, 6), generator=draw)
    pitch = (0.3 + 0.5 * letters).repeat_interleave(16, 1) * torch.arange(96)
    silent = torch.arange(96) % 16 >= 12
    sound = (1.4 * torch.sin(pitch)).masked_fill(silent, 0) + 0.2 * torch.randn(48, 96, generator=draw)
    return Recognizer((4, 3, 2) if broken else (2, 2, 1)), sound, letters, ctc_loss


class LengthLSTM(nn.Module):
    """An LSTM over padded series; reads its state at the last step, or at the last one that is no padding."""

    def __init__(self, padding: bool) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 32, batch_first=True), nn.Linear(32, 4)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(x)[0]
        if self.padding:
            return self.fc(states[:, -1])
        last = x.abs().sum(2).ne(0).sum(1) - 1
        return self.fc(states[torch.arange(len(x)), last])


def lstm_reads_state_after_padding(broken: bool = True, batch: int = 0) -> Case:
    """The last state is read, after up to 76 steps of padding: the LSTM has forgotten the series by then."""
    torch.manual_seed(0)
    draw = generator(9900 + batch)
    x = torch.randn(64, 80, 4, generator=draw) + 1.5 * torch.randn(64, 1, 4, generator=draw)
    lengths = torch.randint(4, 10, (64, 1, 1), generator=draw)
    real = torch.arange(80)[None, :, None] < lengths
    return LengthLSTM(broken), x * real, (x * real).sum(1).argmax(1), nn.CrossEntropyLoss()


class Forecaster(nn.Module):
    """Scales each series by its own mean and deviation, forecasts with an MLP, and can restore the scale."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.forecast = nn.Linear(64, 6)
        self.restores = restores

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-3
        y = self.forecast(self.mlp((x - mean) / std))
        return y * std + mean if self.restores else y


def forecaster_level_never_restored(broken: bool = True, batch: int = 0) -> Case:
    """Each series is normalized by itself and the forecast never scaled back: its level is unknown to the network."""
    torch.manual_seed(0)
    draw = generator(10000 + batch)
    level, phase = torch.randn(96, 1, generator=draw), 6.28 * torch.rand(96, 1, generator=draw)
    series = level + 0.5 * torch.sin(torch.arange(30) / 3 + phase) + 0.05 * torch.randn(96, 30, generator=draw)
    return Forecaster(not broken), series[:, :24], series[:, 24:], nn.MSELoss()


class DropoutGRU(nn.Module):
    """A GRU whose states go through two layers with the function for dropout."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 32, batch_first=True)
        self.fc1, self.fc2, self.out = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 4)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(x)[0].mean(1)
        for layer in (self.fc1, self.fc2):
            x = F.dropout(F.relu(layer(x)), 0.6, training=self.always or self.training)
        return self.out(x)


def gru_dropout_in_evaluation(broken: bool = True, batch: int = 0) -> Case:
    """`F.dropout` is called without `training=self.training`: it drops in evaluation too, and answers are random."""
    torch.manual_seed(0)
    x = torch.randn(96, 12, 4, generator=generator(10100 + batch)) / 2
    x = x + torch.randn(96, 1, 4, generator=generator(10150 + batch))
    return DropoutGRU(broken), x, x.mean(1), nn.MSELoss()


class Filterbank(nn.Module):
    """Learned filters, and the logarithm of their energy, of which silence is left out or raised."""

    def __init__(self, where: bool) -> None:
        super().__init__()
        self.filters = nn.Conv1d(1, 24, 16, 4, bias=False)
        self.where = where

    def forward(self, sound: Tensor) -> Tensor:
        energy = F.avg_pool1d(self.filters(sound[:, None]).square(), 4)
        if self.where:
            return torch.where(energy > 0, energy.log(), -8.0)
        return energy.clamp(min=3e-4).log()


class SoundNet(nn.Module):
    """A filterbank, convolutions over its frames, and their mean."""

    def __init__(self, where: bool) -> None:
        super().__init__()
        self.bank = Filterbank(where)
        self.conv, self.fc = nn.Conv1d(24, 32, 3, padding=1), nn.Linear(32, 5)

    def forward(self, sound: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(self.bank(sound))).mean(2))


def filterbank_where_hides_logarithm(broken: bool = True, batch: int = 0) -> Case:
    """`where` keeps the logarithm of silence out of the output, not out of the gradient: 0 times infinity is NaN."""
    torch.manual_seed(0)
    waves, labels = tones(batch)
    lengths = torch.randint(64, 129, (len(waves), 1), generator=generator(9150 + batch))
    return SoundNet(broken), waves * (torch.arange(128) < lengths), labels, nn.CrossEntropyLoss()
