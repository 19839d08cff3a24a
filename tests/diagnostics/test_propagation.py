"""The measured signal against plain autograd and numpy, and the model as it was before."""

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics.diagnosis import diagnose
from normfree.diagnostics.propagation import propagate
from normfree.models import Network, build
from normfree.nn.residual import Residual
from signal_oracles import (
    EXACT,
    Triple,
    TwoSums,
    agree,
    close,
    foreign,
    kept,
    labels,
    measured,
    noise,
    own,
    refuse,
    seeded,
)


def own_pass(model: Network, x: Tensor) -> tuple[list[Triple], Tensor, Tensor]:
    """The forward pass of one of our models, written out block by block: triples, features and logits."""
    triples: list[Triple] = []
    x = model.stem(x)
    for block in (m for m in model.body.modules() if isinstance(m, Residual)):
        entered = block.entry(block.alpha(x))
        shortcut = block.a(block.shortcut(entered if block.shortcut_reads_entry else x))
        assert block.branch is not None
        branch = block.beta(block.branch(entered))
        x = block.exit(block.c(block.delta(shortcut + branch)))
        kept(x, branch, shortcut)
        triples.append((x, branch, shortcut))
    (features,) = kept(model.head(x))
    return triples, features, model.classifier(features)


OWN = [
    ("resnet8", "he_in", None),
    ("resnet8", "batchnorm", None),
    ("resnet8", "he_in", "pre"),
    ("wrn-10-1", "he_in", None),
    ("wrn-10-1", "convshort", None),
    ("wrn-10-1", "nf", None),
    ("resnet8", "wn", None),
    ("resnet8", "he_in", "linear"),
    ("resnet8", "groupnorm", None),
    ("resnet8", "learnscalar", None),
    ("preact_resnet18", "isograd", None),
    ("resmlp-4-16", "he_in", None),
]


@pytest.mark.parametrize(("name", "method", "form"), OWN)
def test_own_model_signal_is_that_of_autograd(name: str, method: str, form: str | None) -> None:
    x = seeded(4, 3, 16, 16)
    model = own(name, method, x, form=form)
    signal = propagate(model, x, labels(4))
    triples, _, logits = own_pass(model, x)
    loss = F.cross_entropy(logits, labels(4))
    loss.backward()
    agree(signal, triples)
    assert signal.injected == ""
    assert signal.loss == pytest.approx(loss.item(), rel=EXACT)
    assert [s.name for s in signal.sums] == [b.name for b in model.plan.branches]
    assert [s.transition for s in signal.sums] == [b.position.transition for b in model.plan.branches]


def test_own_model_form_is_what_was_asked_for() -> None:
    """The three forms above differ, so that each of them tests something of its own."""
    x = seeded(2, 3, 16, 16)
    forms = {own(name, method, x, form=form).form for name, method, form in OWN}
    assert forms == {"post", "pre", "linear"}


def test_random_gradient_is_put_on_the_output() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    signal = propagate(model, x)
    triples, _, logits = own_pass(model, x)
    logits.backward(noise(logits))
    agree(signal, triples)
    assert signal.injected == "output"
    assert math.isnan(signal.loss)


def test_random_gradient_follows_the_generator() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    first, again, other = (
        propagate(model, x, generator=torch.Generator().manual_seed(seed)).series("sum_gradient") for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_given_loss_replaces_cross_entropy() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    target = seeded(4, 10, seed=5)
    signal = propagate(model, x, target, loss=lambda output, wanted: (output - wanted).square().sum())
    triples, _, logits = own_pass(model, x)
    (logits - target).square().sum().backward()
    agree(signal, triples)


def test_given_loss_needs_no_targets() -> None:
    x = seeded(8, 6)
    signal = propagate(foreign(TwoSums), x, loss=lambda output, targets: output.square().sum() + (targets or 1.0))
    model = foreign(TwoSums)
    triples: list[Triple] = []
    value = model(x, triples).square().sum()
    for triple in triples:
        kept(*triple)
    value.backward()
    agree(signal, triples)
    assert (signal.injected, signal.loss) == ("", pytest.approx(float(value.detach()) + 1.0))


@pytest.mark.parametrize("targets", [None, labels(4)], ids=["no loss", "loss"])
def test_zero_classifier_gets_its_gradient_at_the_features(targets: Tensor | None) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "fixup", x)
    assert not model.classifier.weight.any()
    signal = propagate(model, x, targets)
    triples, features, _ = own_pass(model, x)
    features.backward(noise(features))
    agree(signal, triples)
    assert signal.injected == "features"
    assert all(value > 0 for value in signal.series("sum_gradient"))
    assert math.isnan(signal.loss) == (targets is None)


