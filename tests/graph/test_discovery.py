"""Discovery against the plans that our models state, against torchvision, and on small models with one trait each."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from normfree import discover
from normfree.diagnostics.propagation import propagate
from normfree.methods import Form, get, names
from normfree.models import build
from normfree.models.builder import find_family
from normfree.plan import ResidualPlan

VARIANTS = ("fixup:bias=false", "convshort:reads=raw", "isograd:shortcut=conv", "selu:dropout=0.05", "nf:beta=1")
MODELS = ("resnet8", "wrn-10-2", "resmlp-3-8", "mlp-4-8", "cnn-4-8", "dense-7-4", "highway-4-8")
SEQUENCES = ("transformer-1-2-8-16-2", "encoder-2-8-16-2", "decoder-2-8-16-2")
LARGE = (
    "resnet14",
    "resnet18",
    "resnet50",
    "wrn-10-1",
    "wrn-16-2",
    "preact_resnet18",
    "preact_resnet50",
    "resmlp-2-8-3",
)


def forms_of(method: str, model: str) -> tuple[Form | None, ...]:
    """The block forms that method and model admit; none where they do not go together."""
    record, family = get(method), find_family(model)[0]
    if family.skip not in record.skips or (record.spatial_only and not family.spatial):
        return ()
    if family.reads_tokens:
        return tuple(form for form in record.forms if form != "linear")
    return record.forms if family.skip == "residual" else (None,)


CASES = [
    *[
        (model, method, form)
        for model in (*MODELS, *SEQUENCES)
        for method in (*names(), *VARIANTS)
        for form in forms_of(method, model)
    ],
    *[(model, method, None) for model in LARGE for method in ("he_in", "fixup", "batchnorm", "convshort", "wn", "nf")],
]


def tokens(model: str) -> tuple[Tensor, ...]:
    """As many sequences as a model reads, of different lengths."""
    return tuple(torch.empty(2, 5 + i, dtype=torch.int64, device="meta") for i in range(find_family(model)[0].inputs))


def images(size: int = 32) -> Tensor:
    return torch.empty(2, 3, size, size, device="meta")


@pytest.mark.parametrize(("model", "method", "form"), CASES)
def test_discovered_plan_equals_the_stated_one(model: str, method: str, form: Form | None) -> None:
    network = build(model, method, form=form, size=32, device="meta")
    assert discover(network, tokens(model) if model in SEQUENCES else images()) == network.plan


def test_cases_cover_every_method_form_and_family() -> None:
    assert {method for _, method, _ in CASES} >= set(names())
    assert {form for _, _, form in CASES} >= {"post", "pre", "linear"}
    regexes = {find_family(model)[0].regex for model, _, _ in CASES}
    assert len(regexes) == 12


@pytest.mark.slow
def test_discovered_plan_of_a_thousand_layers_equals_the_stated_one() -> None:
    network = build("wrn-1000-1", "fixup", device="meta")
    plan = discover(network, images())
    assert plan == network.plan
    assert plan.stage_sizes == (166, 166, 166)


def test_removed_branches_leave_nothing_to_discover() -> None:
    """The one model whose plan is not discovered: without a branch there is no sum to find."""
    network = build("resnet8", "fixup:branches=false", device="meta")
    assert len(network.plan.branches) == 3
    assert not discover(network, images()).branches


def test_discovered_plan_differs_between_methods() -> None:
    """The control of the comparison: plans are not equal by having nothing in them."""
    plans = [
        discover(build("wrn-16-2", m, device="meta"), images()) for m in ("he_in", "convshort", "convshort:reads=raw")
    ]
    assert plans[0] != plans[1] != plans[2] != plans[0]


# Third-party models.


def torchvision_plan(name: str) -> ResidualPlan:
    with torch.device("meta"):
        return discover(getattr(torchvision.models, name)(), images(64))


def test_torchvision_resnet18_has_eight_branches_of_two() -> None:
    plan = torchvision_plan("resnet18")
    assert [b.degree for b in plan.branches] == [2] * 8
    assert plan.stage_sizes == (2, 2, 2, 2)
    assert [b.shortcut for b in plan.branches] == ["identity"] * 2 + ["projection", "identity"] * 3
    assert [layer.name for layer in (*plan.stem, *plan.classifier)] == ["conv1", "fc"]
    assert not plan.body


def test_torchvision_resnet50_has_sixteen_branches_of_three() -> None:
    plan = torchvision_plan("resnet50")
    assert [b.degree for b in plan.branches] == [3] * 16
    assert plan.stage_sizes == (3, 4, 6, 3)
    expected = [kind for size in (3, 4, 6, 3) for kind in ["projection"] + ["identity"] * (size - 1)]
    assert [b.shortcut for b in plan.branches] == expected
    first = plan.branches[0]
    assert [layer.name for layer in first.layers] == ["layer1.0.conv1", "layer1.0.conv2", "layer1.0.conv3"]
    assert [layer.name for layer in first.shortcut_layers] == ["layer1.0.downsample.0"]
    assert [(m.reads_activation, m.feeds_activation) for m in first.layers] == [
        (True, True),
        (True, True),
        (True, False),
    ]
    # Widths change before resolutions do, so the first stage has a transition too.
    assert [b.position.index for b in plan.branches if b.position.transition] == [1, 4, 8, 14]


def test_torchvision_plans_have_the_layers_of_ours() -> None:
    ours = discover(build("resnet50", "batchnorm", size=64, device="meta"), images(64))
    theirs = torchvision_plan("resnet50")

    def facts(plan: ResidualPlan) -> list[tuple[object, ...]]:
        return [
            (b.position, b.shortcut, [(x.reads_activation, x.feeds_activation) for x in b.layers])
            for b in plan.branches
        ]

    assert facts(ours) == facts(theirs)


@pytest.mark.parametrize("name", ["vgg11", "alexnet"])
def test_plain_torchvision_models_have_no_branches(name: str) -> None:
    plan = torchvision_plan(name)
    assert not plan.branches
    assert len(plan.stem) == len(plan.classifier) == 1
    assert sum(1 for _ in plan.layers()) == {"vgg11": 11, "alexnet": 8}[name]


class Toy(nn.Module):
    """A stem, one trait in the middle, and a classifier, on vectors of four."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.b = nn.Parameter(torch.zeros(4))
        self.classifier = nn.Linear(4, 3)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.middle(self.stem(x)))


