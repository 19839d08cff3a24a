"""Ten sound networks of the ninth set for pictures, written for it: each looks unusual by design."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes, sound

OWN: dict[str, Callable[[], Case]] = {}


def smooth_pictures(n: int, size: int = 16) -> Tensor:
    """Return pictures (n, 3, size, size) that are mixtures of six smooth patterns."""
    patterns = F.interpolate(torch.randn(6, 3, 4, 4, generator=generator(71)), size=size, mode="bilinear")
    return torch.einsum("nk,kchw->nchw", torch.randn(n, 6, generator=generator(72)), patterns) / 1.5


class Quantized(nn.Module):
    """A VQ-VAE: unit vectors are replaced by the nearest one of a codebook, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 8, 4, 2, 1))
        self.codebook = nn.Embedding(32, 8)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = F.normalize(self.encoder(x).permute(0, 2, 3, 1), dim=3)
        codebook = F.normalize(self.codebook.weight, dim=1)
        nearest = codebook[(code.detach() @ codebook.T).argmax(3)]
        passed = code + (nearest - code).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), code, nearest


@sound(OWN)
def codebook_with_straight_through() -> Case:
    """Return a VQ-VAE with its commitment loss."""

    def loss(output: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        rebuilt, code, nearest = output
        commitment = F.mse_loss(nearest, code.detach()) + F.mse_loss(code, nearest.detach()) / 4
        return F.mse_loss(rebuilt, wanted) + commitment

    pictures = smooth_pictures(48)
    return Quantized(), pictures, pictures, loss


class MaskedPatches(nn.Module):
    """A masked autoencoder; the last column of each patch says whether it is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Linear(48, 64), nn.Parameter(0.02 * torch.randn(64))
        self.positions = nn.Parameter(0.2 * torch.randn(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.pixels = nn.LayerNorm(64), nn.Linear(64, 48)

    def forward(self, patches: Tensor) -> Tensor:
        x = torch.where(patches[..., 48:] > 0, self.hidden, self.embed(patches[..., :48]))
        return self.pixels(self.norm(self.encoder(x + self.positions)))


@sound(OWN)
def loss_of_hidden_patches() -> Case:
    """Return a masked autoencoder, whose loss leaves out what it sees."""
    patches = F.unfold(smooth_pictures(64), 4, stride=4).transpose(1, 2)
    hidden = (torch.rand(64, 16, generator=generator(73)).argsort(1) < 10).float()[..., None]

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        errors = (output - wanted[..., :48]).square().mean(2)
        return (errors * wanted[..., 48]).sum() / wanted[..., 48].sum()

    packed = torch.cat([patches, hidden], 2)
    return MaskedPatches(), packed, packed, loss


class Unrolled(nn.Module):
    """One residual block that is used six times, with the picture's features added in each turn."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2, 1)
        self.block = nn.Sequential(
            nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
        )  # fmt: skip
        self.norm, self.fc = nn.GroupNorm(4, 24), nn.Linear(24 * 16, 10)
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        features = state = self.stem(x)
        for _ in range(self.turns):
            state = (state + features) / 2 + self.block(state)
        return self.fc(F.avg_pool2d(self.norm(state), 2).flatten(1))


@sound(OWN)
def one_block_in_six_turns() -> Case:
    """Return a recurrent residual network, which shares its weights on purpose."""
    return Unrolled(6), *images(0), nn.CrossEntropyLoss()


class GatedReader(nn.Module):
    """Patches that read other tokens by cross-attention through a gate, tanh(0), that starts shut, as in Flamingo."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 48, 4, 4), nn.Linear(6, 48)
        self.norm, self.attention = nn.LayerNorm(48), nn.MultiheadAttention(48, 4, batch_first=True)
        self.gate = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x[:, :, 16:, :2].reshape(len(x), -1, 6))
        x = self.patches(x[:, :, :16]).flatten(2).transpose(1, 2)
        x = x + torch.tanh(self.gate) * self.attention(self.norm(x), words, words, need_weights=False)[0]
        return self.fc((x + self.mlp(x)).mean(1))


@sound(OWN)
def other_input_behind_shut_gate() -> Case:
    """Return a classifier of pictures with further tokens, which lie below the picture; a gate of zero lets them in."""
    pictures, labels = images(0)
    words = torch.randn(64, 3, 4, 16, generator=generator(74))
    return GatedReader(), torch.cat([pictures, words], 2), labels, nn.CrossEntropyLoss()


class Controlled(nn.Module):
    """A frozen network and a trained one, which adds to it through convolutions of zeros, as in ControlNet."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Conv2d(before, 24, 3, padding=1) for before in (3, 24, 24))
        self.control = nn.ModuleList(nn.Conv2d(before, 24, 3, padding=1) for before in (3, 24, 24))
        self.zeros = nn.ModuleList(nn.Conv2d(24, 24, 1) for _ in range(3))
        self.out = nn.Conv2d(24, 3, 3, padding=1)
        self.frozen.requires_grad_(False)
        for zero in self.zeros:
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def forward(self, x: Tensor) -> Tensor:
        x, hint = x.chunk(2, 1)
        for frozen, control, zero in zip(self.frozen, self.control, self.zeros, strict=True):
            hint = F.silu(control(hint))
            x = F.silu(frozen(x)) + zero(hint)
        return self.out(x)


@sound(OWN)
def control_through_zero_convolutions() -> Case:
    """Return a network that is steered through layers of zeros."""
    picture, hint = smooth_pictures(64).chunk(2)
    return Controlled(), torch.cat([picture, hint], 1), (picture + hint) / 1.4, nn.MSELoss()


@sound(OWN)
def neck_without_offset() -> Case:
    """Return a network for re-identification: a batch norm whose bias stays zero, then a linear layer without bias."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 48)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    neck = nn.BatchNorm1d(192)
    neck.bias.requires_grad_(False)
    head = nn.Linear(192, 40, bias=False)
    nn.init.normal_(head.weight, std=0.001)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), neck, head)
    pictures, labels = images(0, n=96, classes=40)
    return model, pictures, labels, nn.CrossEntropyLoss()


class Rotated(nn.Module):
    """A convolution with the same filters in four rotations; the largest answer counts."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before, 3, 3) * (2 / (9 * before)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.cat([torch.rot90(self.weight, turns, (2, 3)) for turns in range(4)])
        return F.conv2d(x, turned, padding=1).unflatten(1, (4, -1)).amax(1) + self.bias[:, None, None]


@sound(OWN)
def filters_in_four_rotations() -> Case:
    """Return a CNN that is equivariant to quarter turns."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 32), (32, 32)):
        layers += [Rotated(before, after), nn.BatchNorm2d(after), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)), *images(0), nn.CrossEntropyLoss()


class SoftPosition(nn.Module):
    """Heat maps, and the mean position under the softmax of each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU())
        self.heat = nn.Conv2d(24, 2, 3, padding=1)
        self.register_buffer("places", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.heat(self.body(x)).flatten(2).softmax(2).unflatten(2, (16, 16))
        return torch.stack([shares.sum(3) @ self.places, shares.sum(2) @ self.places], 2)


@sound(OWN)
def positions_under_softmax() -> Case:
    """Return a finder of two kinds of spots by the soft argmax of heat maps, which starts at the center for all."""
    centers = 1.4 * torch.rand(48, 2, 2, generator=generator(75)) - 0.7
    places = torch.linspace(-1, 1, 16)
    rows, columns = ((places - centers[..., axis, None]).square() for axis in range(2))
    spots = torch.exp(-(rows[..., None] + columns[:, :, None]) / torch.tensor([0.02, 0.08])[:, None, None])
    x = 4 * (spots[:, :1] - spots[:, 1:]) + 0.1 * torch.randn(48, 1, 16, 16, generator=generator(76))
    return SoftPosition(), x, centers, nn.MSELoss()


@sound(OWN)
def pixels_mostly_without_label() -> Case:
    """Return a network for segmentation with labels for one pixel in ten; the others have the label 255."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU(), nn.Conv2d(24, 24, 3, padding=2, dilation=2),
        nn.GroupNorm(4, 24), nn.SiLU(), nn.Conv2d(24, 4, 1),
    )  # fmt: skip
    pictures, labels = scenes(0)
    known = torch.rand(labels.shape, generator=generator(77)) < 0.1
    return model, pictures, labels.masked_fill(~known, 255), nn.CrossEntropyLoss(ignore_index=255)


class BinaryConv(nn.Module):
    """A convolution whose weights are signs times their mean size per filter; the gradient goes straight through."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.weight, self.stride = nn.Parameter(0.05 * torch.randn(after, before, 3, 3)), stride

    def forward(self, x: Tensor) -> Tensor:
        signs = self.weight.sign() * self.weight.abs().mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, self.weight + (signs - self.weight).detach(), stride=self.stride, padding=1)


@sound(OWN)
def weights_of_two_values() -> Case:
    """Return a CNN with binary weights and hard tanh, whose first and last layer are whole."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.Hardtanh()]
    for before, after in ((24, 32), (32, 48)):
        layers += [BinaryConv(before, after, 2), nn.BatchNorm2d(after), nn.Hardtanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(768, 10)), *images(0), nn.CrossEntropyLoss()
