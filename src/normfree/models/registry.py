"""Models by name, and `build`: a name and a method become an initialized network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from normfree.methods import FORMS, Batch, Form, Method, Skip, get, initialize_, names, unknown
from normfree.models import plain, resnet, skips, transformer
from normfree.models.kit import Padding
from normfree.models.network import Network
from normfree.models.stated import Request, Stated
from normfree.models.tokens import VOCABULARY, Reads

Builder = Callable[[Request], Stated]
CLASSES = 10


@dataclass(frozen=True)
class Family:
    """A family of models: how its names look, what they mean, and how one is built.

    `size` is the side of the images, or the length of the sequences, that it is meant for. Of sequences, a model reads
    as many as it has `inputs`, and `predicts_tokens` says that its classes are the tokens themselves.
    """

    pattern: str
    regex: str
    summary: str
    examples: tuple[str, ...]
    form: Form
    skip: Skip
    paper: str
    parse: Callable[..., Builder]
    size: int = 32
    spatial: bool = True
    inputs: int = 1
    predicts_tokens: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Whether sequences of tokens come in."""
        return self.skip == "sequence"

    def to_json(self) -> dict[str, Any]:
        """The family as plain data."""
        return {key: value for key, value in asdict(self).items() if key not in ("regex", "parse")}


def _depth(name: str, depth: int, step: int, rest: int, least: int) -> None:
    """Refuse a depth that no number of blocks gives."""
    if depth < least or (depth - rest) % step:
        below = max(least, depth - (depth - rest) % step)
        allowed = f"{step}n + {rest} with at least {least}" if step > 1 else f"at least {least}"
        raise ValueError(f"model '{name}' expects a depth of {allowed}, got {depth}; use {below} or {below + step}")


def _cifar(name: str, depth: int) -> Builder:
    _depth(name, depth, 6, 2, 8)
    return resnet.cifar_resnet(depth).build


def _wide(name: str, depth: int, width: int) -> Builder:
    _depth(name, depth, 6, 4, 10)
    return resnet.wide_resnet(depth, width).build


def _imagenet(name: str, depth: int) -> Builder:
    return resnet.imagenet_resnet(depth).build


def _preact(name: str, depth: int) -> Builder:
    if depth not in resnet.IMAGENET_BLOCKS:
        closest = min(resnet.IMAGENET_BLOCKS, key=lambda known: abs(known - depth))
        allowed = ", ".join(map(str, resnet.IMAGENET_BLOCKS))
        raise ValueError(f"model '{name}' expects a depth of {allowed}, got {depth}; use {closest}")
    return resnet.preact_resnet(depth).build


def _residual_mlp(name: str, blocks: int, width: int, layers: int | None = None) -> Builder:
    layers = 2 if layers is None else layers
    _depth(name, blocks, 1, 0, 1)
    if layers < 2:
        raise ValueError(f"model '{name}' expects at least 2 layers a branch, got {layers}")
    return resnet.residual_mlp(blocks, width, layers).build


def _sequences(encoder: bool, decoder: bool) -> Callable[..., Builder]:
    def parse(name: str, *numbers: int) -> Builder:
        *layers, width, inner, heads = numbers
        if width % heads:
            raise ValueError(f"model '{name}' expects a width that its heads divide, got {width} and {heads} heads")
        counts = iter(layers)
        return transformer.Shape(
            width=width,
            inner=inner,
            heads=heads,
            encoder=next(counts) if encoder else 0,
            decoder=next(counts) if decoder else 0,
        ).build

    return parse


def _two_numbers(build: Callable[..., Network], step: int, rest: int, least: int) -> Callable[[str, int, int], Builder]:
    def parse(name: str, depth: int, width: int) -> Builder:
        _depth(name, depth, step, rest, least)
        return lambda request: build(depth, width, request)

    return parse