def plan_of(model: nn.Module) -> ResidualPlan:
    return discover(model, torch.zeros(2, 4))


def layer_names(plan: ResidualPlan) -> list[tuple[list[str], str, list[str]]]:
    return [
        ([layer.name for layer in b.layers], b.shortcut, [layer.name for layer in b.shortcut_layers])
        for b in plan.branches
    ]


class AddedParameter(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x + self.b) + self.b)


def test_added_parameter_is_no_residual_sum() -> None:
    plan = plan_of(AddedParameter())
    assert not plan.branches
    assert [layer.name for layer in plan.body] == ["first"]


class Identity(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x + self.b)))


def test_sum_with_its_own_input_is_a_residual_sum() -> None:
    """The control of the one before: the same additions of a parameter, and one of the signal."""
    assert layer_names(plan_of(Identity())) == [(["first", "second"], "identity", [])]


class SqueezeAndExcitation(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = self.first(x)
        gate = torch.sigmoid(self.third(torch.relu(self.second(y))))
        return x + y * gate


class OnlyExcitation(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y * torch.sigmoid(self.second(y))


def test_squeeze_and_excitation_belongs_to_the_branch() -> None:
    plan = plan_of(SqueezeAndExcitation())
    assert layer_names(plan) == [(["first", "second", "third"], "identity", [])]
    (branch,) = plan.branches
    assert [layer.gate for layer in branch.layers] == [False, True, True]
    assert (branch.last.name, branch.degree) == ("first", 1)
    assert not plan_of(OnlyExcitation()).branches


class GatedTwice(Toy):
    """The sigmoid of `third` is a factor of another signal, that of `second` one of its own."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) * torch.sigmoid(self.third(x)))
        return y * torch.sigmoid(y)


@pytest.mark.parametrize("toy", [OnlyExcitation, GatedTwice])
def test_gates_outside_branches_are_the_layers_whose_size_the_output_does_not_follow(toy: type[Toy]) -> None:
    """By brute force: with a weight 10⁶ and 10⁹ times as large, the output grows, or is bounded."""
    torch.manual_seed(0)
    model, x = toy().double(), torch.randn(16, 4, dtype=torch.float64)
    plan = discover(model, x)
    assert not plan.branches
    bounded = {}
    for layer in plan.layers():
        sizes = []
        for factor in (1e6, 1e9):
            large = copy.deepcopy(model)
            with torch.no_grad():
                large.get_parameter(layer.path).mul_(factor)
                sizes.append(large(x).std().item())
        bounded[layer.name] = sizes[1] < 10 * sizes[0]
    assert {layer.name: layer.gate for layer in plan.layers()} == bounded
    assert True in bounded.values()
    assert False in bounded.values()


class HighwayToy(Toy):
    def middle(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.first(x))
        return gate * self.second(x) + (1 - gate) * x


def test_gated_shortcut_is_no_residual_sum() -> None:
    assert not plan_of(HighwayToy()).branches


class Parallel(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Projection(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return self.third(x) + self.second(torch.relu(self.first(x)))


def test_parallel_sum_and_projection_are_distinguished() -> None:
    plan = plan_of(Parallel())
    assert not plan.branches  # two parallel layers are one
    paths = {layer.name: layer.parallel_paths for layer in plan.layers()}
    assert {name: count for name, count in paths.items() if count > 1} == {"first": 2, "second": 2}
    assert layer_names(plan_of(Projection())) == [(["first", "second"], "projection", ["third"])]


class TwoInputs(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(torch.ones_like(self.b).expand(2, 4))


def test_sum_with_something_that_ignores_the_input_is_not_residual() -> None:
    assert not plan_of(TwoInputs()).branches


class LongSkip(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = x + self.first(x)
        y = self.third(y + self.second(y))
        return x + y


def test_long_skip_lists_the_layers_that_inner_blocks_leave() -> None:
    assert layer_names(plan_of(LongSkip())) == [
        (["first"], "identity", []),
        (["second"], "identity", []),
        (["third"], "identity", []),
    ]


class Nested(Toy):
    """Sums around whole blocks, whose layers are all the blocks' own."""

    def middle(self, x: Tensor) -> Tensor:
        y = x + self.first(x)
        y = y + self.second(y)
        x = 0.2 * y + x
        return torch.relu(x + self.third(x)) + x


class Pooled(Toy):
    """Nothing learnable is added."""

    def middle(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + torch.tanh(x).flip(-1)


def test_sum_of_whole_blocks_is_a_branch_without_layers() -> None:
    plan = plan_of(Nested())
    none: list[str] = []
    assert layer_names(plan) == [
        (["first"], "identity", []),
        (["second"], "identity", []),
        (none, "identity", []),
        (["third"], "identity", []),
        (none, "identity", []),
    ]
    assert [b.branch_first for b in plan.branches if not b.layers] == [True, True]
    assert [b.position.index for b in plan.branches] == [1, 2, 3, 4, 5]
    assert "[no layers of its own] + identity" in str(plan)
    assert layer_names(plan_of(Pooled())) == [(["first"], "identity", [])]  # control


class Shared(Toy):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.second(torch.relu(self.first(x)))
        return x


def test_shared_modules_give_a_branch_for_every_call() -> None:
    plan = plan_of(Shared())
    assert layer_names(plan) == [(["first", "second"], "identity", [])] * 3
    assert len({b.name for b in plan.branches}) == 3
    assert plan.branches[2].position.total == 3


class InPlace(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        y += x
        return y.relu_()


class Operators(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = torch.add(self.first(x), x)
        return y.add(self.second(y) * 0.5)


def test_all_ways_to_write_a_sum_are_seen() -> None:
    assert layer_names(plan_of(InPlace())) == [(["first", "second"], "identity", [])]
    assert layer_names(plan_of(Operators())) == [(["first"], "identity", []), (["second"], "identity", [])]


WRITTEN = {
    "x + f": lambda x, f: x + f,
    "f + x": lambda x, f: f + x,
    "add(x, f)": torch.add,
    "add(input, other)": lambda x, f: torch.add(input=x, other=f),
    "add(other, input)": lambda x, f: torch.add(other=x, input=f),
    "x.add(other)": lambda x, f: x.add(other=f),
    "x.add_": lambda x, f: x.clone().add_(f),
    "sum": lambda x, f: sum([x, f]),
    "sum of f": lambda x, f: sum([f, x]),
    "x - f": lambda x, f: x - f,
    "f - x": lambda x, f: f - x,
    "sub(input, other)": lambda x, f: torch.sub(other=f, input=x),
    "x.subtract": lambda x, f: x.subtract(f),
}


class Written(Toy):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def middle(self, x: Tensor) -> Tensor:
        return WRITTEN[self.way](x, self.second(torch.relu(self.first(x))))


@pytest.mark.parametrize("way", WRITTEN)
def test_sum_is_found_and_measured_however_it_is_written(way: str) -> None:
    torch.manual_seed(0)
    model, x = Written(way), torch.randn(16, 4)
    plan = plan_of(model)
    assert layer_names(plan) == [(["first", "second"], "identity", [])]
    (found,) = propagate(model, x, plan=plan).sums
    stream = model.stem(x)
    f = model.second(torch.relu(model.first(stream)))
    assert found.branch.variance == pytest.approx(f.var(0, unbiased=False).mean().item(), rel=1e-4)
    assert found.shortcut.variance == pytest.approx(stream.var(0, unbiased=False).mean().item(), rel=1e-4)


class Scaled(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return (0.5 * x + 2 * self.first(x)) / 3


def test_scaled_shortcut_is_still_an_identity() -> None:
    assert layer_names(plan_of(Scaled())) == [(["first"], "identity", [])]


class Subsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x[:, :, ::2, ::2]


def test_subsampled_shortcut_is_no_identity() -> None:
    plan = discover(Subsampled(), torch.zeros(2, 4, 8, 8))
    assert layer_names(plan) == [(["conv"], "subsample", [])]
    assert plan.branches[0].position.transition


class TwoArguments(Toy):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        return self.classifier(x + self.first(x) if scale is None else scale * x + self.first(x))


def test_example_may_be_a_tensor_a_tuple_a_list_or_a_mapping() -> None:
    x, scale = torch.zeros(2, 4), torch.ones(4)
    model = TwoArguments()
    alone = discover(model, x)
    assert alone == discover(model, (x,)) == discover(model, [x]) == discover(model, {"x": x}) == discover(model, x=x)
    gated = discover(model, x, scale)
    assert gated == discover(model, (x, scale)) == discover(model, [x, scale]) == discover(model, x, scale=scale)
    assert gated == discover(model, {"x": x, "scale": scale})
    assert alone.branches
    assert not gated.branches  # control: the second argument was passed, and gates the shortcut


ACTIVATIONS = {
    "relu": torch.relu,
    "clamp(min=0)": lambda y: y.clamp(min=0),
    "clamp(0)": lambda y: torch.clamp(y, 0.0),
    "clamp_min": lambda y: torch.clamp_min(y, 0),
    "maximum of zeros_like": lambda y: torch.maximum(y, torch.zeros_like(y)),
    "max of zeros": lambda y: torch.max(torch.zeros((), device=y.device), y),
    "y * sigmoid(y)": lambda y: y * torch.sigmoid(y),
    "sigmoid module": lambda y: nn.Sigmoid()(y) * y,
    "quick gelu": lambda y: y * torch.sigmoid(1.702 * y),
    "gelu by tanh": lambda y: 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * torch.pow(y, 3.0)))),
    "gelu by tanh, cube as a product": lambda y: 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * y * y * y))),
    "gelu by tanh, gate first": lambda y: (torch.tanh(0.8 * (y + 0.044715 * y**3)) + 1) * y / 2,
    "gelu by erf": lambda y: y * 0.5 * (1.0 + torch.erf(y / 2**0.5)),
    "gelu by sigmoid of a difference": lambda y: y * (1 - torch.sigmoid(-1.702 * y)),
    "through a module that does nothing": lambda y: y * torch.sigmoid(nn.Identity()(y)),
    "mish": lambda y: y * torch.tanh(nn.functional.softplus(y)),
    "softsign": nn.functional.softsign,
    "threshold": lambda y: nn.functional.threshold(y, 0.0, 0.0),
}
NO_ACTIVATIONS = {
    "clamp": lambda y: y.clamp(-1.0, 1.0),
    "clamp(min=-1)": lambda y: y.clamp(min=-1.0),
    "maximum of others": lambda y: torch.maximum(y, torch.full_like(y, -9.0)),
    "gate": lambda y: y * torch.sigmoid(y.roll(1, -1)),
    "square": lambda y: y * y,
    "polynomial": lambda y: y * (1 + 0.1 * y),
    "unbounded gate": lambda y: y * (y + torch.tanh(y)),
    "gate that grows": lambda y: y * (y * torch.sigmoid(y)),
    "gate of others": lambda y: y * torch.sigmoid(y.flatten(1).t().t().reshape(y.shape)),
}
GROWING = ("square", "polynomial", "unbounded gate", "gate that grows")


