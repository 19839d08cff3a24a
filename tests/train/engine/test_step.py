"""The training step against a plain loop of torch, its divergence, its state, and its capture on a GPU."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data.images.augment import Augmentation
from normfree.data.images.image_set import ImageBatch, ImageBatches, Split
from normfree.models import Network, build
from normfree.nn.weight_gradient_stream import use_side_stream_
from normfree.optim import agc_parameters, clip_grad_agc_, clip_grad_norm_, param_groups
from normfree.optim.master_weights import UpdateRule
from normfree.train.config import TrainConfig
from normfree.train.engine.forward import apply_precision_
from normfree.train.engine.step import TrainStep, cross_entropy

CLASSES, BATCH, LR, DECAY = 5, 8, 0.05, 0.01
FACTORS = (1.0, 0.5, 0.25)  # of the three steps of an epoch; exact in float32
MIXED = Augmentation(crop=1, flip=True, mixup=0.7)
SGD = UpdateRule(momentum=0.9, nesterov=True)
OPTIONS = ("momentum", "nesterov", "betas", "eps")
METHODS = ("fixup", "batchnorm", "nf", "wn")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(count: int = 24) -> Split:
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=seeded(count)).to(torch.uint8)
    return Split(images, torch.arange(count) % CLASSES)


def feed_of(augmentation: Augmentation = MIXED, **settings: Any) -> ImageBatches:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    return ImageBatches(split(), batch_size=BATCH, mean=mean, std=std, augmentation=augmentation, seed=3, **settings)


@cache
def built(method: str) -> Network:
    example = torch.randn(16, 3, 8, 8, generator=seeded(1))
    model = build("resnet8", method, num_classes=CLASSES, example=example, generator=seeded())
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # away from zero layers, which would hide errors behind them
            p.add_(0.02 * torch.randn(p.shape, generator=seeded(i)))
    return model


def make(method: str = "fixup") -> Network:
    return copy.deepcopy(built(method))


def step_of(
    model: nn.Module, feed: Any = None, rule: UpdateRule = SGD, precision: str = "float32", **settings: Any
) -> TrainStep:
    """A step of `model` with the groups of its method, ready at the start of epoch 0."""
    compile = settings.get("compile", False)
    optimizer = {"optimizer": rule.name, **{name: getattr(rule, name) for name in OPTIONS}}
    more = {name: settings.pop(name) for name in ("reduce", "unclipped") if name in settings}
    apply_precision_(model, precision)
    if compile:
        use_side_stream_(model)  # as a run does
    feed = feed_of() if feed is None else feed
    groups = param_groups(model, lr=LR, weight_decay=DECAY)
    step = TrainStep(model, groups, feed, TrainConfig(**optimizer, **settings), **more)
    step.start_epoch(0, (2 * FACTORS)[: feed.steps])
    return step


def advance(step: TrainStep, steps: int, start: int = 0) -> None:
    """Steps number `start` on of a run."""
    for number in range(start, start + steps):
        if number % step.feed.steps == 0:
            step.start_epoch(number // step.feed.steps, (2 * FACTORS)[: step.feed.steps])
        step()


def soft_loss(logits: Tensor, batch: ImageBatch, smoothing: float) -> Tensor:
    """The cross-entropy with the mixture of labels as its target."""
    target = F.one_hot(batch.labels, CLASSES).float()
    if batch.other is not None and batch.share is not None:
        target = batch.share * target + (1 - batch.share) * F.one_hot(batch.other, CLASSES)
    return F.cross_entropy(logits, target, label_smoothing=smoothing)


class Plain:
    """Training as one would write it with torch: model, optimizer, loop."""

    def __init__(
        self, model: Network, optimizer: type[torch.optim.Optimizer], smoothing: float = 0.0, **options: Any
    ) -> None:
        self.model, self.smoothing, self.parts = model, smoothing, 1
        self.groups = param_groups(model, lr=LR, weight_decay=DECAY)
        self.rates = [group["lr"] for group in self.groups]
        self.optimizer = optimizer(self.groups, **options)
        self.feed, self.losses, self.hits = feed_of(), [], []
        self.clip: Any = lambda: None

    def run(self, steps: int) -> None:
        for number in range(steps):
            epoch, place = divmod(number, self.feed.steps)
            self.feed.start_epoch(epoch)
            batch = self.feed.batch(torch.tensor(place))
            self.optimizer.zero_grad()
            loss, hits = 0.0, 0
            for i in range(self.parts):
                rows = slice(i, None, self.parts)
                piece = ImageBatch(*(t[rows] if t is not None and t.dim() else t for t in batch))
                logits = self.model(piece.inputs)
                part = soft_loss(logits, piece, self.smoothing) / self.parts
                part.backward()
                loss += part.item()
                hits += (logits.argmax(1) == piece.labels).sum().item()
            self.clip()
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * FACTORS[place]
            self.optimizer.step()
            self.losses.append(loss)
            self.hits.append(hits / BATCH)


def nesterov(model: Network, **options: Any) -> Plain:
    return Plain(model, torch.optim.SGD, momentum=0.9, nesterov=True, **options)


def assert_alike(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    """All parameters and buffers agree, each to `tolerance` of its largest number."""
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        size = theirs.double().abs().max().clamp_min(1e-2)
        assert (ours.double() - theirs.double()).abs().max() <= tolerance * size, name


def copies(step: TrainStep) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in step.state().items()}


def differing(step: TrainStep, state: dict[str, Tensor]) -> set[str]:
    now = step.state()
    assert now.keys() == state.keys()
    return {name for name in now if not torch.equal(now[name], state[name])}


# Against a plain loop


@pytest.mark.parametrize("method", METHODS)
def test_steps_equal_plain_training(method: str) -> None:
    ours = make(method)
    step = step_of(ours, label_smoothing=0.1)
    for steps, tolerance in ((1, 1e-6), (5, 1e-5)):
        advance(step, steps - int(step.good_steps), start=int(step.good_steps))
        plain = nesterov(make(method), smoothing=0.1)
        plain.run(steps)
        assert_alike(ours, plain.model, tolerance)
        assert int(step.good_steps) == steps
    assert float(step.loss_sum) == pytest.approx(sum(plain.losses), rel=1e-5)
    assert float(step.accuracy_sum) == pytest.approx(sum(plain.hits))
    assert float(step.accuracy_sum) > 0


@pytest.mark.parametrize(
    ("rule", "kind", "options"),
    [
        (UpdateRule(momentum=0.0), torch.optim.SGD, {}),
        (UpdateRule(name="adam", eps=1e-3), torch.optim.Adam, {"eps": 1e-3}),
        (UpdateRule(name="adamw", eps=1e-3), torch.optim.AdamW, {"eps": 1e-3}),
    ],
)
def test_steps_equal_plain_training_with_every_rule(
    rule: UpdateRule, kind: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    ours, plain = make("batchnorm"), Plain(make("batchnorm"), kind, **options)
    advance(step_of(ours, rule=rule), 5)
    plain.run(5)
    assert_alike(ours, plain.model, 1e-4)


@pytest.mark.parametrize("change", ["smoothing", "momentum", "factors", "decay", "order"])
def test_wrong_training_differs(change: str) -> None:
    """What the comparisons above must tell apart."""
    ours = make("nf")
    step = step_of(ours, label_smoothing=0.1)
    plain = nesterov(make("nf"), smoothing=0.0 if change == "smoothing" else 0.1)
    if change == "momentum":
        plain.optimizer.defaults["momentum"] = 0.0
        for group in plain.optimizer.param_groups:
            group["momentum"], group["nesterov"] = 0.0, False
    if change == "factors":
        plain.rates = [2 * rate for rate in plain.rates]
    if change == "decay":
        for group in plain.optimizer.param_groups:
            group["weight_decay"] = 0.0
    if change == "order":
        plain.feed.start_epoch = lambda epoch: ImageBatches.start_epoch(plain.feed, epoch + 1)  # type: ignore[method-assign]
    advance(step, 5)
    plain.run(5)
    with pytest.raises(AssertionError):
        assert_alike(ours, plain.model, 1e-5)


@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
@pytest.mark.parametrize("parts", [2, 8])
def test_accumulation_equals_a_loop_over_micro_batches(method: str, parts: int) -> None:
    ours, plain = make(method), nesterov(make(method))
    plain.parts = parts
    step = step_of(ours, accumulate=parts)
    advance(step, 4)
    plain.run(4)
    assert_alike(ours, plain.model, 1e-4 if method == "batchnorm" else 1e-5)  # statistics of very few numbers
    assert float(step.loss_sum) == pytest.approx(sum(plain.losses), rel=1e-4)
    assert float(step.accuracy_sum) == pytest.approx(sum(plain.hits))


def test_accumulation_changes_nothing_without_batch_statistics() -> None:
    whole, parts = make("fixup"), make("fixup")
    advance(step_of(whole), 4)
    advance(step_of(parts, accumulate=4), 4)
    assert_alike(parts, whole, 1e-5)


@pytest.mark.parametrize("clip", ["agc", "norm"])
@pytest.mark.parametrize("method", ["fixup", "wn"])
def test_clipping_equals_the_public_functions(clip: str, method: str) -> None:
    ours, plain = make(method), nesterov(make(method))
    clipped = {id(p) for p in agc_parameters(ours)}
    unclipped = tuple(name for name, p in ours.named_parameters() if id(p) not in clipped)
    advance(step_of(ours, clip=clip, clip_at=0.02, unclipped=unclipped), 4)
    if clip == "agc":
        plain.clip = lambda: clip_grad_agc_(plain.model, 0.02)
    else:
        plain.clip = lambda: clip_grad_norm_(plain.model, 0.02)
    plain.run(4)
    assert_alike(ours, plain.model, 1e-5)
    free = nesterov(make(method))
    free.run(4)
    with pytest.raises(AssertionError):
        assert_alike(ours, free.model, 1e-4)


def test_reduction_sees_gradient_loss_and_hits() -> None:
    """Two processes with the same batch, of which the other one's gradient is 0."""
    ours, alone = make("fixup"), make("fixup")
    rule = UpdateRule(momentum=0.0)
    halved = step_of(ours, rule=rule, reduce=lambda tensor: tensor.mul_(0.5))
    whole = step_of(alone, rule=rule)
    advance(halved, 1)
    advance(whole, 1)
    assert torch.equal(halved.masters.gradient, 0.5 * whole.masters.gradient)
    assert float(halved.loss_sum) == pytest.approx(0.5 * float(whole.loss_sum))
    assert float(halved.accuracy_sum) == pytest.approx(0.5 * float(whole.accuracy_sum))