def test_zero_classifier_would_stop_the_gradient() -> None:
    """The control: without the injection every gradient inside is zero."""
    x = seeded(4, 3, 16, 16)
    triples, _, logits = own_pass(own("resnet8", "fixup", x), x)
    F.cross_entropy(logits, labels(4)).backward()
    assert all(not total.grad.any() for total, _, _ in triples if total.grad is not None)


def test_zero_classifier_keeps_the_gradient_of_its_own_loss() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "fixup", x)
    signal = propagate(model, x, labels(4))
    F.cross_entropy(model(x), labels(4)).backward()
    assert model.classifier.weight.grad is not None
    last = signal.layers[-1]
    assert last.name == "classifier"
    assert last.gradient_norm == pytest.approx(model.classifier.weight.grad.norm().item(), rel=EXACT)
    assert last.weight_norm == 0
    assert last.ratio == math.inf


def test_encoder_behind_silent_attentions_gets_a_gradient_of_its_own() -> None:
    words = torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    model = build("transformer-2-2-16-32-2", "fixup", num_classes=50, dropout=0.0)
    signal = propagate(model, (words, words))
    assert signal.injected == "output, memory"
    assert all(value > 0 for value in signal.series("sum_gradient"))


def test_four_layers_in_a_row_are_no_attention() -> None:
    x = seeded(4, 3, 8, 8)
    signal = propagate(own("resmlp-4-32-4", "fixup", x), x)
    assert signal.injected == "features"
    assert len({s.branch_gradient.variance for s in signal.sums}) == 1  # of the one gradient that was put in


class Multiplied(TwoSums):
    """Its classifier is a parameter of its own, which no module is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        return super().forward(x, seen) @ self.projection


@pytest.mark.parametrize("zero", [False, True])
def test_classifier_that_is_a_parameter_is_measured(zero: bool) -> None:
    model, x = foreign(Multiplied), seeded(8, 6)
    if zero:
        nn.init.zeros_(model.get_parameter("projection"))
    signal = propagate(model, x)
    assert signal.injected == "output"
    assert {s.name: s.weight_norm for s in signal.layers}["projection"] == pytest.approx(
        float(model.get_parameter("projection").detach().norm())
    )
    assert all((value == 0) is zero for value in signal.series("sum_gradient"))


class Named(nn.Module):
    """Two inputs, and an output in whatever wrapping."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.model = TwoSums()
        self.wrap = wrap

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.wrap(self.model(left - right))


@pytest.mark.parametrize("kind", ["mapping", "tuple", "list"])
def test_several_inputs_are_handed_on(kind: str) -> None:
    model, left, right = foreign(Named), seeded(8, 6), seeded(8, 6, seed=2)
    inputs: Any = {"mapping": {"right": right, "left": left}, "tuple": (left, right), "list": [left, right]}[kind]
    expected = propagate(model.get_submodule("model"), left - right)
    found = propagate(model, inputs)
    assert found.series("sum") == expected.series("sum")
    assert found.series("sum_gradient") == expected.series("sum_gradient")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"aux": None, "out": out, "other": out.detach()},
        lambda out: (None, out),
        lambda out: [out.argmax(1), out],
        lambda out: SimpleNamespace(loss=None, logits=out),
        lambda out: {"aux": out.detach().exp(), "logits": out},
    ],
    ids=["dict", "tuple", "list after integers", "logits", "logits by name"],
)
def test_output_is_found_in_its_wrapping(wrap: Callable[[Tensor], Any]) -> None:
    inputs = (seeded(8, 6), seeded(8, 6, seed=2))
    plain = propagate(foreign(Named), inputs, labels(8, 3))
    assert propagate(foreign(lambda: Named(wrap)), inputs, labels(8, 3)).sums == plain.sums


