"""The registry of model families: the pattern of their names, the meaning of its numbers, and the builder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from normfree.errors import unknown_name
from normfree.methods import Form, Skip
from normfree.models import nonresidual, transformer
from normfree.models.base import BaseModel, ModelConfig, Network
from normfree.models.resnet import IMAGENET_BLOCKS, ResNetShape, imagenet_shape

ModelFactory = Callable[[ModelConfig], BaseModel]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        pattern: The pattern of the names, for people.
        regex: The pattern as a regular expression; its groups are the numbers.
        summary: One line about the family.
        examples: Some names.
        paper: The papers that use it.
        parse: A function of the name and its numbers that returns a model factory.
        form: The default block form.
        skip: The kind of skip connections.
        size: The usual side of the images, or length of the sequences.
        spatial: Whether the models read images.
        inputs: The number of inputs; a translator has 2.
        predicts_tokens: Whether the classes are tokens.
    """

    pattern: str
    regex: str
    summary: str
    examples: tuple[str, ...]
    paper: str
    parse: Callable[..., ModelFactory]
    form: Form = "post"
    skip: Skip = "residual"
    size: int = 32
    spatial: bool = True
    inputs: int = 1
    predicts_tokens: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Whether the models read sequences of tokens."""
        return self.skip == "sequence"

    def to_json(self) -> dict[str, Any]:
        """Return the family as plain data."""
        return {key: value for key, value in asdict(self).items() if key not in ("regex", "parse")}


def _check_depth(name: str, depth: int, step: int, rest: int, least: int) -> None:
    """Raise unless the depth is step·n + rest for some n, and at least `least`."""
    if depth < least or (depth - rest) % step:
        below = max(least, depth - (depth - rest) % step)
        allowed = f"{step}n + {rest} with at least {least}" if step > 1 else f"at least {least}"
        raise ValueError(f"model '{name}' expects a depth of {allowed}, got {depth}; use {below} or {below + step}")


def _cifar(name: str, depth: int) -> ModelFactory:
    """ResNet-(6n+2) for 32×32 images: three stages of n basic blocks, shortcuts without weights.

    Reference: fixup, Table 1; He 2016a, section 4.2.
    """
    _check_depth(name, depth, 6, 2, 8)
    n = (depth - 2) // 6
    return ResNetShape(blocks=(n, n, n), widths=(16, 32, 64), stem_width=16, option_a=True).build


def _wide(name: str, depth: int, width: int) -> ModelFactory:
    """WRN-(6n+4)-k for 32×32 images: three stages of n pre-activation blocks, k times as wide.

    Reference: fixup, section 4.1; wninit, section 5.1; Zagoruyko & Komodakis 2016, Table 1.
    """
    _check_depth(name, depth, 6, 4, 10)
    n = (depth - 4) // 6
    widths = (16 * width, 32 * width, 64 * width)
    return ResNetShape(blocks=(n, n, n), widths=widths, stem_width=16, stem_activated=False).build


def _imagenet(name: str, depth: int) -> ModelFactory:
    """ResNet-18 to 152 for 224×224 images: a 7×7 stem with stride 2 and max pooling.

    Reference: fixup, Table 2; He 2016a, Table 1.
    """
    return imagenet_shape(depth, stem_kernel=7, stem_stride=2, stem_pool=True).build


def _preact(name: str, depth: int) -> ModelFactory:
    """Pre-activation ResNet-18 to 152 for 32×32 images: a 3×3 stem without activation or pooling.

    Reference: robust, section 4 and Table 1; normdead, Figure 4.
    """
    if depth not in IMAGENET_BLOCKS:
        closest = min(IMAGENET_BLOCKS, key=lambda known: abs(known - depth))
        allowed = ", ".join(map(str, IMAGENET_BLOCKS))
        raise ValueError(f"model '{name}' expects a depth of {allowed}, got {depth}; use {closest}")
    return imagenet_shape(depth, stem_activated=False).build


def _residual_mlp(name: str, blocks: int, width: int, layers: int | None) -> ModelFactory:
    """Residual MLP: one stage of blocks with `layers` linear layers each.

    Reference: wninit, Figure 1, bottom; fixup, appendix B.1.
    """
    layers = 2 if layers is None else layers
    _check_depth(name, blocks, 1, 0, 1)
    if layers < 2:
        raise ValueError(f"model '{name}' expects at least 2 layers per branch, got {layers}")
    return ResNetShape(
        blocks=(blocks,),
        widths=(width,),
        stem_width=width,
        kernels=(1,) * layers,
        stem_activated=False,
        spatial=False,
    ).build


def _sequence_model(*, encoder: bool = False, decoder: bool = False) -> Callable[..., ModelFactory]:
    def parse(name: str, *numbers: int) -> ModelFactory:
        *layers, width, inner, heads = numbers
        if width % heads:
            raise ValueError(f"model '{name}' expects a width that its heads divide, got {width} and {heads} heads")
        counts = iter(layers)
        return transformer.TransformerShape(
            width=width,
            inner=inner,
            heads=heads,
            encoder=next(counts) if encoder else 0,
            decoder=next(counts) if decoder else 0,
        ).build

    return parse


def _depth_and_width(
    build: Callable[..., Network], step: int, rest: int, least: int
) -> Callable[[str, int, int], ModelFactory]:
    def parse(name: str, depth: int, width: int) -> ModelFactory:
        _check_depth(name, depth, step, rest, least)
        return lambda config: build(depth, width, config)

    return parse


FAMILIES: tuple[Family, ...] = (
    Family(
        "resnet18|34|50|101|152",
        r"resnet(18|34|50|101|152)",
        "ImageNet ResNet: 7×7 stem, max pooling, basic blocks or bottlenecks",
        ("resnet18", "resnet50"),
        "fixup",
        _imagenet,
        size=224,
    ),
    Family(
        "resnetD, D = 6n + 2",
        r"resnet(\d+)",
        "CIFAR ResNet: three stages of n basic blocks, shortcuts without weights",
        ("resnet20", "resnet110", "resnet164", "resnet1202"),
        "fixup, wninit",
        _cifar,
    ),
    Family(
        "preact_resnet18|34|50|101|152",
        r"preact_resnet(\d+)",
        "pre-activation ResNet for 32×32 images: 3×3 stem, four stages",
        ("preact_resnet18", "preact_resnet50"),
        "robust, normdead",
        _preact,
        form="pre",
    ),
    Family(
        "wrn-D-W, D = 6n + 4",
        r"wrn-(\d+)-(\d+)",
        "wide ResNet, depth and width: three stages of n pre-activation blocks",
        ("wrn-16-12", "wrn-40-10", "wrn-10000-1"),
        "fixup, wninit",
        _wide,
        form="pre",
    ),
    Family(
        "resmlp-B-W[-M]",
        r"resmlp-(\d+)-(\d+)(?:-(\d+))?",
        "residual MLP: B blocks of width W, M = 2 linear layers per branch",
        ("resmlp-40-200", "resmlp-10-64-3"),
        "wninit, fixup",
        _residual_mlp,
        form="linear",
        size=28,
        spatial=False,
    ),
    Family(
        "mlp-D-W",
        r"mlp-(\d+)-(\d+)",
        "fully connected network, depth and width",
        ("mlp-20-200", "mlp-200-500"),
        "wninit",
        _depth_and_width(nonresidual.mlp, 1, 0, 2),
        skip="none",
        size=28,
        spatial=False,
    ),
    Family(
        "cnn-D-W",
        r"cnn-(\d+)-(\d+)",
        "plain CNN, depth and width: 3×3 layers, the first two with stride 2",
        ("cnn-50-64",),
        "wninit",
        _depth_and_width(nonresidual.cnn, 1, 0, 3),
        skip="none",
    ),
    Family(
        "dense-D-G, D = 3n + 4",
        r"dense-(\d+)-(\d+)",
        "DenseNet, depth and growth: three stages of n concatenating layers",
        ("dense-40-12",),
        "normdead",
        _depth_and_width(nonresidual.dense, 3, 4, 7),
        form="pre",
        skip="dense",
    ),
    Family(
        "highway-D-W",
        r"highway-(\d+)-(\d+)",
        "highway MLP, depth and width: gates choose between input and transform",
        ("highway-20-50",),
        "normdead",
        _depth_and_width(nonresidual.highway, 1, 0, 3),
        skip="highway",
        size=28,
        spatial=False,
    ),
    Family(
        "transformer-E-D-W-I-H",
        r"transformer-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer: E encoder and D decoder layers, width W, inner width I, H heads; translates",
        ("transformer-6-6-512-1024-4",),
        "fixup",
        _sequence_model(encoder=True, decoder=True),
        form="pre",
        skip="sequence",
        spatial=False,
        inputs=2,
        predicts_tokens=True,
    ),
    Family(
        "encoder-N-W-I-H",
        r"encoder-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer encoder: N layers, width W, inner width I, H heads; classifies a sequence",
        ("encoder-6-512-2048-8",),
        "fixup",
        _sequence_model(encoder=True),
        form="pre",
        skip="sequence",
        spatial=False,
    ),
    Family(
        "decoder-N-W-I-H",
        r"decoder-(\d+)-(\d+)-(\d+)-(\d+)",
        "Transformer decoder: N layers, width W, inner width I, H heads; a language model",
        ("decoder-12-768-3072-12",),
        "fixup",
        _sequence_model(decoder=True),
        form="pre",
        skip="sequence",
        spatial=False,
        predicts_tokens=True,
    ),
)


def catalog() -> tuple[Family, ...]:
    """Return all families of models."""
    return FAMILIES


def is_model_name(name: str) -> bool:
    """Whether a name has the pattern of a family, valid numbers or not.

    >>> is_model_name("resnet20"), is_model_name("photos")
    (True, False)
    """
    return any(re.fullmatch(family.regex, name) for family in FAMILIES)


_MOST_DIGITS = 6


def find_family(name: str) -> tuple[Family, ModelFactory]:
    """Return the family of a model and the factory that builds it.

    Raises:
        ValueError: If no family has such names, or if a number in the name is invalid.
    """
    for family in FAMILIES:
        match = re.fullmatch(family.regex, name)
        if match:
            if any(len(n) > _MOST_DIGITS for n in match.groups() if n):  # a stored name may be forged
                raise ValueError(f"model '{name[:80]}' expects numbers of at most {_MOST_DIGITS} digits in its name")
            numbers = [int(n) if n else None for n in match.groups()]
            if any(n == 0 for n in numbers):
                raise ValueError(f"model '{name}' expects positive numbers in its name, got a 0")
            return family, family.parse(name, *numbers)
    known = [example for family in FAMILIES for example in family.examples]
    raise unknown_name("model", name, known)
