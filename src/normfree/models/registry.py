"""`build`: the name of a model and a method become an initialized network."""

from __future__ import annotations

import math
from typing import Any

import torch

from normfree.methods import FORMS, Batch, Form, Method, get, initialize_, names
from normfree.methods.method import RESIDUAL_SUMS
from normfree.models.base import ModelConfig, Network
from normfree.models.builder import Padding
from normfree.models.families import Family, find_family
from normfree.models.special_tokens import VOCABULARY, Reads
from normfree.theory.errors import unknown_name

CLASSES = 10


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
    family, builder = find_family(name)
    method = get(method)
    fitting = _fitting_form(family, name, method, form)
    classes = num_classes
    if classes is None:
        classes = VOCABULARY if family.predicts_tokens else CLASSES
    if classes < 1 or in_channels < 1:
        raise ValueError(f"expected positive num_classes and in_channels, got {classes} and {in_channels}")
    reads = Reads(family.inputs if family.reads_tokens else 0, family.predicts_tokens)
    words, dropped = reads.settings(name, classes, vocabulary, dropout, example)
    if size is not None and size < 1:
        raise ValueError(f"expected a positive size, got {size}; leave it out for the default, {family.size}")
    config = ModelConfig(
        name=name,
        method=method,
        form=fitting,
        input_shape=() if family.reads_tokens else _input_shape(family, in_channels, size, example),
        num_classes=classes,
        padding_mode=padding_mode,
        vocabulary=words,
        dropout=dropped,
    )
    with torch.device("meta"):  # no memory yet, and no draw from the global generator
        model = builder(config)
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
        family, _ = find_family(name)
        _fitting_form(family, name, method, None)
    except ValueError:
        return False
    return True


def _fitting_form(family: Family, name: str, method: Method, given: Form | None) -> Form:
    """The form that a model has its blocks in: as given, else the method's, else the family's.

    Raises `ValueError`, which names what would do, for a method or a form that the model does not admit.
    """
    chosen = given or method.form or family.form
    if chosen not in FORMS:
        raise unknown_name("block form", chosen, FORMS)
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
    if family.skip not in RESIDUAL_SUMS:
        if given not in (None, family.form):
            raise ValueError(
                f"model '{name}' has no residual blocks, so no block form to choose; got '{given}', leave form out"
            )
        return family.form
    if family.reads_tokens and chosen == "linear":
        raise ValueError(
            f"model '{name}' has the forms 'pre' and 'post', got 'linear'; without a normalizer they are the same"
        )
    if given is not None and given not in method.forms:
        raise ValueError(
            f"method '{method.name}' does not admit the block form '{given}'; expected {' or '.join(method.forms)}"
        )
    return chosen


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