@pytest.mark.parametrize(
    "wrap", [lambda out: None, lambda out: "text", lambda out: {"n": 1}, lambda out: out.argmax(1)]
)
def test_output_without_numbers_is_refused(wrap: Callable[[Tensor], Any]) -> None:
    refuse("expected an output that is or holds a tensor", foreign(lambda: Named(wrap)), (seeded(8, 6), seeded(8, 6)))


class SeveralOutputs(TwoSums):
    """Two heads, on its first and its last sum, in whatever order and wrapping."""

    def __init__(self, wrap: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.aux = nn.Linear(6, 3)
        self.wrap = wrap

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Any:
        x = self.stem(x)
        first = x + self.first(x.relu())
        return self.wrap(self.aux(first), first, self.out(first + self.second(first.relu())))


WRAPPINGS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "tuple": (lambda aux, first, out: (aux, out), "aux out"),
    "list": (lambda aux, first, out: [out, aux.argmax(1), aux], "out aux"),
    "nested": (lambda aux, first, out: {"deep": [{"out": out}], "aux": [aux]}, "out aux"),
    "object": (lambda aux, first, out: SimpleNamespace(aux=aux, logits=out), "out aux"),
    "features": (lambda aux, first, out: (first, out), "out"),
    "cache": (lambda aux, first, out: {"logits": out, "cache": [(first,)]}, "out"),
    "detached": (lambda aux, first, out: (out, aux.detach()), "out"),
    "same": (lambda aux, first, out: (out, out), "out"),
    "not finite": (lambda aux, first, out: (out, aux / 0), "out"),
}


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_random_gradient_is_put_on_every_output_that_feeds_no_other(kind: str) -> None:
    wrap, heads = WRAPPINGS[kind]
    x = seeded(8, 6)
    signal = propagate(foreign(lambda: SeveralOutputs(wrap)), x)
    model = foreign(lambda: SeveralOutputs(lambda aux, first, out: {"aux": aux, "first": first, "out": out}))
    outputs = model(x)
    outputs["first"].retain_grad()
    source = torch.Generator().manual_seed(0)
    ends = [outputs[name] for name in heads.split()]
    torch.autograd.backward(ends, [torch.randn(t.shape, generator=source).to(t) for t in ends])
    close(signal.sums[0].sum_gradient, measured(outputs["first"].grad), EXACT)
    assert signal.injected == ("outputs" if len(ends) > 1 else "output")


@pytest.mark.parametrize("order", [1, -1])
def test_network_with_two_heads_is_as_healthy_as_each_of_them(order: int) -> None:
    """With a loss of one head only, the report names the other; then the gradient does not reach the second sum."""
    x, y = seeded(16, 6), labels(16, 3)
    model = foreign(lambda: SeveralOutputs(lambda aux, first, out: (aux, out)[::order]))
    plain = diagnose(model, x)
    assert plain.verdict.is_healthy
    assert "a random gradient was injected at every output that feeds no other output" in str(plain)
    both = diagnose(model, x, y, loss=lambda o, t: F.cross_entropy(o[0], t) + F.cross_entropy(o[1], t))
    assert both.verdict.is_healthy
    note = "the cross-entropy reads one of 2 outputs"
    assert note not in str(plain) + str(both)
    assert note in str(diagnose(model, x, y))
    assert note not in str(diagnose(foreign(TwoSums), x, y))


def test_output_without_tensor_is_measured_with_a_loss() -> None:
    model = foreign(lambda: Named(lambda out: {"deep": {"deeper": out}}))
    inputs = (seeded(8, 6), seeded(8, 6, seed=2))
    expected = propagate(foreign(Named), inputs, labels(8, 3))
    found = propagate(
        model, inputs, labels(8, 3), loss=lambda out, wanted: F.cross_entropy(out["deep"]["deeper"], wanted)
    )
    assert found.sums == expected.sums


