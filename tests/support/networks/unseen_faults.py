"""Broken networks that no document names: `UNSEEN`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES, Broken, Plain, Subject, case, cnn, features, he_, images, mlp, times_
from unseen_networks import (
    Adapter,
    Autoencoder,
    HalfRMSNorm,
    LanguageModel,
    Mixer,
    PostActivationResNet,
    Recurrent,
    ScaledBlock,
    Standardize,
    UNet,
    conv_bn,
)  # fmt: skip

UNSEEN: list[Broken] = []
FIRST_LOSS = (
    "chance", "log c", "log(c", "ln c", "ln(c", "logits", "first loss", "initial loss", "confident", "satur",
)  # fmt: skip
NO_GRADIENT = (
    "no gradient", "detach", "gradient is zero", "gradient is 0", "zero gradient", "without a gradient", "gets no",
    "never learn", "cannot learn", "blocked", "does not learn",
)  # fmt: skip
DEAD = ("dead", "zero", "constant", "no gradient", "nothing", "never learn", "cannot learn", "does not depend")


def words(batch: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.randint(100, (batch, 13))
    return ids[:, :-1], ids[:, 1:]


def word_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def pixel_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets)


@case(
    UNSEEN, "no-activation-anywhere", (), "the network is linear: no layer is followed by an activation",
    "linear", "activation", "nonlinear",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(mlp(6, activation=nn.Identity if broken else nn.ReLU), 2**-0.5 if broken else 1.0)
    return Subject(model, *features())


@case(
    UNSEEN, "double-softmax", ("head", "output"), "the output is already a softmax; the loss takes another",
    "softmax", "probabilit", "sum to 1", "sums to 1", "sum to one", "sums to one",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = cnn(norm=True)
    if broken:
        model.head.add_module("softmax", nn.Softmax(-1))
    return Subject(model, *images())


@case(
    UNSEEN, "softmax-over-the-batch", ("blocks.2",), "attention in block 2 is normalized over the samples of the batch",
    "other sample", "samples", "across the batch", "over the batch", "softmax", "wrong dim", "axis",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LanguageModel()
    model.blocks[2].attention.axis = 0 if broken else -1
    return Subject(model, *words(), word_loss)


@case(
    UNSEEN, "gate-shut", ("layer.3",), "the sigmoid gate of block 3 is shut, so that its branch is dead",
    "satur", "gate", "sigmoid", *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = PostActivationResNet(gated=True)
    gate = model.layer[3].gate
    assert gate is not None
    nn.init.constant_(gate[2].bias, -40.0 if broken else 0.0)
    return Subject(model, *images())


@case(UNSEEN, "dead-code", ("encoder.2", "encoder.3"), "every unit of the code is below zero: its ReLU is dead", *DEAD)
def _(broken: bool) -> Subject:
    model = he_(Autoencoder())
    nn.init.constant_(model.encoder[2].bias, -15.0 if broken else 0.0)
    example, _ = features()
    return Subject(model, example, example, F.mse_loss)


@case(UNSEEN, "frozen-block", ("mixers.1",), "block 1 is frozen", "frozen", "requires_grad", "trainable", "freez")
def _(broken: bool) -> Subject:
    model = Mixer()
    model.mixers[1].requires_grad_(not broken)
    return Subject(model, *images())


@case(UNSEEN, "unet-detach", ("middle",), "the deepest level gets no gradient", *NO_GRADIENT)
def _(broken: bool) -> Subject:
    example, _ = images(batch=4)
    return Subject(UNet(cut=broken), example, torch.randint(4, (4, 16, 16)), pixel_loss)


@case(UNSEEN, "rounded-code", ("encoder",), "rounding the code has no gradient", "round", *NO_GRADIENT)
def _(broken: bool) -> Subject:
    model = he_(Autoencoder(rounded=True, straight_through=not broken))
    example, _ = features()
    return Subject(model, example, example, F.mse_loss)


@case(UNSEEN, "branch-times-0", ("blocks.3",), "the MLP of block 3 is multiplied by 0", *DEAD)
def _(broken: bool) -> Subject:
    model = LanguageModel(6)
    model.blocks[3].factor = 0.0 if broken else 1.0
    return Subject(model, *words(), word_loss)


@case(
    UNSEEN, "layer-scale-1e-8", (), "layer scales of 1e-8 leave the branches without a usable gradient",
    "scale", "vanish", "1e-8", "1e-08", "too small", "hardly", "nothing", "dead", "tiny",
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers = [nn.Conv2d(3, 16, 4, 4), *(ScaledBlock(16, 1e-8 if broken else 0.1) for _ in range(6))]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return Subject(Plain(layers, head), *images(32))


@case(
    UNSEEN, "input-added-twice", (), "every block is added to its input twice, so that the signal doubles",
    "explod", "grow", "doubl", "twice",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = PostActivationResNet(16)
    model.twice = broken
    return Subject(model, *images())


@case(
    UNSEEN, "constant-weights", ("layers.0", "layers.2", "layers.4"), "all units of a layer are equal",
    "equal", "identical", "symmetr", "same weight", "rank", "same value",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(mlp(4))
    for module in model.layers if broken else ():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.03)
    return Subject(model, *features())


@case(
    UNSEEN, "adapter-of-two-zeros", ("layers.3",),
    "both matrices of the update in layer 3 are zero, so that it never learns",
    *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers = [nn.Linear(32, 64), *(Adapter(64) for _ in range(5))]
    if broken:
        nn.init.zeros_(layers[3].get_parameter("down.weight"))
    return Subject(Plain(layers, nn.Linear(64, CLASSES)), *features())


@case(
    UNSEEN, "feature-in-millions", ("input",), "one column of the input is a million times the others",
    "input",
)  # fmt: skip
def _(broken: bool) -> Subject:
    example, targets = features()
    example[:, 5] = example[:, 5] * (1e6 if broken else 1.0)
    return Subject(he_(mlp(5)), example, targets)


@case(UNSEEN, "input-divided-twice", ("input",), "the input was divided by 255 twice and is tiny", "input")
def _(broken: bool) -> Subject:
    example, targets = images()
    return Subject(cnn(), example / 255**2 if broken else example, targets)


@case(
    UNSEEN, "nan-weight", ("down2",), "a weight of down2 is not a number", "not finite", "nan", "not a number",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = UNet(cut=False)
    if broken:
        model.down2[0].weight.data[3, 2, 1, 1] = float("nan")
    example, _ = images(batch=4)
    return Subject(model, example, torch.randint(4, (4, 16, 16)), pixel_loss)


@case(
    UNSEEN, "constant-column-standardized", ("layers.0",), "a constant column has a spread of zero, which divides",
    "not finite", "nan", "divides by zero", "division by zero",
)  # fmt: skip
def _(broken: bool) -> Subject:
    plain = he_(mlp(4))
    model = Plain([Standardize(0.0 if broken else 1e-5), *plain.layers], plain.head)
    example, targets = features()
    example[:, 7] = 1.0
    return Subject(model, example, targets)


@case(
    UNSEEN, "all-tokens-masked", ("blocks.0",), "a row in which every token is masked gives softmax nothing but -inf",
    "not finite", "nan", "mask", "not a number",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LanguageModel()
    mask = torch.zeros(8, 1, 12, 12, dtype=torch.bool)
    mask[5, :, :, 0 if broken else 6 :] = True
    for block in model.blocks:
        block.attention.mask = mask
    return Subject(model, *words(), word_loss)


@case(
    UNSEEN, "half-squares-overflow", ("layers.3", "layers.4"), "the squares of an RMS norm overflow in half precision",
    "half", "float16", "fp16", "overflow", "65504", "65,504",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(mlp(4))
    layers = [*model.layers[:3], HalfRMSNorm(64), *model.layers[3:]]
    times_(layers[2], 1000.0 if broken else 1.0)
    example, targets = features()
    return Subject(Plain(layers, model.head).half(), example.half(), targets)


@case(UNSEEN, "dropout-of-1", ("layers.5", "layers.6"), "a dropout of 1 sets everything to zero", "dropout")
def _(broken: bool) -> Subject:
    model = he_(mlp(5))
    layers = [*model.layers[:5], nn.Dropout(1.0 if broken else 0.1), *model.layers[5:]]
    return Subject(Plain(layers, model.head), *features())


class _Contrastive(nn.Module):
    """Cosines between images and learned prototypes, divided by a temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16), conv_bn(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.prototypes = nn.Linear(32, CLASSES, bias=False)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.body(x)), F.normalize(self.prototypes.weight)) / self.temperature