class Activated(Toy):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def middle(self, x: Tensor) -> Tensor:
        return x + self.second(self.function(self.first(x)))


@pytest.mark.parametrize("name", [*ACTIVATIONS, *NO_ACTIVATIONS])
def test_activation_written_by_hand_is_one(name: str) -> None:
    (branch,) = plan_of(Activated({**ACTIVATIONS, **NO_ACTIVATIONS}[name])).branches
    first, second = branch.layers
    assert (first.feeds_activation, second.reads_activation) == (name in ACTIVATIONS, name in ACTIVATIONS)
    assert branch.degree == (3 if name in GROWING else 2)


class ReadsList(Toy):
    def forward(self, both: list[Tensor]) -> Tensor:
        return super().forward(both[0] * both[1])

    middle = Identity.middle


def test_list_that_is_itself_an_argument_stands_in_a_tuple() -> None:
    both = [torch.ones(2, 4), torch.randn(2, 4)]
    assert len(discover(ReadsList(), (both,)).branches) == 1
    assert len(propagate(ReadsList(), (both,)).sums) == 1


class SideBySide(Toy):
    def middle(self, x: Tensor) -> Tensor:
        y = self.third(x)
        return x + (self.first(y) + self.second(torch.relu(y)))


def test_layers_side_by_side_on_one_shortcut_are_one_branch() -> None:
    (branch,) = plan_of(SideBySide()).branches
    assert [layer.name for layer in branch.layers] == ["third", "first", "second"]
    assert [layer.name for layer in branch.first_layers] == ["third"]
    assert [layer.name for layer in branch.last_layers] == ["first", "second"]
    assert (branch.shortcut, branch.degree) == ("identity", 2)