@pytest.mark.parametrize(("name", "method"), [("resnet8", "batchnorm"), ("wrn-10-1", "he_in")])
def test_bfloat16_model_is_measured_in_wider_numbers(name: str, method: str) -> None:
    x = seeded(4, 3, 16, 16, dtype=torch.bfloat16)
    model = own(name, method, x)
    signal = propagate(model, x)
    triples, _, logits = own_pass(model, x)
    logits.backward(noise(logits))
    agree(signal, triples, 1e-5)  # in bf16 the numbers themselves would be off by 4e-3
    weight = model.classifier.weight.detach()
    assert signal.layers[-1].weight_norm == pytest.approx(weight.double().norm().item(), rel=1e-6)
    assert weight.norm().item() != pytest.approx(weight.double().norm().item(), rel=1e-6)


def test_autocast_is_respected() -> None:
    x = seeded(4, 3, 16, 16, dtype=torch.float32)
    model = own("wrn-10-1", "he_in", x)
    with torch.autocast("cpu", torch.bfloat16):
        signal = propagate(model, x)
        triples, _, logits = own_pass(model, x)
    assert logits.dtype == torch.bfloat16
    logits.backward(noise(logits))
    agree(signal, triples, 1e-5)


def test_evaluation_mode_is_respected() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x).eval()
    signal = propagate(model, x, labels(4))
    triples, _, logits = own_pass(model, x)
    F.cross_entropy(logits, labels(4)).backward()
    agree(signal, triples)
    assert signal.series("sum") != propagate(model.train(), x, labels(4)).series("sum")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients_gets_them_measured(context: Callable[[], Any]) -> None:
    model = foreign(TwoSums)
    expected = propagate(model, seeded(8, 6))
    with context():
        assert propagate(model, seeded(8, 6)).sums == expected.sums


@pytest.mark.parametrize("frozen", ["all", "stem", "all but the classifier"])
def test_frozen_parameters_do_not_stop_the_signal(frozen: str) -> None:
    model, x = foreign(TwoSums), seeded(8, 6)
    expected = propagate(model, x, labels(8, 3))
    for name, p in model.named_parameters():
        chosen = {"all": True, "stem": name.startswith("stem"), "all but the classifier": not name.startswith("out")}
        p.requires_grad_(not chosen[frozen])
    flags = [p.requires_grad for p in model.parameters()]
    assert not all(flags)
    found = propagate(model, x, labels(8, 3))
    assert (found.sums, found.layers) == (expected.sums, expected.layers)
    assert [p.requires_grad for p in model.parameters()] == flags


def test_model_without_layers_is_refused() -> None:
    refuse("expected a network with residual sums or weight layers, got", nn.ReLU(), torch.randn(4, 4))
    refuse("expected a network with residual sums or weight layers", nn.Sequential(nn.Flatten()), torch.randn(4, 4))


def test_meta_device_is_refused() -> None:
    model = build("resnet8", "he_in", device="meta")
    refuse("expected a model with values, got parameters on the meta device", model, torch.randn(2, 3, 32, 32))


def test_stated_plan_is_kept_while_the_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "convshort", x)
    plan = propagate(model, x).plan
    assert plan == model.plan
    assert propagate(model, x).plan is plan
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    assert propagate(model.eval(), x).plan is plan


@pytest.mark.parametrize("change", ["layer", "activation", "setting", "block"])
def test_stated_plan_follows_the_model(change: str) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "convshort", x)
    before = propagate(model, x).plan
    blocks = [m for m in model.body.modules() if isinstance(m, Residual)]
    if change == "layer":
        model.stem = nn.Sequential(model.stem, nn.Conv2d(16, 16, 1, dtype=x.dtype))
    elif change == "activation":
        blocks[0].entry = nn.Identity()
    elif change == "setting":
        blocks[1].shortcut_reads_entry = not blocks[1].shortcut_reads_entry
    else:
        del model.body[-1]
        model.classifier = nn.Linear(32, 10, dtype=x.dtype)
    after = propagate(model, x).plan
    assert after == model.plan
    assert after != before


def test_kept_plan_does_not_keep_the_model() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "he_in", x)
    propagate(model, x)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.gpu
def test_gpu_agrees_with_cpu() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x)
    here = propagate(model, x)
    state_before = torch.cuda.get_rng_state()
    there = propagate(model.cuda(), x.cuda())
    for part in ("sum", "branch", "shortcut", "sum_gradient", "branch_gradient", "shortcut_gradient"):
        assert there.series(part) == pytest.approx(here.series(part), rel=1e-6)
    assert torch.equal(torch.cuda.get_rng_state(), state_before)
