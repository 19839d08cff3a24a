"""The broken networks of the users' review, in its order: `REVIEWED`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import (
    Broken,
    Encoder,
    NoNorm,
    ResNet,
    Subject,
    case,
    cnn,
    densenet,
    features,
    he_,
    images,
    mlp,
    scaled_resnet,
    times_,
)

REVIEWED: list[Broken] = []


@case(REVIEWED, "mlp-without-relu-gain", (), "the signal vanishes: the gain of ReLU is missing", "vanish", "shrink")
def _(broken: bool) -> Subject:
    model = he_(mlp(40), 2**-0.5 if broken else 1.0)
    return Subject(model, *features())


@case(REVIEWED, "mlp-tanh-saturated", (), "tanh is saturated in every layer", "satur", "vanish", "explod")
def _(broken: bool) -> Subject:
    model = he_(mlp(20, activation=nn.Tanh), 4.0 if broken else 2**-0.5)
    return Subject(model, *features())


@case(REVIEWED, "mlp-sigmoid", (), "sigmoids let the gradient vanish", "vanish", "satur", "sigmoid", "shrink")
def _(broken: bool) -> Subject:
    model = he_(mlp(20, activation=nn.Sigmoid if broken else nn.Tanh), 2**-0.5)
    return Subject(model, *features())


@case(
    REVIEWED,
    "vgg-exploding-layer",
    ("layers.6",),
    "convolution 6 multiplies the signal by 200",
    "explod",
    "large",
    "grow",
    "outlier",
    "jump",
)
def _(broken: bool) -> Subject:
    model = cnn()
    times_(model.layers[6][0], 200.0 if broken else 1.0)
    return Subject(model, *images())


@case(
    REVIEWED,
    "mlp-dead-units",
    ("layers.4", "layers.5"),
    "every unit after layer 4 is dead",
    "dead",
    "zero",
    "constant",
    "no gradient",
)
def _(broken: bool) -> Subject:
    model = he_(mlp(6))
    nn.init.constant_(model.layers[4].bias, -20.0 if broken else 0.0)
    return Subject(model, *features())


@case(
    REVIEWED,
    "densenet-exploding-layer",
    ("layers.4",),
    "layer 4 multiplies the signal by 300",
    "explod",
    "large",
    "grow",
    "outlier",
    "jump",
)
def _(broken: bool) -> Subject:
    model = densenet()
    times_(model.layers[4].conv, 300.0 if broken else 1.0)
    return Subject(model, *images())


@case(REVIEWED, "forgotten-skip", ("blocks.6",), "block 6 does not add its input", "skip", "shortcut", "residual sum")
def _(broken: bool) -> Subject:
    model = scaled_resnet()
    model.blocks[6].skip = not broken
    return Subject(model, *images())


@case(REVIEWED, "block-times-100", ("blocks.7",), "block 7 explodes", "explod")
def _(broken: bool) -> Subject:
    model = scaled_resnet()
    times_(model.blocks[7].conv1, 100.0 if broken else 1.0)
    return Subject(model, *images())


@case(
    REVIEWED, "classifier-times-1000", ("head", "output"),
    "the first loss is far above log C: the logits are too large",
    "chance", "log c", "log(c", "ln c", "ln(c", "logits", "first loss", "initial loss", "confident",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = ResNet(6)
    times_(model.head, 1000.0 if broken else 1.0)
    return Subject(model, *images())


@case(
    REVIEWED, "classifier-bias-50", ("head", "output"), "one class has a bias of 50, so that the first loss is high",
    "bias", "chance", "log c", "log(c", "ln c", "ln(c", "logits", "first loss", "initial loss", "confident",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = ResNet(6)
    if broken:
        nn.init.constant_(model.head.bias[:1], 50.0)
    return Subject(model, *images())


@case(
    REVIEWED, "saturated-softmax", ("head", "output"), "softmax of the output is one-hot before any step",
    "satur", "chance", "log c", "log(c", "ln c", "ln(c", "logits", "first loss", "initial loss", "confident",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(mlp(3, 256))
    nn.init.normal_(model.head.weight, std=5.0 if broken else 0.05)
    return Subject(model, *features())


@case(
    REVIEWED, "equal-filters", ("layers.2",), "all filters of convolution 2 are equal",
    "equal", "identical", "symmetr", "same filter", "same weight", "rank",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = cnn(norm=True)
    if broken:
        weight = model.layers[2][0].weight
        weight.data.copy_(weight.data[:1].expand_as(weight))
    return Subject(model, *images())


@case(REVIEWED, "input-times-255", ("input",), "the input is not scaled", "input")
def _(broken: bool) -> Subject:
    example, targets = images()
    return Subject(scaled_resnet(), (example.sigmoid() if broken else example) * (255.0 if broken else 1.0), targets)


@case(
    REVIEWED,
    "resnet56-xavier",
    (),
    "the signal grows at each block; depth makes it explode",
    "explod",
    "grow",
    "per block",
)
def _(broken: bool) -> Subject:
    import normfree as nf

    return Subject(nf.build("resnet56", method="xavier" if broken else "fixup", num_classes=10), *images(16, 8))


@case(REVIEWED, "nan-in-the-input", ("input",), "the input is not finite", "not finite", "nan", "inf")
def _(broken: bool) -> Subject:
    example, targets = images()
    if broken:
        example[3, 1, 2, 2] = float("nan")
    return Subject(ResNet(6), example, targets)


@case(
    REVIEWED, "half-overflow", ("layers.2", "layers.3", "layers.4"),
    "the signal leaves the range of float16 after layer 2",
    "half", "float16", "fp16", "65504", "65,504",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(mlp(5))
    times_(model.layers[2], 5e4 if broken else 1.0)
    times_(model.layers[4], 1 / 5e4 if broken else 1.0)
    example, targets = features()
    return Subject(model.half(), example.half(), targets)


@case(
    REVIEWED, "post-norm-48-layers", (),
    "post-norm hardly trains at this depth: the gradient vanishes towards the input",
    "vanish", "post-norm", "post-ln", "shrink", "warm",
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Encoder(48, norm_first=not broken), torch.randn(8, 8, 32), torch.arange(8))


@case(
    REVIEWED,
    "batchnorm-gain-300",
    ("blocks.5",),
    "the gain of a normalizer in block 5 is 300",
    "explod",
    "large",
    "gain",
    "outlier",
)
def _(broken: bool) -> Subject:
    model = ResNet()
    times_(model.blocks[5].norm2, 300.0 if broken else 1.0)
    return Subject(model, *images())


@case(
    REVIEWED, "normalizer-missing-in-one-block", ("blocks.8",),
    "block 8 has no normalizer, and its branch is too large",
    "explod", "large", "normaliz", "outlier", "jump",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(ResNet())
    if broken:
        model.blocks[8].norm1 = model.blocks[8].norm2 = NoNorm()
        he_(model.blocks[8], 3.0)
    return Subject(model, *images())


@case(
    REVIEWED, "dead-relu", ("blocks.3",), "the ReLU in block 3 is dead, so that its branch is constant",
    "dead", "zero", "constant", "no gradient", "nothing",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = ResNet()
    nn.init.constant_(model.blocks[3].norm2.bias, -20.0 if broken else 0.0)
    return Subject(model, *images())


class _Cut(ResNet):
    """The gradient is cut after block 4."""

    cut = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x.detach() if i == 4 and self.cut else x
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


@case(
    REVIEWED, "detach", ("blocks.4", "blocks.5"), "nothing before block 5 gets a gradient",
    "no gradient", "detach", "gradient is zero", "gradient is 0", "cut", "without a gradient", "gets no",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = _Cut()
    model.cut = broken
    return Subject(model, *images())


@case(REVIEWED, "he-without-norm", (), "the signal explodes: the branches are not scaled", "explod")
def _(broken: bool) -> Subject:
    model = ResNet(40, norm=NoNorm) if broken else scaled_resnet(40)
    return Subject(he_(model) if broken else model, *images(8, 8))
