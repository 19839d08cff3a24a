"""Models by name: valid names, errors, and building on the meta device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normfree.methods import get, initialize_, names
from normfree.models import build, catalog
from normfree.models.builder import find_family

# The deepest example is built in test_deep_networks.py.
EXAMPLES = [example for family in catalog() for example in family.examples if example != "wrn-10000-1"]
SMALL = ("resnet8", "wrn-10-1", "resmlp-3-16", "mlp-4-16", "cnn-4-8", "dense-7-6", "highway-4-16")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_every_family_builds(name: str) -> None:
    family, _ = find_family(name)
    model = build(name, "he_in", device="meta")
    assert name in family.examples
    assert model.name == name
    assert model.skip == family.skip
    assert bool(model.plan.branches) == (family.skip in ("residual", "sequence"))


@pytest.mark.parametrize("family", catalog(), ids=lambda f: f.pattern)
def test_family_describes_itself(family: Any) -> None:
    data = family.to_json()
    assert all(data[key] for key in ("pattern", "summary", "examples", "form", "skip", "paper", "size"))
    assert not {"regex", "parse"} & data.keys()


def test_names_of_issue_and_papers_parse() -> None:
    wanted = [f"resnet{d}" for d in (18, 20, 32, 34, 44, 50, 56, 101, 110, 152, 164, 1202)]
    wanted += [f"preact_resnet{d}" for d in (18, 50, 101, 152)]
    wanted += ["wrn-16-12", "wrn-40-10", "wrn-10000-1", "mlp-20-200", "cnn-50-64"]
    for name in wanted:
        assert find_family(name)[0].spatial == (not name.startswith("mlp"))


def test_imagenet_depths_are_not_cifar_networks() -> None:
    assert len(build("resnet18", "he_in", device="meta").plan.stage_sizes) == 4
    assert len(build("resnet20", "he_in", device="meta").plan.stage_sizes) == 3


# Names that are refused.


def refuse(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        build(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("resnt20", "resnet20"),
        ("resnet-20", "resnet20"),
        ("resnet20 ", "resnet20"),
        ("wrn-40", "wrn-40-10"),
        ("mlp-3", "mlp-.*"),
        ("transformer", "transformer-.*"),
    ],
)
def test_unknown_model_gives_the_closest_alone(name: str, closest: str) -> None:
    refuse(rf"^unknown model '{name}'; did you mean '{closest}'( or '[\w-]+'){{0,2}}\?$", name)


@pytest.mark.parametrize("name", ["", "RESNET20", "qq"])
def test_unknown_model_that_is_like_no_other_lists_the_known(name: str) -> None:
    refuse(rf"^unknown model '{name}'; expected one of: resnet18, .*wrn-40-10.*decoder-12-768-3072-12$", name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet21", r"model 'resnet21' expects a depth of 6n \+ 2 with at least 8, got 21; use 20 or 26"),
        ("resnet2", r"depth of 6n \+ 2 with at least 8, got 2; use 8 or 14"),
        ("wrn-41-10", r"model 'wrn-41-10' expects a depth of 6n \+ 4 with at least 10, got 41; use 40 or 46"),
        ("wrn-4-1", r"at least 10, got 4; use 10 or 16"),
        ("preact_resnet20", r"'preact_resnet20' expects a depth of 18, 34, 50, 101, 152, got 20; use 18"),
        ("preact_resnet110", r"expects a depth of 18, 34, 50, 101, 152, got 110; use 101"),
        ("dense-8-4", r"depth of 3n \+ 4 with at least 7, got 8; use 7 or 10"),
        ("mlp-1-8", r"model 'mlp-1-8' expects a depth of at least 2, got 1; use 2 or 3"),
        ("cnn-2-8", r"depth of at least 3, got 2"),
        ("highway-2-8", r"depth of at least 3, got 2"),
        ("resmlp-3-8-1", r"'resmlp-3-8-1' expects at least 2 layers per branch, got 1"),
    ],
)
def test_impossible_depth_names_the_possible_ones(name: str, expected: str) -> None:
    refuse(expected, name, "he_in")


@pytest.mark.parametrize(
    "name", ["resnet0", "wrn-40-0", "wrn-0-1", "resmlp-0-8", "resmlp-3-8-0", "mlp-4-0", "dense-7-0"]
)
def test_zero_in_a_name_is_refused(name: str) -> None:
    refuse(rf"model '{name}' expects positive numbers in its name, got a 0", name, "he_in")


@pytest.mark.parametrize(("name", "depth"), [("resnet20", 20), ("wrn-40-10", 40), ("dense-7-4", 7), ("mlp-2-8", 2)])
def test_neighbours_of_refused_names_build(name: str, depth: int) -> None:
    """The control of the refusals above."""
    assert str(depth) in build(name, "he_in", size=8, device="meta").name


# Methods, options and forms that are refused.


def test_unknown_method_lists_the_known_and_the_closest() -> None:
    refuse(r"unknown method 'fixpu'; did you mean 'fixup' or 'tfixup'\?$", "resnet8", "fixpu")
    refuse(
        r"unknown method 'qqq'; expected one of: he_in, .*, selu; import your own .* first \(--plugin MODULE\)$",
        "resnet8",
        "qqq",
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fixup:foo=1", r"unknown option 'foo' of method 'fixup'; expected one of: bias, scale, branches, scalar_lr"),
        ("hanin:q=1", r"unknown option 'q' of method 'hanin'; expected one of: r"),
        ("he_in:r=1", r"unknown option 'r' of method 'he_in'; expected one of: none"),
        ("fixup:bias", r"expected options as 'name:key=value,…' in 'fixup:bias', got 'bias'"),
        ("fixup:scale=2,scale=3", r"expected each option once in 'fixup:scale=2,scale=3', got 'scale' twice"),
        ("fixup:bias=1", r"expected true or false for option 'bias' of method 'fixup', got '1'"),
        ("fixup:scale=big", r"expected a number for option 'scale' of method 'fixup', got 'big'"),
        ("fixup:scale=nan", r"expected a number for option 'scale' of method 'fixup', got 'nan'"),
        ("fixup:scale=inf", r"expected a number for option 'scale' of method 'fixup', got 'inf'"),
        ("fixup:scale=0", r"expected option 'scale' of method 'fixup' to be positive, got 0"),
        ("fixup:scalar_lr=2/K", r"expected option 'scalar_lr', .* such as '1/L', got '2/K'"),
        ("fixup:scalar_lr=inf", r"expected option 'scalar_lr', .* such as '1/L', got 'inf'"),
        ("hanin:r=1", r"expected option 'r' of method 'hanin' between 0 and 1, got 1"),
        ("small_branch:beta=-1", r"expected option 'beta' of method 'small_branch' to be positive, got -1"),
        ("nf:beta=0", r"expected option 'beta' of method 'nf' to be positive, got 0"),
        ("nf_he:beta=0", r"expected option 'beta' of method 'nf"),
        ("selu:dropout=1", r"expected option 'dropout' of method 'selu' in \[0, 1\), got 1"),
        (
            "convshort:reads=x",
            r"option 'reads' of method 'convshort' 'x'; expected one of: entry, raw",
        ),
        ("convshort:gain=-1", r"expected option 'gain' of method 'convshort' to be positive, got -1"),
        (
            "isograd:shortcut=x",
            r"option 'shortcut' of method 'isograd' 'x'; expected one of: identity, conv",
        ),
    ],
)
def test_bad_option_says_what_is_allowed(spec: str, expected: str) -> None:
    refuse(expected, "resnet8", spec)


def test_unknown_form_lists_the_known() -> None:
    refuse(r"unknown block form 'middle'; expected one of: post, pre, linear", "resnet8", form="middle")


@pytest.mark.parametrize("method", ["nf", "nf_he", "isograd"])
def test_form_that_a_method_does_not_admit_is_refused(method: str) -> None:
    refuse(rf"method '{method}' does not admit the block form 'post'; expected pre", "resnet8", method, form="post")


def test_form_of_a_model_without_blocks_is_refused() -> None:
    refuse(
        r"model 'mlp-4-8' has no residual blocks, so no block form to choose; got 'pre'", "mlp-4-8", "he_in", form="pre"
    )


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        (
            "mlp-4-8",
            "fixup",
            r"method 'fixup' does not admit model 'mlp-4-8', .* 'none'; expected one of: .*he_in",
        ),
        ("cnn-4-8", "skipinit", r"'skipinit' does not admit model 'cnn-4-8', .* 'none'; expected one of: .*he_in"),
        (
            "dense-7-4",
            "fixup",
            r"does not admit model 'dense-7-4', whose skip connections are 'dense'; expected one of",
        ),
        ("highway-4-8", "nf", r"does not admit model 'highway-4-8', whose skip connections are 'highway'"),
        ("dense-7-4", "wn", r"does not admit model 'dense-7-4'.* expected one of: .*batchnorm"),
        (
            "resmlp-3-8",
            "instancenorm",
            r"method 'instancenorm' expects images, but model 'resmlp-3-8' works on vectors",
        ),
        ("mlp-4-8", "instancenorm", r"method 'instancenorm' expects images, .* expected one of: .*layernorm"),
    ],
)
def test_method_that_a_model_does_not_admit_names_what_is_allowed(model: str, method: str, expected: str) -> None:
    refuse(expected, model, method)
    refuse(expected, model, method, device="meta")


@pytest.mark.parametrize("method", [m for m in names() if get(m).needs_example and "residual" in get(m).skips])
def test_data_dependent_method_without_a_batch_is_refused(method: str) -> None:
    refuse(
        rf"method '{method}' sets its weights from data: expected a batch, got none; pass example=", "resnet8", method
    )
    build("resnet8", method, device="meta")  # nothing is initialized there, so nothing is missing


@pytest.mark.parametrize(
    "example",
    [torch.zeros(0, 3, 8, 8), torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), torch.nan)],
    ids=["empty", "constant", "nan"],
)
def test_batch_without_information_is_refused(example: Tensor) -> None:
    refuse(
        r"expected a batch of finite values that vary, got shape \(\d, 3, 8, 8\)", "resnet8", "lsuv", example=example
    )


def test_bad_numbers_are_refused() -> None:
    for options in ({"num_classes": 0}, {"num_classes": -3}, {"in_channels": 0}):
        refuse(r"expected positive num_classes and in_channels, got", "resnet8", "he_in", **options)
    for size in (0, -1):
        refuse(
            rf"expected a positive size, got {size}; leave it out for the default, 32", "resnet8", "he_in", size=size
        )


def test_example_of_the_wrong_rank_is_refused() -> None:
    refuse(r"expected an example of images \(N, C, H, W\), got shape \(2, 48\)", "resnet8", example=torch.ones(2, 48))
    refuse(
        r"expected an example of a batch of inputs \(N, …\), got shape \(2,\)",
        "mlp-3-8",
        "he_in",
        example=torch.ones(2),
    )


def test_example_sets_the_input_shape() -> None:
    example = torch.randn(4, 2, 12, 12, generator=torch.Generator().manual_seed(0))
    assert build("resnet8", "lsuv", example=example).input_shape == (2, 12, 12)
    assert build("mlp-3-8", "lsuv", example=example).input_shape == (2 * 12 * 12,)
    assert build("mlp-3-8", "he_in", in_channels=1).input_shape == (28 * 28,)


# The meta device, types and what initialization leaves behind.


def test_meta_build_allocates_nothing() -> None:
    """A network of 103 GB, which few machines could hold."""
    model = build("wrn-1000-40", "he_in", device="meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert sum(t.numel() * t.element_size() for t in model.parameters()) > 100e9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_reaches_every_parameter(dtype: torch.dtype) -> None:
    model = build("resnet8", "fixup", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(torch.zeros(2, 3, 16, 16, dtype=dtype)).dtype == dtype


def test_seed_gives_the_same_weights_in_every_type() -> None:
    single, double = (
        build("resnet8", "he_in", dtype=dtype, generator=torch.Generator().manual_seed(0)).state_dict()
        for dtype in (torch.float32, torch.float64)
    )
    assert all(torch.equal(single[name], double[name].float()) for name in single)


def spoil_(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 99)


def spoiled(model: nn.Module) -> list[str]:
    state = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, t in state if (t.isnan().any() if t.is_floating_point() else (t == 99).any())]


WRITTEN = [
    (name, method)
    for name in SMALL
    for method in (*names(), "fixup:branches=false", "isograd:shortcut=conv", "fixup:bias=false")
    if find_family(name)[0].skip in get(method).skips and (find_family(name)[0].spatial or not get(method).spatial_only)
]


@pytest.mark.parametrize(("name", "method"), WRITTEN)
def test_initialization_writes_every_parameter_and_buffer(name: str, method: str) -> None:
    model = build(name, method, size=16, device="meta").to_empty(device="cpu")
    spoil_(model)
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(4, 3, 16, 16, generator=generator)
    assert initialize_(model, method, example=example, generator=generator) is model
    assert not spoiled(model)


def test_parameter_that_no_method_knows_stays_spoiled() -> None:
    """The control: a number that initialization does not know keeps its value, and the check sees it."""
    model = build("resnet8", "he_in")
    model.extra = nn.Parameter(torch.zeros(3))
    spoil_(model)
    initialize_(model, "he_in")
    assert spoiled(model) == ["extra"]
