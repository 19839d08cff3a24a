"""A fourth set of broken networks, with the place and the cause that a diagnosis has to name: `FOURTH`.

Cases and expectations were written down before a detector ran on them, by an author who had read neither the detector
nor the reports of it. A diagnosis is judged as `broken_networks` says. Every fault shows in one forward and backward
pass in training mode; `input-scaled-in-place-at-every-call` shows by the batch, which the pass changes. Each mended
twin learns in 60 steps of Adam, and each broken network learns worse: a slow test shows both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broken_networks_second import LARGE, NOT_FINITE, SAME, SMALL
from broken_networks_third import UNUSED
from fault_cases import CLASSES, Broken, Plain, Subject, case, features, he_, images
from fourth_networks import (
    Bootstrapped,
    DomainAdversarial,
    FakeQuantize,
    ImagesAndCaptions,
    Inception,
    Levels,
    MessagePassing,
    MLPMixer,
    MultiTask,
    OwnSwish,
    Physics,
    Pixels,
    PointCloud,
    Refinement,
    Routed,
    SpectralFeatures,
    TimedDenoiser,
)
from fourth_sequences import (
    Autocast,
    BareEncoder,
    Prices,
    Remembering,
    SentenceEncoder,
    Series,
    StateSpaceModel,
    StepsFirst,
)
from unseen_faults import DEAD, FIRST_LOSS, NO_GRADIENT

FOURTH: list[Broken] = []
FROZEN = ("frozen", "freez", "requires_grad", "trainable", "not trained", "do not train", "does not train")
WRONG_BACKWARD = (
    "backward", "wrong gradient", "gradient is wrong", "does not match", "finite difference", "autograd.function",
    "disagree", "own gradient",
)  # fmt: skip
OTHER_SAMPLES = ("other sample", "across samples", "across the batch", "over the batch", "mixes", "along the batch")


def views(batch: int, width: int, noise: float) -> Tensor:
    """Two noisy views of each sample."""
    return torch.randn(batch, 1, width) + noise * torch.randn(batch, 2, width)


@case(
    FOURTH, "one-of-three-heads-drawn-at-unit-scale", ("heads.1", "output"),
    "head 1 was drawn from a normal distribution of standard deviation 1: its quantity is all that the loss sees",
    *LARGE, *FIRST_LOSS,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model, example = he_(MultiTask()), torch.randn(32, 16)
    if broken:
        nn.init.normal_(model.heads[1].get_parameter("weight"))
    return Subject(model, example, torch.stack([example[:, 0], example.mean(1), example[:, 1].abs()], 1), F.mse_loss)


@case(
    FOURTH, "every-convolution-drawn-at-a-hundredth", (),
    "all weights have a standard deviation of 0.01, too little for layers of this fan: the signal vanishes", *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers: list[nn.Module] = []
    for i in range(7):
        layers += [nn.Conv1d(16 if i else 1, 16, 5, 1 + i % 2, 2), nn.ReLU()]
    model = Plain(layers, nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, CLASSES)))
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if broken:
                nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.get_parameter("bias"))
    return Subject(model, torch.randn(16, 1, 128), torch.arange(16) % CLASSES)


@case(
    FOURTH, "log-softmax-over-the-batch", ("scores", "head", "output"),
    "the log softmax runs over the samples instead of the classes: every score depends on the other samples",
    " axis", "wrong dim", *OTHER_SAMPLES,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(PointCloud(0 if broken else 1), torch.randn(30, 3, 40), torch.arange(30) % CLASSES, F.nll_loss)


@case(
    FOURTH, "activation-whose-result-is-dropped", (),
    "the result of tanh is not assigned: u is linear in x, and its second derivative is zero",
    "is linear", "linear network", "activation", "nonlinear", "non-linear", "second derivative",
)  # fmt: skip
def _(broken: bool) -> Subject:
    points = torch.linspace(-1, 1, 48)[:, None]

    def equation(out: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(out[:, :1], targets) + (out[:, 1:] + 4.0 * out[:, :1]).square().mean()

    return Subject(Physics(not broken), points, torch.cos(2 * points), equation)


@case(
    FOURTH, "encoder-without-any-sum", (),
    "no block adds its input: attention makes all tokens and samples alike, and the gradient vanishes",
    "skip", "shortcut", "residual", " rank", *SAME, *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(BareEncoder(not broken), torch.randn(16, 8, 32), torch.arange(16) % CLASSES)


@case(
    FOURTH, "state-detached-at-each-step", ("cell",),
    "the state is detached at each step: only the last step gets a gradient",
    " early", "earlier", "truncat", "vanish", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = torch.randn(64, 5, 4)
    return Subject(Remembering(broken), example, example[:, 0].argmax(-1))


@case(
    FOURTH,
    "logarithm-taken-by-numpy",
    ("features",),
    "numpy cuts the graph: the features never learn",
    "numpy",
    *NO_GRADIENT,
)
def _(broken: bool) -> Subject:
    return Subject(SpectralFeatures(broken), torch.randn(16, 1, 128), torch.arange(16) % CLASSES)


@case(
    FOURTH, "steps-in-a-python-list", ("refine", "steps", "refine.steps"),
    "the steps stand in a Python list, which registers no parameters: the optimizer never sees them",
    " list", "regist", "parameters()", "the optimizer never", "modulelist", "not a parameter", "not among",
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = nn.Sequential()
    model.add_module("refine", Refinement(16, broken))
    model.add_module("head", nn.Linear(16, CLASSES))
    return Subject(model, *features(16, 32))


@case(
    FOURTH, "input-scaled-in-place-at-every-call", ("input",),
    "the network divides its input by 255 in place, at every call again",
    "in place", "in-place", "inplace", "modif", "overwr", "changes its input", "changes the", "changed by", "writes",
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Pixels(broken), torch.randint(256, (16, 3, 16, 16)).float(), torch.arange(16) % CLASSES)


@case(
    FOURTH, "prices-into-an-lstm", ("input", "lstm"), "prices of 40,000 saturate the gates of the LSTM",
    "satur", "not scaled", "unscaled", "standardiz", "offset", *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    walk = torch.randn(32, 21, 1).cumsum(1) * 0.3
    example = 40_000.0 + 500.0 * walk[:, :20] if broken else walk[:, :20]
    return Subject(Prices(), example, walk[:, 20], F.mse_loss)


@case(
    FOURTH, "loss-of-the-auxiliary-head", ("head", "late", "output"),
    "in training the network returns the auxiliary scores: the main head never learns", *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Inception(1 if broken else 0), *images())


@case(
    FOURTH, "loss-wrapped-in-a-new-tensor", (), "the loss is put into a new tensor: nothing gets a gradient",
    "requires_grad", "grad_fn", "not connected", "graph", "leaf", "does not depend", "do not depend", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(out, targets)
        return torch.tensor(value.item(), requires_grad=True) if broken else value

    layers = [nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU()]
    return Subject(Plain(layers, nn.Linear(64, CLASSES)), *features(), loss)


@case(
    FOURTH, "key-padding-mask-inverted", ("encoder", "embedding", "head", "output"),
    "the mask hides the words and shows the padding: every sentence looks the same", "mask", "padding", *SAME, *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    ids = torch.randint(2, 40, (16, 12)) * (torch.arange(12) < torch.randint(5, 12, (16, 1)))
    ids[:, 0] = 1
    return Subject(SentenceEncoder(broken), ids, torch.arange(16) % CLASSES)


@case(
    FOURTH, "positions-counted-to-96", ("where", "embed", "encoder.0"), "positions of 0 to 95 drown the series",
    "position", "drown", "dominat", *LARGE, *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(Series(broken), torch.randn(16, 96, 2).cumsum(1) / 6, torch.arange(16) % CLASSES)


@case(
    FOURTH, "target-network-is-no-copy", ("online", "target"),
    "the target network is the online network itself, which is frozen with it",
    "shared", "shares", "same module", "same param", *FROZEN, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return (targets - out).mean()

    return Subject(Bootstrapped(not broken), views(64, 16, 0.5), torch.ones(64), loss)


@case(
    FOURTH, "dropout-of-99-percent", ("layers.2", "layers.3"), "the probability to keep was given as the one to drop",
    "dropout", "drops 99", "0.99",
)  # fmt: skip
def _(broken: bool) -> Subject:
    p = 0.99 if broken else 0.01
    layers = [nn.Linear(12, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 64), nn.ReLU()]
    example = torch.randn(64, 12)
    return Subject(Plain(layers, nn.Linear(64, 1)), example, example[:, :3].sum(1, keepdim=True), F.mse_loss)


@case(
    FOURTH, "viewed-instead-of-transposed", ("lstm", "input", "output"),
    "the batch is reshaped to steps first instead of transposed: every output mixes samples",
    "reshape", " view", "permut", "transpos", *OTHER_SAMPLES,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = torch.randn(64, 10, 6) + torch.randn(64, 1, 6)
    return Subject(StepsFirst(broken), example, example.mean(1)[:, :4].argmax(-1))


@case(
    FOURTH, "gradients-below-half-precision", (),
    "the loss has a weight of 1e-5: its gradient is zero in half precision without a gradient scaler",
    "half", "float16", "fp16", "underflow", "scaler", *SMALL, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = torch.randn(32, 16)

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return 1e-5 * F.mse_loss(out, targets)

    return Subject(Autocast(torch.float16 if broken else torch.bfloat16), example, example.roll(1, 1), loss)


@case(
    FOURTH, "gate-of-zero-on-a-layer-of-zeros", ("blocks",),
    "the gates begin at zero, and so does the last layer of each branch: neither gets a gradient", *DEAD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    time, noise = torch.rand(64, 1), torch.randn(64, 16)
    noisy = (1 - time) * torch.randn(64, 16).sign() + time * noise
    return Subject(TimedDenoiser(broken), torch.cat([noisy, time], 1), noise, F.mse_loss)


@case(
    FOURTH, "backward-forgets-the-chain-rule", ("layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5"),
    "the activation's own backward returns its slope and forgets the gradient that it was given",
    "custom", "chain rule", *WRONG_BACKWARD, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Linear(48 if i else 32, 48), OwnSwish(not broken)]
    return Subject(Plain(layers, nn.Linear(48, CLASSES)), *features(batch=32))


@case(
    FOURTH, "reversal-before-the-wrong-head", ("reverse", "features", "class_head"),
    "the gradient is reversed before the head of the classes: the features unlearn them",
    "revers", "wrong sign", "the sign", "flips", "opposite", "ascent", "uphill", *WRONG_BACKWARD,
)  # fmt: skip
def _(broken: bool) -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[:, :4], targets[:, 0]) + 0.1 * F.cross_entropy(out[:, 4:], targets[:, 1])

    example = torch.randn(64, 16)
    targets = torch.stack([example[:, :4].argmax(-1), (example[:, 5] > 0).long()], 1)
    return Subject(DomainAdversarial("class" if broken else "domain"), example, targets, loss)


@case(
    FOURTH, "logit-scale-without-its-logarithm", ("logit_scale", "output"),
    "the scale of 14.3 was meant, its logarithm is what is learned: the scores are multiplied by a million",
    "temperature", *FIRST_LOSS, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(ImagesAndCaptions(1 / 0.07 if broken else math.log(1 / 0.07)), views(16, 24, 0.5), torch.arange(16))


@case(
    FOURTH, "boxes-in-pixels", ("head.box_head", "head", "output"),
    "the targets are boxes of hundreds of pixels: the outputs begin near zero, far from them",
    "target", "units", *FIRST_LOSS, *LARGE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    head = nn.Sequential()
    head.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()))
    head.add_module("box_head", nn.Linear(128, 4))
    boxes = torch.rand(16, 4).sort(-1).values
    return Subject(Plain(layers, head), images()[0], 640.0 * boxes if broken else boxes, F.smooth_l1_loss)


@case(
    FOURTH, "states-that-grow", ("layers.0", "layers.1", "layers"),
    "the rates of the state-space layers have the wrong sign: the states grow with every step",
    "unstable", "diverg", *LARGE, *NOT_FINITE,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = 0.3 * torch.randn(16, 40, 2) + 2.0 * torch.randn(16, 1, 2)
    return Subject(StateSpaceModel(1.0 if broken else -1.0), example, torch.arange(16) % CLASSES)


@case(
    FOURTH, "messages-summed-over-all-nodes", ("layers",),
    "the messages of all 30 nodes are added, so that the signal grows thirtyfold in each layer", *LARGE, *FIRST_LOSS,
)  # fmt: skip
def _(broken: bool) -> Subject:
    return Subject(
        he_(MessagePassing(not broken)), torch.randn(16, 30, 6) + torch.randn(16, 1, 6), torch.arange(16) % CLASSES
    )


@case(
    FOURTH, "all-one-dimensional-parameters-zeroed", ("norm", "blocks", "head", "output"),
    "a loop that sets biases to zero also set the gains of the norms: every norm gives zero", " gain", *DEAD, *SAME,
)  # fmt: skip
def _(broken: bool) -> Subject:
    model = MLPMixer()
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and (broken or name.endswith("bias")):
            nn.init.zeros_(weight)
    return Subject(model, *images())


@case(
    FOURTH, "expert-chosen-without-its-probability", ("router",),
    "the chosen expert is not multiplied by its probability: the choice gives the router no gradient",
    "argmax", "differentiable", *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = torch.randn(128, 8)
    return Subject(Routed(not broken), example, example[:, :1].abs(), F.mse_loss)


@case(
    FOURTH, "unet-joins-the-skip-with-itself", ("middle", "up2"),
    "the skip is joined with itself: the level below has no part in the output", *UNUSED, *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    example = 0.3 * torch.randn(16, 1, 16, 16)
    example[:, :, :2, :2] = torch.randint(2, (16, 1, 1, 1)) * 6.0 - 3.0  # the corner says what the whole image is
    targets = (example[:, :, :1, :1] > 0).float().expand(-1, -1, 16, 16)
    return Subject(he_(Levels(not broken)), example, targets, F.binary_cross_entropy_with_logits)


@case(
    FOURTH, "range-of-the-quantizer-too-small", ("layers.2", "layers.5"),
    "the quantizers end at ±0.01: nearly all values are cut off, and no gradient passes",
    "satur", "clamp", "clip", "cut off", " range", "quantiz", *NO_GRADIENT, *SMALL,
)  # fmt: skip
def _(broken: bool) -> Subject:
    limit = 0.01 if broken else 6.0
    layers = [nn.Linear(32, 64), nn.ReLU(), FakeQuantize(limit), nn.Linear(64, 64), nn.ReLU(), FakeQuantize(limit)]
    return Subject(he_(Plain(layers, nn.Linear(64, CLASSES))), *features())


@case(
    FOURTH, "loss-clamped-below-its-start", ("output", "head"),
    "the loss is clamped to 1, it begins above: nothing gets a gradient", "clamp", "zero", *NO_GRADIENT,
)  # fmt: skip
def _(broken: bool) -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(out, targets)
        return value.clamp(max=1.0) if broken else value

    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES))
    return Subject(he_(Plain(layers, head)), *images(), loss)