FAMILIES: tuple[Family, ...] = (
    Family(
        "resnet18|34|50|101|152",
        r"resnet(18|34|50|101|152)",
        "ImageNet ResNet: 7×7 stem, max pooling, basic blocks or bottlenecks",
        ("resnet18", "resnet50"),
        "post",
        "residual",
        "fixup",
        _imagenet,
        size=224,
    ),
    Family(
        "resnetD, D = 6n + 2",
        r"resnet(\d+)",
        "CIFAR ResNet: three stages of n basic blocks, shortcuts without weights",
        ("resnet20", "resnet110", "resnet164", "resnet1202"),
        "post",
        "residual",
        "fixup, wninit",
        _cifar,
    ),
    Family(
        "preact_resnet18|34|50|101|152",
        r"preact_resnet(\d+)",
        "pre-activation ResNet for 32×32 images: 3×3 stem, four stages",
        ("preact_resnet18", "preact_resnet50"),
        "pre",
        "residual",
        "robust, normdead",
        _preact,
    ),
    Family(
        "wrn-D-W, D = 6n + 4",
        r"wrn-(\d+)-(\d+)",
        "wide ResNet, depth and width: three stages of n pre-activation blocks",
        ("wrn-16-12", "wrn-40-10", "wrn-10000-1"),
        "pre",
        "residual",
        "fixup, wninit",
        _wide,
    ),
    Family(
        "resmlp-B-W[-M]",
        r"resmlp-(\d+)-(\d+)(?:-(\d+))?",
        "residual MLP: B blocks of width W, M = 2 linear layers a branch",
        ("resmlp-40-200", "resmlp-10-64-3"),
        "linear",
        "residual",
        "wninit, fixup",
        _residual_mlp,
        size=28,
        spatial=False,
    ),
    Family(
        "mlp-D-W",
        r"mlp-(\d+)-(\d+)",
        "fully connected network, depth and width",
        ("mlp-20-200", "mlp-200-500"),
        "post",
        "none",
        "wninit",
        _two_numbers(plain.mlp, 1, 0, 2),
        size=28,
        spatial=False,
    ),
    Family(
        "cnn-D-W",
        r"cnn-(\d+)-(\d+)",
        "plain CNN, depth and width: 3×3 layers, the first two with stride 2",
        ("cnn-50-64",),
        "post",
        "none",
        "wninit",
        _two_numbers(plain.cnn, 1, 0, 3),
    ),
    Family(
        "dense-D-G, D = 3n + 4",
        r"dense-(\d+)-(\d+)",
        "DenseNet, depth and growth: three stages of n concatenating layers",
        ("dense-40-12",),
        "pre",
        "dense",
        "normdead",
        _two_numbers(skips.dense, 3, 4, 7),
    ),
    Family(
        "highway-D-W",
        r"highway-(\d+)-(\d+)",
        "highway network of vectors, depth and width: gates choose between input and transform",
        ("highway-20-50",),
        "post",
        "highway",
        "normdead",
        _two_numbers(skips.highway, 1, 0, 3),
        size=28,
        spatial=False,
    ),
    Family(
        "transformer-E-D-W-I-H",
        r"transformer-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer: E encoder and D decoder layers, width W, inner width I, H heads; translates",
        ("transformer-6-6-512-1024-4",),
        "pre",
        "sequence",
        "fixup",
        _sequences(True, True),
        spatial=False,
        inputs=2,
        predicts_tokens=True,
    ),
    Family(
        "encoder-N-W-I-H",
        r"encoder-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer encoder: N layers, width W, inner width I, H heads; classifies a sequence",
        ("encoder-6-512-2048-8",),
        "pre",
        "sequence",
        "fixup",
        _sequences(True, False),
        spatial=False,
    ),
    Family(
        "decoder-N-W-I-H",
        r"decoder-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer decoder: N layers, width W, inner width I, H heads; a language model",
        ("decoder-12-768-3072-12",),
        "pre",
        "sequence",
        "fixup",
        _sequences(False, True),
        spatial=False,
        predicts_tokens=True,
    ),
)


def catalog() -> tuple[Family, ...]:
    """All families of models."""
    return FAMILIES


def find(name: str) -> tuple[Family, Builder]:
    """The family that a name belongs to, and the builder of that model."""
    for family in FAMILIES:
        match = re.fullmatch(family.regex, name)
        if match:
            numbers = [int(n) if n else None for n in match.groups()]
            if any(n == 0 for n in numbers):
                raise ValueError(f"model '{name}' expects positive numbers in its name, got a 0")
            return family, family.parse(name, *numbers)
    known = [example for family in FAMILIES for example in family.examples]
    raise unknown("model", name, known)