def test_loss_of_a_mixed_batch_is_that_of_the_mixed_labels() -> None:
    logits = torch.randn(6, CLASSES, generator=seeded()).bfloat16()
    labels, other, share = torch.arange(6) % CLASSES, torch.arange(1, 7) % CLASSES, torch.tensor(0.3)
    for batch in (ImageBatch(logits, labels, other, share), ImageBatch(logits, labels, None, None)):
        loss = cross_entropy(logits, batch, 0.1)
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, soft_loss(logits.float(), batch, 0.1))


def test_moving_average_follows_its_formula() -> None:
    model, decay = make("batchnorm"), 0.4
    step = step_of(model, ema=decay)
    expected = step.masters.values.clone().double()
    for t in range(1, 7):
        advance(step, 1, start=t - 1)
        d = min(decay, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * step.masters.values.double()
        assert step.average is not None
        torch.testing.assert_close(step.average.double(), expected, rtol=1e-5, atol=1e-6)
    weights = step.masters.values.clone()
    assert not torch.allclose(step.average, weights, atol=1e-4)
    with step.averaged():
        assert torch.equal(step.masters.values, step.average)
        assert torch.equal(model.classifier.weight, step.masters.named(step.average)["classifier.weight"])
    assert torch.equal(step.masters.values, weights)
    with pytest.raises(KeyError), step.averaged():
        raise KeyError  # whatever happens inside, the weights come back
    assert torch.equal(step.masters.values, weights)
    plain = step_of(make("batchnorm"))
    with plain.averaged():
        assert plain.average is None


def test_sums_are_cleared_on_demand_only() -> None:
    step = step_of(make())
    advance(step, 4)
    before = float(step.loss_sum)
    step.start_epoch(2, FACTORS)
    assert float(step.loss_sum) == before > 0
    step.clear_metrics()
    assert float(step.loss_sum) == float(step.accuracy_sum) == 0


def test_factor_and_batch_are_those_of_the_step() -> None:
    model = make()
    step = step_of(model, rule=UpdateRule(momentum=0.0))
    for first in range(3):
        before = step.masters.values.clone()
        step.start_epoch(4, [0.0 if i == first else 1.0 for i in range(3)], first)
        step()
        assert torch.equal(step.masters.values, before)
        assert step.masters.gradient.any()
        feed = feed_of()
        feed.start_epoch(4)
        twin = copy.deepcopy(model)
        soft_loss(twin(feed.batch(torch.tensor(first)).inputs), feed.batch(torch.tensor(first)), 0.0).backward()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(step.masters.gradients[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
        if first < 2:
            step()  # the next one moves
            assert not torch.equal(step.masters.values, before)


class Listed:
    """A feed of given batches that come from the host."""

    capturable = False

    def __init__(self, batches: list[ImageBatch]) -> None:
        self.batches, self.steps, self.epoch = batches, len(batches), -1
        self.asked: list[Tensor] = []

    def start_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batch(self, step: Tensor) -> ImageBatch:
        self.asked.append(step)
        return ImageBatch(*(None if t is None else t.clone() for t in self.batches[int(step)]))


@pytest.mark.parametrize("augmentation", [Augmentation(), MIXED])
def test_feed_from_the_host_trains_alike(augmentation: Augmentation) -> None:
    source = feed_of(augmentation)
    source.start_epoch(0)
    listed = Listed([source.batch(torch.tensor(i)) for i in range(source.steps)])
    one, other = step_of(make("batchnorm"), feed_of(augmentation)), step_of(make("batchnorm"), listed)
    advance(one, 3)
    advance(other, 3)
    assert not differing(other, copies(one))
    assert [int(step) for step in listed.asked] == [0, 1, 2]
    # The tensor of the step is on the device, and would be waited for.
    assert all(step is not other.step_in_epoch for step in listed.asked)


@pytest.mark.parametrize("method", ["fixup", "batchnorm", "wn"])
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_short_types_train_close_to_float32(method: str, precision: str) -> None:
    """Master weights keep what a short type would round away: they move by almost as much, in almost that direction."""
    exact, short = make(method), make(method)
    feed = feed_of(dtype=torch.bfloat16) if precision == "bf16" else feed_of()
    one, other = step_of(exact), step_of(short, feed, precision=precision)
    start = one.masters.named(one.masters.values.clone())
    advance(one, 5)
    advance(other, 5)
    ours, theirs = other.masters.named(other.masters.values), one.masters.named(one.masters.values)
    moved = torch.cat([(theirs[name] - start[name]).flatten() for name in start])
    apart = torch.cat([(theirs[name] - ours[name]).flatten() for name in start])
    assert 0 < apart.norm() < 0.3 * moved.norm()
    computing = [p.detach().clone() for p in short.parameters()]
    assert any(p.dtype is torch.bfloat16 for p in computing)
    other.masters.copy_to_model_()  # nothing new
    assert all(torch.equal(p, q) for p, q in zip(short.parameters(), computing, strict=True))


# Divergence


def poisoned(where: str) -> tuple[Listed, dict[str, float]]:
    """Six batches of which the fourth lets the loss or the gradient diverge."""
    feed = feed_of(Augmentation())
    batches = []
    for epoch in range(2):
        feed.start_epoch(epoch)
        batches += [feed.batch(torch.tensor(i)) for i in range(3)]
    bad = batches[3].inputs.clone()
    if where != "limit":
        bad[0, 0, 0, 0] = {"nan": float("nan"), "inf": float("inf"), "gradient": 1.0}[where]
    labels = batches[3].labels
    batches[3] = ImageBatch(1e4 * bad if where == "limit" else bad, labels, None, None)
    return Listed(batches), {"loss_limit": 50.0} if where == "limit" else {}


@pytest.mark.parametrize(
    ("method", "where", "clip"),
    [
        ("fixup", "nan", "none"),
        ("fixup", "inf", "norm"),
        ("fixup", "limit", "none"),
        ("fixup", "gradient", "agc"),
        ("batchnorm", "nan", "norm"),
        ("batchnorm", "inf", "none"),
        ("batchnorm", "gradient", "norm"),
        ("spectralnorm", "nan", "agc"),
        ("spectralnorm", "limit", "none"),
        ("spectralnorm", "gradient", "none"),
    ],
)
def test_divergence_freezes_the_last_good_step(method: str, where: str, clip: str) -> None:
    feed, limit = poisoned(where)
    model = make(method)
    step = step_of(model, feed, precision="mixed", ema=0.9, clip=clip, clip_at=0.1, **limit)
    step.factors.fill_(0.1)
    for _ in range(3):
        step()
    assert step.alive
    state, weights = copies(step), {n: p.detach().clone() for n, p in model.named_parameters()}
    if where == "gradient":  # a finite loss with a gradient that is not
        handle = model.stem.conv.weight.register_hook(lambda g: torch.full_like(g, float("inf")))
    step()
    if where == "gradient":
        handle.remove()
        assert step.loss_sum.isfinite()
    assert not step.alive
    step()  # good batches come too late
    step()
    assert not step.alive
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    assert differing(step, state) <= {"loss_sum", "correct", *buffers}
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert int(step.good_steps) == 3
    assert int(step.step_in_epoch) == 6
    step.restore_(state)
    assert step.alive
    assert not differing(step, state)


def test_good_batches_keep_a_run_alive() -> None:
    feed, _ = poisoned("gradient")  # without the hook nothing is wrong
    step = step_of(make("batchnorm"), feed)
    step.factors.fill_(0.1)
    state = copies(step)
    for _ in range(6):
        step()
    assert step.alive
    assert int(step.good_steps) == 6
    assert {name for name in step.state() if name.startswith("model.") and name not in differing(step, state)} == set()


# State


@pytest.mark.parametrize("precision", ["float32", "bf16", "mixed"])
@pytest.mark.parametrize("method", ["fixup", "batchnorm", "spectralnorm"])
def test_state_has_the_models_names_and_continues_to_the_bit(method: str, precision: str) -> None:
    def fresh(model: Network) -> TrainStep:
        feed = feed_of(dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        return step_of(model, feed, UpdateRule(name="adam"), precision, ema=0.9)

    step = fresh(make(method))
    advance(step, 2)
    saved = copies(step)
    keys = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert keys == step.model.state_dict().keys()
    assert {t.dtype for name, t in saved.items() if name[:3] in ("mod", "mem", "ave")} <= {torch.float32, torch.int64}
    other = copy.deepcopy(built(method))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    resumed = fresh(other)
    resumed.restore_(saved)
    assert not differing(resumed, saved)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), resumed.model.parameters(), strict=True))
    resumed.start_epoch(0, FACTORS, 2)
    advance(step, 3, start=2)
    advance(resumed, 3, start=2)
    assert not differing(resumed, copies(step))


@pytest.mark.parametrize("wrong", ["missing", "more", "shape", "optimizer", "none"])
def test_wrong_state_is_refused_and_changes_nothing(wrong: str) -> None:
    step = step_of(make("batchnorm"), ema=0.9)
    advance(step, 2)
    state = {name: tensor + 1 for name, tensor in copies(step).items()}
    match wrong:
        case "missing":
            del state["model.classifier.bias"]
        case "more":
            state["model.classifier.extra"] = torch.zeros(3)
        case "shape":
            state["average.classifier.bias"] = torch.zeros(CLASSES + 1)
        case "optimizer":
            state = {name: tensor for name, tensor in state.items() if not name.startswith("memory")}
        case "none":
            state = {}
    before = copies(step)
    with pytest.raises(
        ValueError, match=r"expected the state of this model .*, got one that differs in '.*'.*; resume"
    ):
        step.restore_(state)
    assert not differing(step, before)


# On a GPU


def on_gpu(method: str, precision: str = "float32", **settings: Any) -> TrainStep:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    feed = feed_of(device="cuda", dtype=dtype)
    return step_of(make(method).cuda(), feed, precision=precision, ema=0.9, label_smoothing=0.1, **settings)


def assert_close_runs(ours: TrainStep, theirs: TrainStep, start: Tensor, tolerance: float) -> None:
    """Both moved alike: to `tolerance` of the way that the weights went, and of the loss."""
    moved = (theirs.masters.values - start).norm()
    assert moved > 0
    assert (ours.masters.values - theirs.masters.values).norm() <= tolerance * moved
    assert float(ours.loss_sum) == pytest.approx(float(theirs.loss_sum), rel=tolerance)
    assert int(ours.good_steps) == int(theirs.good_steps) == 10
    for mine, other in zip(ours.model.buffers(), theirs.model.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*METHODS, "spectralnorm"])
