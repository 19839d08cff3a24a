"""A second set of broken networks, with the place and the cause that a diagnosis has to name: `SECOND`.

Cases and expectations were written down before a detector ran on them, by an author who had read neither the detector
nor the reports of it. A diagnosis is judged as `broken_networks` says. The first eleven networks add their branches in
a loop of the model's own forward pass.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from fault_cases import CLASSES, Broken, Dense, Encoder, Plain, Subject, case, cnn, features, he_, images, mlp, times_
from second_networks import (
    VAE,
    AttentionPool,
    AveragedStream,
    BagOfWords,
    DeepUNet,
    DetachedStream,
    Finetuned,
    FrozenBatchNorm,
    LogPower,
    LoopMixer,
    LoopResNet,
    LoopTransformer,
    LSTMReader,
    Multiply,
    Pooled,
    ReplacedStream,
    ReZeroMLP,
    SharedBlock,
    ShortLoop,
    StagedResNet,
    Tabular,
    UnitLength,
    WaveNet,
)
from unseen_faults import DEAD, FIRST_LOSS, NO_GRADIENT, pixel_loss, word_loss, words
from unseen_networks import conv_bn

SECOND: list[Broken] = []
LARGE = ("explod", "large", "grow", "outlier", "jump")
SMALL = ("vanish", "small", "shrink", "weak", "tiny", "drops", "collapse")
SAME = (
    "same", "constant", "does not depend", "do not depend", "identical", "equal", "every sample", "all samples",
    "one value", "single",
)  # fmt: skip
NOT_FINITE = ("not finite", "non-finite", "nonfinite", "nan", "not a number")


@case(SECOND, "loop-branch-times-30", ("branches.9",), "branch 9 is thirty times too large", *LARGE)
def _(broken: bool) -> Subject:
    model = LoopResNet().scaled(12**-0.5)
    times_(model.branches[9][-1], 30.0 if broken else 1.0)
    return Subject(model, *images())


@case(
    SECOND, "loop-stream-replaced", ("branches.5",), "branch 5 takes the place of the stream instead of being added",
    "skip", "shortcut", "residual sum", "not add", "no sum", "without a sum",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = ReplacedStream().scaled(0.1)
    model.replaced = 5 if broken else -1
    return Subject(model, *images())


@case(
    SECOND, "loop-stream-averaged", (), "each sum is halved, so that the signal vanishes with depth",
    "vanish", "shrink", "decay", "halv", "collapse",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = AveragedStream(24).scaled(24**-0.5)
    model.weight = 0.5 if broken else 1.0
    return Subject(model, *images(8))


@case(
    SECOND, "loop-shortcut-detached", (), "the shortcut is detached, so that the gradient vanishes in the branches",
    "detach", "vanish", "shrink", "shortcut", "skip", "decay", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = DetachedStream(16, norm=True).scaled(0.25)
    model.cut = broken
    return Subject(model, *images())


@case(
    SECOND, "loop-last-branch-never-runs", ("branches.7",), "the loop ends too early: the last branch is never used",
    "unused", "not used", "never", "not called", "no part", "not reached", "does not run", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = ShortLoop(8, norm=True).scaled(0.5)
    model.left_out = 1 if broken else 0
    return Subject(model, *images())


@case(
    SECOND, "loop-alphas-of-zero-not-trained", (),
    "every branch is multiplied by a zero that is a buffer, so that no branch ever learns",
    "frozen", *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(ReZeroMLP(trained=not broken), *features())


@case(
    SECOND, "loop-layer-norm-gain-60", ("norms2.4", "mlps.4"), "the gain of the second norm of layer 4 is 60",
    " gain", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LoopTransformer(final_norm=False)
    times_(model.norms2[4], 60.0 if broken else 1.0)
    return Subject(model, *words(), word_loss)


@case(
    SECOND, "loop-causal-mask-hides-the-diagonal", ("attentions.0",),
    "the causal mask hides the token itself, so that the first token sees nothing and softmax gives NaN",
    "mask", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LoopTransformer(3)
    for attention in model.attentions:
        attention.mask = torch.ones(12, 12, dtype=torch.bool).triu(0 if broken else 1)
    return Subject(model, *words(), word_loss)


@case(
    SECOND, "loop-token-mlp-all-zero", ("token_mlps.2",), "both layers of a token MLP are zero: it never learns",
    *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LoopMixer()
    for weight in model.token_mlps[2].parameters() if broken else ():
        nn.init.zeros_(weight)
    return Subject(model, *images())


@case(
    SECOND, "loop-gate-bias-minus-20", ("gates.3", "filters.3", "mixes.3"), "gate 3 is shut by its bias",
    " gate", "sigmoid", "satur", "vanish", "tiny", "too small", *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = WaveNet()
    nn.init.constant_(model.gates[3].bias, -20.0 if broken else 0.0)
    return Subject(model, torch.randn(16, 4, 24), torch.arange(16) % CLASSES)


@case(
    SECOND, "loop-shared-block-24-times", ("block",), "one block is added 24 times and makes the signal explode", *LARGE
)
def _(broken: bool) -> Subject:
    return Subject(SharedBlock(24, 1.0 if broken else 24.0), *features())


@case(
    SECOND, "convolution-bias-of-30", ("layers.3",), "a bias of 30 swamps the signal: all samples look alike",
    "bias", "offset", *LARGE, *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = cnn()
    nn.init.constant_(model.layers[3][0].bias, 30.0 if broken else 0.0)
    return Subject(model, *images())


@case(
    SECOND, "projection-without-norm", ("stages.2.0",), "the projection of stage 2 has no norm and is far too large",
    "normaliz", "projection", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = StagedResNet()
    if broken:
        times_(model.stages[2][0].down[0], 30.0)
        model.stages[2][0].down[1] = nn.Identity()
    return Subject(model, *images())


@case(
    SECOND, "batch-norm-frozen-before-any-checkpoint", (),
    "frozen batch norms without statistics normalize nothing, so that the signal explodes", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(StagedResNet(6, FrozenBatchNorm if broken else nn.BatchNorm2d), *images())


@case(
    SECOND, "relu-on-a-negative-regression", ("head", "output"),
    "a ReLU behind the last layer cuts every output to zero", "relu", *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    plain = he_(mlp(4))
    linear = nn.Linear(64, 1)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.constant_(linear.bias, -2.0)
    head = nn.Sequential(linear, nn.ReLU() if broken else nn.Identity())
    return Subject(Plain([*plain.layers], head), features()[0], torch.randn(16, 1) - 2.0, F.mse_loss)


@case(
    SECOND, "sigmoid-twice", ("head", "output"), "the output is already a sigmoid; the loss takes another",
    "sigmoid", "probabilit", "between 0 and 1", "in [0, 1]", "(0, 1)", "0 to 1", "softmax",
)  # fmt: skip
def _(broken: bool) -> Subject:
    plain = he_(mlp(4))
    head = nn.Sequential(nn.Linear(64, 6), nn.Sigmoid() if broken else nn.Identity())
    targets = (torch.rand(16, 6) < 0.5).float()
    return Subject(Plain([*plain.layers], head), features()[0], targets, F.binary_cross_entropy_with_logits)


@case(
    SECOND, "log-variance-overflows", ("to_logvar", "decoder"), "the exponential of the log variance overflows",
    "infinit", "overflow", "exponent", *NOT_FINITE, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = VAE()
    times_(model.to_logvar, 2000.0 if broken else 1.0)
    example, _ = features()
    return Subject(model, example, example, F.mse_loss)


@case(
    SECOND, "tanh-code-saturated", ("encoder.2", "encoder.3"), "the tanh of the code is saturated",
    "satur", "tanh", *LARGE, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    encoder = he_(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.Tanh()))
    times_(encoder[2], 200.0 if broken else 1.0)
    decoder = nn.Sequential(nn.ConvTranspose2d(8, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2))
    example = F.interpolate(torch.randn(16, 3, 4, 4), scale_factor=4.0, mode="bilinear")
    model = nn.Sequential(OrderedDict(encoder=encoder, decoder=decoder))
    return Subject(model, example, example, F.mse_loss)


@case(
    SECOND, "forget-gate-shut", ("lstm", "embedding"), "the forget gate is shut, so that early words have no gradient",
    "forget", " gate", "satur", "decay", *SMALL, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = LSTMReader()
    with torch.no_grad():
        model.lstm.bias_ih_l0[32:64] = -15.0 if broken else 2.0
    ids = torch.randint(CLASSES, (32, 16))
    return Subject(model, ids, ids[:, 0].clone())


@case(
    SECOND, "word-numbers-divided-to-zero", ("input", "embedding"),
    "the numbers of the words were scaled to [0, 1] and cast to integers: all inputs are equal", *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    ids = torch.randint(100, (16, 12))
    return Subject(BagOfWords(), (ids / 100).long() if broken else ids, torch.arange(16) % CLASSES)


@case(
    SECOND, "embedding-of-one-column-times-200", ("tables.1",), "one embedding is 200 times larger than the others",
    *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = he_(Tabular())
    times_(model.tables[1], 200.0 if broken else 1.0)
    return Subject(model, torch.randint(20, (16, 5)), torch.arange(16) % CLASSES)


@case(
    SECOND, "unet-up-convolution-zero", ("lift1",), "a transposed convolution is zero, and its ReLU stays dead", *DEAD
)
def _(broken: bool) -> Subject:
    model = DeepUNet()
    for weight in model.lift1[0].parameters() if broken else ():
        nn.init.zeros_(weight)
    return Subject(model, images(batch=4)[0], torch.randint(4, (4, 16, 16)), pixel_loss)


@case(
    SECOND,
    "densenet-transition-divided-by-65025",
    ("layers.4",),
    "the transition divides by 255 twice: the signal vanishes",
    *SMALL,
)
def _(broken: bool) -> Subject:
    first, second = [Dense(16 + 8 * i, 8) for i in range(3)], [Dense(20 + 8 * i, 8) for i in range(3)]
    transition = nn.Sequential(nn.Conv2d(40, 20, 1), Multiply(255.0**-2 if broken else 1.0), nn.AvgPool2d(2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(44, CLASSES))
    model = he_(Plain([nn.Conv2d(3, 16, 3, padding=1), *first, transition, *second], head))
    return Subject(model, *images())


@case(
    SECOND, "layer-norm-eps-1e5", (), "an epsilon of 1e5 instead of 1e-5 makes every norm return almost zero",
    " eps", "epsilon", "constant", *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = Encoder(6, norm_first=True)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e5 if broken else 1e-5
    return Subject(model, torch.randn(16, 8, 32), torch.arange(16) % CLASSES)


@case(
    SECOND, "logarithm-of-silence", ("layers.0", "layers.1"), "the logarithm of zero power is minus infinity",
    "infinit", "-inf", "logarithm", "log of", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    body = [nn.Conv1d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    layers = [nn.Conv1d(1, 16, 16, 8, bias=False), LogPower(0.0 if broken else 1e-4), *body]
    example = torch.randn(16, 1, 256)
    example[4, :, 100:] = 0.0
    return Subject(Plain(layers, nn.Linear(24, CLASSES)), example, torch.arange(16) % CLASSES)


@case(
    SECOND, "gradient-of-a-root-at-zero", ("layers.5", "layers.6"),
    "a sample of zeros has length zero, where the root has no derivative: the gradient is NaN", *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    plain = he_(mlp(4, activation=nn.Tanh), 0.5**0.5)
    example, targets = features()
    example[2] = 0.0
    return Subject(Plain([*plain.layers, UnitLength(not broken)], plain.head), example, targets)


@case(
    SECOND, "attention-weights-all-one", ("score",), "softmax runs over an axis of one score: its weights are all one",
    "softmax", *DEAD, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(AttentionPool(-1 if broken else 1), torch.randn(16, 10, 8), torch.arange(16) % CLASSES)


@case(
    SECOND, "softmax-of-one-logit", ("head", "output"), "softmax of a single logit is always 1",
    "softmax", "satur", "zero", *SAME, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers = [conv_bn(3, 16), conv_bn(16, 24, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = nn.Sequential(nn.Linear(24, 1), nn.Softmax(-1) if broken else nn.Sigmoid())
    return Subject(Plain(layers, head), images()[0], (torch.arange(16) % 2).float()[:, None], F.binary_cross_entropy)


@case(
    SECOND, "sum-over-all-positions", ("head", "output"), "pooling adds 1024 positions: the logits are too large",
    "pool", "summed", "sum over", *FIRST_LOSS, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Pooled(torch.sum if broken else torch.mean), *images(32, 8))


@case(
    SECOND,
    "backbone-under-no-grad",
    ("backbone",),
    "the backbone runs under no_grad",
    "no_grad",
    "frozen",
    *NO_GRADIENT,
)
def _(broken: bool) -> Subject:
    backbone = nn.Sequential(
        conv_bn(3, 16), conv_bn(16, 16, 2), conv_bn(16, 24, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Subject(Finetuned(backbone, 24, no_grad=broken), *images())
