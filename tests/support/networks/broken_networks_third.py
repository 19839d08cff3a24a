"""A third set of broken networks, with the place and the cause that a diagnosis has to name: `THIRD`.

Cases and expectations were written down before a detector ran on them, by an author who had read neither the detector
nor the reports of it. A diagnosis is judged as `broken_networks` says. Every fault shows in one forward and backward
pass in training mode; in `new-head-under-the-wrong-name` and `mask-cut-at-a-threshold` it shows by the loss having no
gradient at all.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from broken_networks_second import LARGE, NOT_FINITE, SAME, SMALL
from fault_cases import CLASSES, Broken, Dense, Plain, Subject, case, features, he_, images, times_
from third_blocks import (
    GPT,
    Crop,
    Denoiser,
    Detector,
    PaddedBlock,
    PatchMixer,
    ProjectedBlock,
    Segmenter,
    Translator,
    ViT,
)
from third_networks import (
    Adversaries,
    Experts,
    GraphNetwork,
    IdentityRNN,
    MaskedMean,
    MobileNet,
    OwnLinear,
    ResettingRNN,
    SentenceClassifier,
    SequenceClassifier,
    Siamese,
    TabularTransformer,
    Transferred,
)
from unseen_faults import DEAD, FIRST_LOSS, NO_GRADIENT, word_loss, words
from unseen_networks import conv_bn

THIRD: list[Broken] = []
UNUSED = ("unused", "not used", "never", "not called", "no part", "not reached", "does not run", "ignored")


def sentences(batch: int = 16) -> Tensor:
    """Sentences of 12 words, padded with word 0."""
    ids = torch.randint(1, 60, (batch, 12))
    return ids * (torch.arange(12) < torch.randint(4, 10, (batch, 1)))


def pairs_of_words() -> tuple[Tensor, Tensor]:
    """Sources with targets to read, and the words to predict, which are the source's."""
    ids = torch.randint(40, (8, 11))
    return torch.stack([ids[:, 1:], ids[:, :-1]], 1), ids[:, 1:]