def build(
    name: str,
    method: str | Method = "fixup",
    *,
    num_classes: int | None = None,
    in_channels: int = 3,
    size: int | None = None,
    form: Form | None = None,
    padding_mode: Padding = "zeros",
    vocabulary: int | None = None,
    dropout: float | None = None,
    example: Batch | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Network | Any:
    """Build and initialize a model by name, with a method by name: a `Network`, or one of the Transformers.

    The block form is the method's, else the model's, unless `form` is given. `size` is the side of the input images
    (default: the family's); only networks of vectors and `isograd` depend on it. `example`, a batch of inputs, is
    needed by data-driven methods and sets `in_channels` and `size`. On `device="meta"` nothing is initialized; call
    `to_empty` and `initialize_` later.

    Of models of sequences, `vocabulary` is the number of tokens that come in and `dropout` the probability (default:
    0.1). A translator or language model predicts `num_classes` tokens (default: 1000), and those that come in are the
    same, in one matrix, unless a translator's `vocabulary` is another number. Otherwise there are 10 classes.

    >>> model = build("resnet20", method="fixup", num_classes=10)
    >>> len(model.plan.branches)
    9

    Raises `ValueError` for an unknown model, depth, method or option, and for a method that the model does not admit.
    """
    family, builder = find(name)
    method = get(method)
    chosen = form or method.form or family.form
    _check_fit(family, name, method, chosen, form)
    classes = num_classes
    if classes is None:
        classes = VOCABULARY if family.predicts_tokens else CLASSES
    if classes < 1 or in_channels < 1:
        raise ValueError(f"expected positive num_classes and in_channels, got {classes} and {in_channels}")
    reads = Reads(family.inputs if family.reads_tokens else 0, family.predicts_tokens)
    words, dropped = reads.settings(name, classes, vocabulary, dropout, example)
    if size is not None and size < 1:
        raise ValueError(f"expected a positive size, got {size}; leave it out for the default, {family.size}")
    request = Request(
        name=name,
        method=method,
        form=chosen if family.skip in ("residual", "sequence") else family.form,
        input_shape=() if family.reads_tokens else _input_shape(family, in_channels, size, example),
        num_classes=classes,
        padding_mode=padding_mode,
        vocabulary=words,
        dropout=dropped,
    )
    with torch.device("meta"):  # no memory yet, and no draw from the global generator
        model = builder(request)
    model.to(dtype)
    if str(device) == "meta":
        return model
    model.to_empty(device="cpu")
    initialize_(model, method, example=example, generator=generator)
    return model if device is None else model.to(device)


def admits(name: str, method: str | Method) -> bool:
    """Whether a model by name can be built with a method; none can that has no such name.

    >>> admits("resnet20", "wn"), admits("encoder-6-512-2048-8", "wn")
    (True, False)
    """
    method = get(method)
    try:
        family, _ = find(name)
        _check_fit(family, name, method, method.form or family.form, None)
    except ValueError:
        return False
    return True


def _check_fit(family: Family, name: str, method: Method, chosen: Form, given: Form | None) -> None:
    """Refuse a method that the model does not admit, naming those that it does."""
    if chosen not in FORMS:
        raise unknown("block form", chosen, FORMS)
    if family.skip not in method.skips:
        allowed = [
            m.name for m in map(get, names()) if family.skip in m.skips and (family.spatial or not m.spatial_only)
        ]
        raise ValueError(
            f"method '{method.name}' does not admit model '{name}', whose skip connections are '{family.skip}'; "
            f"expected one of: {', '.join(allowed)}"
        )
    if method.spatial_only and not family.spatial:
        raise ValueError(f"method '{method.name}' expects images, but model '{name}' works on vectors; use 'layernorm'")
    if family.reads_tokens and chosen == "linear":
        raise ValueError(
            f"model '{name}' has the forms 'pre' and 'post', got 'linear'; without a normalizer they are the same"
        )
    if given is not None and family.skip not in ("residual", "sequence") and given != family.form:
        raise ValueError(
            f"model '{name}' has no residual blocks, so no block form to choose; got '{given}', leave form out"
        )
    if given is not None and family.skip in ("residual", "sequence") and given not in method.forms:
        raise ValueError(
            f"method '{method.name}' does not admit the block form '{given}'; expected {' or '.join(method.forms)}"
        )


def _input_shape(family: Family, in_channels: int, size: int | None, example: Batch | None) -> tuple[int, ...]:
    """(C, H, W) of images, (features,) of vectors."""
    if isinstance(example, tuple):
        raise ValueError(f"expected an example of one tensor, got {len(example)}; only Transformers read two")
    side = family.size if size is None else size
    shape = (in_channels, side, side) if example is None else tuple(example.shape[1:])
    if family.spatial and len(shape) != 3:
        raise ValueError(
            f"expected an example of images (N, C, H, W), got shape {tuple(example.shape)}; "  # type: ignore[union-attr]
            "give channels, height and width, such as 3x32x32"
        )
    if not shape:
        raise ValueError(f"expected an example of a batch of inputs (N, …), got shape {tuple(example.shape)}")  # type: ignore[union-attr]
    return shape if family.spatial else (math.prod(shape),)