class OneByOne(Toy):
    """Three branches that read the same, added one after another; the first has a gate inside."""

    order = ("gated", "plain", "scaled")

    def gated(self, h: Tensor) -> Tensor:
        return self.first(h) * torch.sigmoid(self.second(h))

    def plain(self, h: Tensor) -> Tensor:
        return self.third(h)

    def scaled(self, h: Tensor) -> Tensor:
        return 0.5 * self.fourth(h)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fourth = nn.LayerNorm(4), nn.Linear(4, 4)

    def middle(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for name in self.order:
            x = x + getattr(self, name)(h)
        return x


@pytest.mark.parametrize("order", list(itertools.permutations(OneByOne.order)))
def test_branches_added_one_by_one_are_found_in_any_order(order: tuple[str, ...]) -> None:
    model = OneByOne()
    model.order = order
    layers = {"gated": ["first", "second"], "plain": ["third"], "scaled": ["fourth"]}
    plan = plan_of(model)
    assert layer_names(plan) == [(layers[name], "identity", []) for name in order]
    assert all(branch.first_layers[0] == branch.layers[0] for branch in plan.branches)
    assert not plan.body


class GatedSum(OneByOne):
    def middle(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return (x + self.plain(h)) * torch.sigmoid(self.first(h)) + self.scaled(h)


def test_earlier_sum_that_is_gated_is_no_shortcut() -> None:
    """The control of the one before: here the gate stands on the shortcut, not in a branch."""
    assert layer_names(plan_of(GatedSum())) == [(["third"], "identity", [])]


class Detour(Toy):
    """The second sum's shortcut comes out of the first one's branch."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.third(x + self.second(y))


def test_shortcut_from_inside_an_earlier_branch_is_an_identity() -> None:
    assert layer_names(plan_of(Detour())) == [(["first", "second"], "identity", []), (["third"], "identity", [])]


class ViewedShortcut(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return x.view(2, 2, 2).reshape(2, 4) + self.first(x)


def test_shortcut_that_only_changes_its_view_is_an_identity() -> None:
    assert layer_names(plan_of(ViewedShortcut())) == [(["first"], "identity", [])]


# What discovery must not do.


class Branching(Toy):
    def middle(self, x: Tensor) -> Tensor:
        return x + self.first(x) if x.sum().item() > 0 else x


def test_model_that_needs_values_is_run_on_them() -> None:
    """The example decides which way the model takes, and only that way is found."""
    model = Branching()
    with torch.no_grad():
        model.stem.weight.zero_()
        model.stem.bias.fill_(1.0)
    assert layer_names(plan_of(model)) == [(["first"], "identity", [])]
    with torch.no_grad():
        model.stem.bias.fill_(-1.0)
    assert not plan_of(model).branches
    assert not any(hooks(model))


class Counting(Branching):
    """Moves a buffer and draws a random number at every pass, and looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().middle(nn.functional.dropout(x, 0.5))


def test_run_on_values_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model, x, state = Counting(), torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.get_rng_state()
    before = x.clone()
    discover(model, x)
    assert model.calls == 0
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    model(x)  # control: a plain pass changes both
    assert model.calls == 1
    assert not torch.equal(torch.get_rng_state(), state)


def test_model_that_needs_values_and_gets_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Branching failed.*ResidualPlan") as caught:
        discover(Branching(), torch.zeros(2, 4, device="meta"))
    assert caught.value.__cause__ is not None


def test_example_of_the_wrong_shape_gets_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"Identity failed.*check the shape of the example"):
        discover(Identity(), torch.zeros(2, 5))


def hooks(model: nn.Module) -> list[int]:
    return [
        sum(len(table) for key, table in vars(module).items() if key.endswith(("_hooks", "_pre_hooks")))
        for module in model.modules()
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", ["batchnorm", "spectralnorm", "selu:dropout=0.5", "fixup"])
def test_discovery_leaves_the_model_as_it_was(method: str, training: bool) -> None:
    model = build("resnet8", method, generator=torch.Generator().manual_seed(0)).train(training)
    model.body[0].eval()
    model.register_forward_hook(lambda _m, _args, _out: None)
    twin = copy.deepcopy(model)
    x, generator = torch.randn(2, 3, 16, 16), torch.get_rng_state()
    values = x.clone()
    discover(model, x)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, values)
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert hooks(model) == hooks(twin)
    assert sum(hooks(model)) == 1
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    before, after = twin.state_dict(), model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Control: a plain forward pass in training mode moves the statistics of batch norm.
    if method == "batchnorm" and training:
        model(x)
        assert not torch.equal(model.stem.norm.running_mean, before["stem.norm.running_mean"])


def test_failed_discovery_leaves_no_hooks() -> None:
    for model, x in ((Branching(), torch.zeros(2, 4, device="meta")), (Identity(), torch.zeros(2, 5))):
        with pytest.raises(ValueError, match="failed"):
            discover(model, x)
        assert not any(hooks(model))