@case(
    THIRD, "depthwise-fan-counts-all-channels", ("blocks",),
    "the fan of the depthwise convolutions counts channels that they do not see, so that the signal vanishes",
    " fan", *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(MobileNet())
    for block in model.blocks:
        times_(block[0], 64**-0.5 if broken else 1.0)
    return Subject(model, *images())


@case(
    THIRD, "generator-step-on-detached-images", ("generator",), "the images are detached: the generator never learns",
    *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Adversaries(broken), torch.randn(16, 16), torch.ones(16, 1), F.binary_cross_entropy_with_logits)


@case(
    THIRD, "eps-below-half-precision", ("layers.0", "embedding"),
    "an epsilon of 1e-8 is zero in half precision, so that the norm of a padded word is 0 / 0",
    "half", "float16", "fp16", "underflow", " eps", "epsilon", "infinit", "division by zero", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(SentenceClassifier(1e-8 if broken else 1e-3), sentences(), torch.arange(16) % CLASSES)


@case(
    THIRD, "log-softmax-before-relu", ("acts.1", "convs.1", "convs.2"),
    "a log softmax is never positive, so that the ReLU behind it is dead", "relu", *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(GraphNetwork(True))
    model.acts[1] = nn.Sequential(nn.LogSoftmax(-1), nn.ReLU()) if broken else nn.Sequential(nn.ReLU())
    return Subject(model, torch.randn(16, 12, 8), torch.arange(16) % CLASSES)


@case(
    THIRD, "isolated-node-has-degree-zero", ("convs.0",), "a node without neighbours is divided by its degree of zero",
    "infinit", "divides by zero", "division by zero", "degree", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(he_(GraphNetwork(not broken)), torch.randn(16, 12, 8), torch.arange(16) % CLASSES)


@case(
    THIRD, "batch-first-forgotten", ("gru",), "the GRU takes the samples for steps: its state runs through the batch",
    "other sample", "samples", "across the batch", "over the batch", "batch_first", "wrong dim", "axis",
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(SequenceClassifier(not broken), torch.randn(16, 20, 8), torch.arange(16) % CLASSES)


@case(
    THIRD, "mean-over-the-padding", ("embedding", "encoder", "head", "output"),
    "the mask is inverted: the mean is over the padding, which is the same for all", "mask", "padding", *SAME, *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(MaskedMean(broken), sentences(), torch.arange(16) % CLASSES)


@case(
    THIRD, "every-target-ignored", ("output", "head"), "all targets have the ignored class: the loss is 0 / 0",
    "ignore", "label", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers = [nn.Embedding(30, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=0)

    ids = torch.randint(30, (8, 12))
    targets = torch.zeros_like(ids) if broken else ids % CLASSES
    return Subject(Plain(layers, nn.Linear(32, CLASSES)), ids, targets, loss)


@case(
    THIRD, "dropout-of-everything", ("transition",), "a keep probability of 1 was given as the one to drop",
    "dropout", *DEAD, *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    first, second = [Dense(12 + 8 * i, 8) for i in range(3)], [Dense(18 + 8 * i, 8) for i in range(3)]
    transition = nn.Sequential(
        nn.BatchNorm2d(36), nn.ReLU(), nn.Conv2d(36, 18, 1), nn.Dropout(1.0 if broken else 0.1), nn.AvgPool2d(2)
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(42, CLASSES))
    parts = OrderedDict[str, nn.Module](stem=nn.Conv2d(3, 12, 3, padding=1), first=nn.Sequential(*first))
    parts.update(transition=transition, second=nn.Sequential(*second), head=head)
    return Subject(he_(nn.Sequential(parts)), *images())


@case(
    THIRD, "siamese-compares-a-sample-with-itself", ("tower", "head", "output"),
    "both sides of the pair are the same sample: the distance is always zero", *DEAD, *SAME, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model, targets = Siamese(0 if broken else 1), (torch.arange(16) % 2).float()[:, None]
    return Subject(model, torch.randn(16, 2, 32), targets, F.binary_cross_entropy_with_logits)


@case(
    THIRD, "new-head-under-the-wrong-name", ("fc", "classifier", "backbone", "output"),
    "the new classifier has a name that the network does not use, and all that it uses is frozen",
    "frozen", "requires_grad", "no parameter", "nothing to train", *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    parts = [conv_bn(3, 16), conv_bn(16, 24, 2), conv_bn(24, 24, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = Transferred(nn.Sequential(*parts), 24)
    if broken:
        model.requires_grad_(False)
        model.add_module("classifier", nn.Linear(24, CLASSES))
    return Subject(model, *images())


@case(
    THIRD, "rand-instead-of-randn", ("layers",), "all weights are positive, so that the mean of each layer explodes",
    "positive", "rank", *LARGE, *SAME, *FIRST_LOSS,
)  # fmt: skip
def _(broken: bool) -> Subject:
    draw = torch.rand if broken else torch.randn
    layers: list[nn.Module] = []
    for i in range(7):
        inputs = 64 if i else 32
        layers += [OwnLinear(draw(inputs, 64) * (2 / inputs) ** 0.5), nn.ReLU()]
    return Subject(Plain(layers, nn.Linear(64, CLASSES)), *features())


@case(
    THIRD, "recurrence-grows-by-half", ("recurrent",), "the recurrent matrix is 1.5 times the identity for 40 steps",
    *LARGE, *FIRST_LOSS,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(IdentityRNN(1.5 if broken else 1.0), torch.randn(16, 40, 4), torch.arange(16) % CLASSES)


@case(
    THIRD, "attention-multiplied-by-the-root", ("decoder.1",),
    "the logits of the cross attention are multiplied by the root of the width instead of divided",
    "satur", "sqrt", "one-hot", "entropy", "softmax", "attention logits",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = Translator()
    model.decoder[1].cross.factor = 64**0.5 if broken else 64**-0.5
    return Subject(model, *pairs_of_words(), word_loss)


@case(
    THIRD, "words-drowned-by-positions", ("tokens", "positions"),
    "the words are a thousand times smaller than the positions: all sentences look alike",
    *LARGE, *SMALL, *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = GPT()
    nn.init.normal_(model.tokens.weight, std=1e-3 if broken else 1.0)
    return Subject(model, *words(), word_loss)


@case(
    THIRD, "zero-branch-on-a-zero-projection", ("stages.1",),
    "the projection of the shortcut is zero, and so is the gain of the branch: the block gives zero", *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    stages = nn.Sequential(*(ProjectedBlock(a, b) for a, b in ((16, 16), (16, 24), (24, 24), (24, 24))))
    times_(stages[1].shortcut, 0.0 if broken else 1.0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))
    return Subject(nn.Sequential(OrderedDict(stem=conv_bn(3, 16), stages=stages, head=head)), *images())


@case(
    THIRD, "router-of-zeros", ("router", "experts"), "the router is zero: every sample goes to the first expert",
    "collapse", *UNUSED, *NO_GRADIENT, *SAME, *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = Experts()
    for weight in model.router.parameters() if broken else ():
        nn.init.zeros_(weight)
    return Subject(model, *features(batch=64))


@case(
    THIRD, "prior-of-the-wrong-sign", ("cls_head", "output"),
    "the bias for rare objects has the wrong sign: the detector is sure that every anchor is one",
    "bias", "prior", *FIRST_LOSS, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = Detector()
    nn.init.constant_(model.cls_head.bias, 6.9 if broken else -6.9)

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        boxes = F.smooth_l1_loss(out[:, 3:], targets[:, 3:])
        return F.binary_cross_entropy_with_logits(out[:, :3], targets[:, :3]) + boxes

    targets = torch.cat([(torch.rand(8, 3, 8, 8) < 0.005).float(), 0.1 * torch.randn(8, 12, 8, 8)], 1)
    return Subject(model, images(batch=8)[0], targets, loss)


@case(
    THIRD, "mask-cut-at-a-threshold", ("head", "output"), "the loss is taken of a mask of zeros and ones: no gradient",
    "threshold", "differentiable", "requires_grad", "grad_fn", "frozen", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    def dice(out: Tensor, targets: Tensor) -> Tensor:
        return 1.0 - 2.0 * (out * targets).sum() / (out.sum() + targets.sum() + 1.0)

    example = images(batch=8)[0]
    return Subject(Segmenter(broken), example, (example.mean(1, keepdim=True) > 0.0).float(), dice)


@case(
    THIRD, "instance-norm-before-the-mean", ("norm", "pool", "head", "output"),
    "every map has mean zero after the norm, and the mean is all that pooling keeps", *SAME, *DEAD, *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    parts = OrderedDict[str, nn.Module](features=nn.Sequential(conv_bn(3, 16), conv_bn(16, 32, 2)))
    parts["norm"] = nn.InstanceNorm2d(32) if broken else nn.BatchNorm2d(32)
    parts.update(pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), head=nn.Linear(32, CLASSES))
    return Subject(nn.Sequential(parts), *images())


@case(
    THIRD, "padded-with-minus-ten-thousand", ("blocks.2",), "a map is padded with -1e4, as if for a maximum",
    "padding", "padded", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    blocks = [PaddedBlock(16) for _ in range(5)]
    blocks[2].fill = -1e4 if broken else 0.0
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    parts = OrderedDict[str, nn.Module](stem=nn.Conv2d(3, 16, 3, padding=1), blocks=nn.Sequential(*blocks), head=head)
    return Subject(nn.Sequential(parts), *images())


@case(
    THIRD, "crop-in-pixels", ("crop",), "the grid of the crop is in pixels: it lies outside the map, where all is zero",
    "outside", "grid", *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    body = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    parts = OrderedDict[str, nn.Module](stem=conv_bn(3, 16), crop=Crop(broken), body=body, head=nn.Linear(24, CLASSES))
    return Subject(nn.Sequential(parts), *images())


@case(
    THIRD, "state-made-new-at-each-step", ("cell",), "the state is reset at each step: the recurrent weight sees zeros",
    "reset", "hidden state", "recurr", *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(ResettingRNN(broken), torch.randn(16, 10, 8), torch.arange(16) % CLASSES)


@case(
    THIRD, "decoder-attends-to-itself-twice", ("encoder", "decoder.0.cross", "decoder.1.cross"),
    "the cross attention reads the decoder's own words: the encoder has no part in the output", *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Translator(forget_source=broken), *pairs_of_words(), word_loss)


@case(
    THIRD, "pixels-of-255-against-a-sigmoid", ("decoder", "output"),
    "the targets go to 255, the output is a sigmoid, which ends at 1",
    "sigmoid", "the targets", "satur", "between 0 and 1", "(0, 1)", "0 to 1", " range", "first loss",
    "initial loss", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.ReLU())
    up = [nn.ConvTranspose2d(8, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2), nn.Sigmoid()]
    model = he_(nn.Sequential(OrderedDict(encoder=encoder, decoder=nn.Sequential(*up))))
    example = F.interpolate(torch.rand(8, 3, 4, 4), scale_factor=4.0, mode="bilinear")
    return Subject(model, example, example * 255.0 if broken else example, F.mse_loss)


@case(
    THIRD, "missing-values-in-a-column", ("input", "tokenizer"), "missing values of a column are NaN in the input",
    "missing", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = torch.randn(16, 8)
    targets = example.sum(-1, keepdim=True)
    example[3:6, 2] = float("nan") if broken else 0.0
    return Subject(TabularTransformer(), example, targets, F.mse_loss)


@case(
    THIRD, "class-token-read-before-the-blocks", ("blocks", "patches", "class_token", "norm", "head", "output"),
    "the classifier reads the class token as it was before the blocks: the same for all images",
    "class token", *SAME, *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(ViT(broken), *images())


@case(
    THIRD, "bytes-into-relu6", ("input", "layers.0", "layers.1"),
    "pixels from 0 to 255 saturate the first ReLU6", "satur", "relu6", "255", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(24 if i else 3, 24, 3, 1 + i % 2, 1), nn.ReLU6()]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))
    example = torch.randint(256, (16, 3, 16, 16)).float()
    example = example if broken else (example - 127.5) / 73.9
    return Subject(he_(Plain(layers, head)), example, torch.arange(16) % CLASSES)


@case(
    THIRD, "weight-norm-of-a-zero-layer", ("blocks.2",), "weight norm divides by the length of a zero layer",
    "weight norm", "divides by zero", "division by zero", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = PatchMixer()
    within = model.blocks[2].within
    times_(within[2], 0.0 if broken else 1.0)
    within[2] = weight_norm(within[2])
    return Subject(model, *images())


@case(
    THIRD, "sum-divided-by-the-keep-probability", ("blocks",),
    "the keep probability divides the whole sum, not the branch, so that the signal doubles in each block",
    "doubl", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model, noise = Denoiser(), torch.randn(8, 3, 8, 8)
    for block in model.blocks:
        block.keep = 0.5 if broken else 1.0
    time = torch.rand(8, 1, 1, 1).expand(-1, 1, 8, 8)
    noisy = (1.0 - time) * torch.randn(8, 3, 8, 8) + time * noise
    return Subject(model, torch.cat([noisy, time], 1), noise, F.mse_loss)