@case(
    UNSEEN, "temperature-of-1e-4", ("prototypes", "output"), "the temperature makes logits of thousands", "temperature",
    *FIRST_LOSS,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(_Contrastive(1e-4 if broken else 0.5), *images())


@case(UNSEEN, "vanishing-rnn", ("cell",), "what the recurrent network reads early has no gradient", "vanish", "shrink")
def _(broken: bool) -> Subject:
    return Subject(Recurrent("tanh", 0.5 if broken else 1.0), torch.randn(16, 60, 8), torch.arange(16) % CLASSES)


@case(UNSEEN, "exploding-rnn", ("cell",), "the state of the recurrent network explodes", "explod", "grow")
def _(broken: bool) -> Subject:
    return Subject(Recurrent("relu", 2.5 if broken else 1.2), torch.randn(16, 40, 8), torch.arange(16) % CLASSES)


@case(
    UNSEEN, "attention-not-scaled", ("blocks.0", "blocks.1", "blocks.2"),
    "logits of attention are not divided by the root of the width",
    "satur", "sqrt", "one-hot", "entropy", "softmax", "attention logits",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LanguageModel(3, 256, 2)
    for block in model.blocks if broken else ():
        block.attention.scale = 1.0
    return Subject(model, *words(4), word_loss)


@case(
    UNSEEN, "tied-embedding-of-unit-scale", ("embedding", "head", "output"),
    "the classifier shares an embedding of unit variance, so that the logits are too large", *FIRST_LOSS, "embedding",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LanguageModel(width=256)
    nn.init.normal_(model.embedding.weight, std=1.0 if broken else 0.02)
    model.head.weight = model.embedding.weight
    return Subject(model, *words(4), word_loss)


@case(
    UNSEEN, "mean-over-the-batch", ("fc", "output"),
    "pooling takes the mean over the batch, too: all outputs are equal",
    "same output", "same for", "equal for", "every sample", "all samples", "does not depend", "constant", "identical",
    "over the batch", "across the batch", "other sample",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = PostActivationResNet()
    model.pooled = (0, 2, 3) if broken else (2, 3)
    return Subject(model, *images())


@case(
    UNSEEN, "norm-of-one-value", ("layers.2",), "a group of one value is normalized to zero",
    *DEAD, "one value", "single",
)  # fmt: skip
def _(broken: bool) -> Subject:
    body = [conv_bn(3, 16, 2), nn.Sequential(nn.Conv2d(16, 32, 8), nn.ReLU())]
    norm = nn.GroupNorm(32 if broken else 4, 32)
    return Subject(Plain([*body, norm, nn.Flatten()], nn.Linear(32, CLASSES)), *images())


@case(
    UNSEEN,
    "gains-of-zero",
    ("layers.0",),
    "the gain of the first normalizer is zero, and so is all that follows",
    *DEAD,
)
def _(broken: bool) -> Subject:
    model = cnn(norm=True)
    for layer in model.layers if broken else ():
        nn.init.zeros_(layer[1].weight)
    return Subject(model, *images())
