"""`build`: make and initialize a model, given its name and a method."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normfree.errors import unknown_name, wrong_argument
from normfree.methods import FORMS, Batch, Form, InitContext, Method, get, names
from normfree.methods.initialize import write_weights_
from normfree.methods.method import RESIDUAL_SUMS
from normfree.models.base import ModelConfig, Network, Padding
from normfree.models.model_registry import Family, find_family
from normfree.nn.attention import SPECIAL, VOCABULARY
from normfree.nn.devices import device_of, require_memory

CLASSES = 10
DROPOUT = 0.1  # the defaults of `build`


def is_foreign(name: str) -> bool:
    """Whether a name names a third-party model: it has a source before a colon."""
    return ":" in name


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
    inner_dropout: float | None = None,
    example: Batch | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Network | Any:
    """Build and initialize a model by name, with a method by name.

    >>> model = build("resnet20", method="fixup", num_classes=10)
    >>> len(model.plan.branches)
    9

    Args:
        name: The model, such as `"resnet110"` or `"transformer-6-6-512-1024-4"`; `normfree models` lists them.
        method: A method, or its name with options, such as `"hanin:r=0.8"`; `normfree methods` lists them.
        num_classes: The number of classes, by default 10. For a translator or language model, the number of tokens that
            it predicts, by default 1000.
        in_channels: The channels of the input images.
        size: The side of the input images; the default depends on the model. Only MLPs and the method
            `isograd` depend on it.
        form: The block form; the default is the method's, else the model's.
        padding_mode: The padding of convolutions, as in `torch.nn.Conv2d`.
        vocabulary: The number of input tokens, for sequence models. The default is `num_classes` if the model
            predicts tokens, with one matrix for input and output, else 1000.
        dropout: The dropout probability of sequence models, by default 0.1.
        inner_dropout: That between the layers of a feed-forward branch, by default `dropout`.
        example: A batch of inputs. Data-dependent methods need it; it sets `in_channels` and `size`.
        generator: The source of all draws; the default is torch's global generator.
        device: The device of the model. With `"meta"` nothing is initialized; call `to_empty` and `initialize_` later.
        dtype: The dtype of the parameters.

    Returns:
        A `Network`, or a `Transformer`, `Encoder` or `Decoder`.

    Raises:
        ValueError: If a name, depth, option or size is unknown or invalid, if the method does not fit the model, or if
            the model does not fit into the memory.
    """
    if not isinstance(name, str):
        remedy = "pass a text such as 'resnet20'; for a model of your own, use normfree.convert"
        raise wrong_argument("name", "the name of a model", name, remedy)
    if is_foreign(name):
        raise ValueError(
            f"expected the name of a model of normfree, got '{name}'; make it by normfree.models.third_party."
            f"create_model('{name}'), and take out its normalization by normfree.convert"
        )
    place = None if device is None or str(device) == "meta" else device_of(str(device))
    family, factory = find_family(name)
    method = get(method)
    fitting = _fitting_form(family, name, method, form)
    classes = num_classes
    if classes is None:
        classes = VOCABULARY if family.predicts_tokens else CLASSES
    if inner_dropout is not None and not (family.reads_tokens and 0 <= inner_dropout < 1):
        raise ValueError(f"expected inner_dropout in [0, 1) of a sequence model, got {inner_dropout:g} for '{name}'")
    if classes < 1 or in_channels < 1:
        raise ValueError(f"expected positive num_classes and in_channels, got {classes} and {in_channels}")
    vocabulary, dropout = _token_settings(family, name, classes, vocabulary, dropout, example)
    if size is not None and size < 1:
        raise ValueError(f"expected a positive size, got {size}; leave it out for the default, {family.size}")
    config = ModelConfig(
        name=name,
        method=method,
        form=fitting,
        input_shape=() if family.reads_tokens else _input_shape(family, in_channels, size, example),
        num_classes=classes,
        padding_mode=padding_mode,
        vocabulary=vocabulary,
        dropout=dropout,
        inner_dropout=inner_dropout,
    )
    with torch.device("meta"):  # no memory yet, and no draw from the global generator
        model = factory(config)
    if dtype is not None:
        model.to(dtype)
    if str(device) == "meta":
        return model
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    require_memory(f"the weights of '{name}'", needed, "choose a smaller model")
    # What `to_empty` does, in a third of its time.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # type: ignore[no-untyped-call]
    write_weights_(InitContext(model, model.plan, generator, example), method)
    return model if place is None else model.to(place)


def supports(name: str, method: str | Method) -> bool:
    """Whether a model can be built with a method; False for an unknown model.

    >>> supports("resnet20", "wn"), supports("encoder-6-512-2048-8", "wn")
    (True, False)
    """
    method = get(method)
    try:
        check_method(name, method)
    except ValueError:
        return False
    return True


def check_method(name: str, method: str | Method) -> None:
    """Refuse a model that cannot be built with a method, before anything is built.

    Raises:
        ValueError: For an unknown model or method, or one that does not fit; the message names those that do.
    """
    family, _ = find_family(name)
    _fitting_form(family, name, get(method), None)


def _fitting_form(family: Family, name: str, method: Method, given: Form | None) -> Form:
    """Return the block form of a model: the given one, else the method's, else the family's.

    Raises:
        ValueError: If the method or the form does not fit the model; the message names those that do.
    """
    chosen = given or method.form or family.form
    if chosen not in FORMS:
        raise unknown_name("block form", chosen, FORMS)
    if family.skip not in method.skips:
        raise ValueError(
            f"method '{method.name}' does not admit model '{name}', whose skip connections are '{family.skip}'; "
            f"expected one of: {_methods_of(family)}"
        )
    if method.spatial_only and not family.spatial:
        raise ValueError(
            f"method '{method.name}' expects images, but model '{name}' works on vectors; "
            f"expected one of: {_methods_of(family)}"
        )
    if family.skip not in RESIDUAL_SUMS:
        if given not in (None, family.form):
            raise ValueError(
                f"model '{name}' has no residual blocks, so no block form to choose; got '{given}', leave form out"
            )
        return family.form
    if family.reads_tokens and chosen == "linear":
        raise ValueError(
            f"model '{name}' has the forms 'pre' and 'post', got 'linear'; without a normalizer, 'pre' and "
            "'post' are the same"
        )
    if given is not None and given not in method.forms:
        raise ValueError(
            f"method '{method.name}' does not admit the block form '{given}'; expected {' or '.join(method.forms)}"
        )
    return chosen


def _methods_of(family: Family) -> str:
    """Return the names of the methods that fit the models of a family."""
    fitting = (m for m in map(get, names()) if family.skip in m.skips and (family.spatial or not m.spatial_only))
    return ", ".join(m.name for m in fitting)


def _input_shape(family: Family, in_channels: int, size: int | None, example: Batch | None) -> tuple[int, ...]:
    """Return (C, H, W) for images, (features,) for vectors."""
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


def _token_settings(
    family: Family, name: str, classes: int, vocabulary: int | None, dropout: float | None, example: Batch | None
) -> tuple[int, float]:
    """Return the number of tokens and the dropout of a model, 0 and 0 if it reads no tokens.

    Raises:
        ValueError: If a number is invalid, or if the example is not a batch of such tokens.
    """
    if not family.reads_tokens:
        if vocabulary is not None or dropout is not None:
            raise ValueError(f"model '{name}' reads no tokens, so it has no vocabulary or dropout; leave them out")
        return 0, 0.0
    if vocabulary is None:
        vocabulary = classes if family.predicts_tokens else VOCABULARY
    dropout = DROPOUT if dropout is None else dropout
    fewest = min(vocabulary, classes) if family.predicts_tokens else vocabulary
    if fewest <= SPECIAL:
        raise ValueError(f"model '{name}' expects a vocabulary of more than its {SPECIAL} special tokens, got {fewest}")
    if family.predicts_tokens and family.inputs == 1 and vocabulary != classes:
        raise ValueError(
            f"model '{name}' predicts the tokens that it reads: expected one vocabulary, got {vocabulary} and "
            f"num_classes {classes}; leave vocabulary out"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"expected a dropout in [0, 1), got {dropout:g}; 0 turns it off")
    if example is not None:
        batches = (example,) if isinstance(example, Tensor) else example
        _check_tokens(family, name, (vocabulary, classes), batches)
    return vocabulary, dropout


def _check_tokens(family: Family, name: str, limits: tuple[int, int], batches: tuple[Tensor, ...]) -> None:
    """Raise unless the example has one batch of tokens per input, each token below its limit."""
    if len(batches) != family.inputs or not all(t.dim() == 2 and t.dtype == torch.int64 for t in batches):
        raise ValueError(
            f"model '{name}' expects an example of {family.inputs} int64 tensor{'s' * (family.inputs > 1)} (N, T), got "
            f"{', '.join(f'{t.dtype} {tuple(t.shape)}' for t in batches)}"
        )
    for tokens, limit in zip(batches, limits, strict=False):
        if tokens.numel() and not (tokens.is_meta or 0 <= int(tokens.min()) <= int(tokens.max()) < limit):
            raise ValueError(
                f"model '{name}' expects tokens from 0 to {limit - 1}, got {int(tokens.min())} to "
                f"{int(tokens.max())}; give it a larger vocabulary"
            )