@pytest.mark.parametrize("clip", ["none", "agc"])
def test_captured_step_equals_the_eager_one(cuda: None, method: str, clip: str) -> None:
    eager, captured = (on_gpu(method, clip=clip, clip_at=0.05) for _ in range(2))
    start = eager.masters.values.clone()
    captured.capture()
    advance(eager, 10)
    advance(captured, 10)
    assert_close_runs(captured, eager, start, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
def test_captured_and_compiled_step_equals_the_eager_one(cuda: None, method: str) -> None:
    plain, eager, captured = (on_gpu(method, "bf16", compile=compiled) for compiled in (False, True, True))
    start = eager.masters.values.clone()
    captured.capture()
    for step in (plain, eager, captured):
        advance(step, 10)
    assert_close_runs(captured, eager, start, 1e-3)
    assert_close_runs(captured, plain, start, 0.3)  # compiled code rounds to bf16 less often


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("method", ["batchnorm", "spectralnorm"])
def test_capture_leaves_the_state_as_before(cuda: None, method: str, precision: str) -> None:
    step = on_gpu(method, precision, rule=UpdateRule(name="adam"))
    advance(step, 2)
    state, weights = copies(step), [p.detach().clone() for p in step.model.parameters()]
    step.capture()
    assert not differing(step, state)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), weights, strict=True))
    assert step.alive
    step()
    assert len(differing(step, state)) > 10


@pytest.mark.gpu
def test_captured_step_freezes_when_it_diverges(cuda: None) -> None:
    feed, _ = poisoned("nan")
    feed.batches = [ImageBatch(*(None if t is None else t.cuda() for t in batch)) for batch in feed.batches]
    step, eager = (step_of(make("batchnorm").cuda(), feed, ema=0.9) for _ in range(2))
    step.capture()
    for each in (step, eager):
        each.start_epoch(0, [0.1] * 6)
        for _ in range(3):
            each()
    start = step_of(make("batchnorm").cuda(), feed).masters.values
    assert (step.masters.values - eager.masters.values).norm() <= 1e-4 * (eager.masters.values - start).norm()
    assert step.alive
    state = copies(step)
    for _ in range(3):
        step()
    assert not step.alive
    buffers = {f"model.{name}" for name, _ in step.model.named_buffers()}
    assert differing(step, state) <= {"loss_sum", "correct", *buffers}
    assert int(step.good_steps) == 3


@pytest.mark.gpu
def test_batches_inside_a_graph_follow_the_epoch(cuda: None) -> None:
    step, feed = on_gpu("fixup"), feed_of(device="cuda")
    step.capture()
    seen = set()
    for epoch in (0, 3, 1):
        step.start_epoch(epoch, [0.0] * 3)  # the weights stay, so that a loss tells the batch
        feed.start_epoch(epoch)
        for place in range(3):
            step.clear_metrics()
            step()
            batch = feed.batch(torch.tensor(place, device="cuda"))
            with torch.no_grad():
                expected = soft_loss(step.model(batch.inputs), batch, 0.1)
            assert float(step.loss_sum) == pytest.approx(expected.item(), rel=1e-4)
            seen.add(round(expected.item(), 5))
    assert len(seen) == 9
