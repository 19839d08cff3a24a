"""`propagate` restores the model, the caller's tensors and the random states."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from normfree.diagnostics.diagnosis import diagnose
from normfree.diagnostics.monitor import Monitor
from normfree.diagnostics.propagation import propagate
from normfree.graph import discover
from normfree.models import build
from normfree.nn.model_state import parts_of
from signal_oracles import Block, Composed, Shared, Triple, TwoSums, foreign, labels, leaves, own, seeded


class Worn(nn.Module):
    """Everything that a pass can leave its mark on: dropout, batch norm, buffers in place and replaced, a shared block.

    It keeps weak references to its activations, and stops halfway on request.
    """

    calls: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.block = Block()
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(6))
        self.seen: list[weakref.ref[Tensor]] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.dropout(self.norm(self.stem(x)))
        self.latest = x.detach().mean(0)
        self.seen.append(weakref.ref(x))
        x = self.block(x)
        self.seen.append(weakref.ref(x))
        if self.fails:
            raise KeyError("halfway")
        return self.out(self.block(x))  # type: ignore[no-any-return]


def worn(dtype: torch.dtype = torch.float32) -> Worn:
    model = foreign(Worn, dtype)
    assert isinstance(model, Worn)
    model.stem.register_forward_hook(lambda *_: None)
    model.out.register_full_backward_hook(lambda *_: None)
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    model.out.bias.requires_grad_(False)
    model.block.eval()  # modes differ
    model.norm.weight.register_hook(lambda g: None)
    return model


HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")]


def state(model: nn.Module) -> dict[str, Any]:
    """All that must be as before; objects by identity where they must be the same."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "hooks": {n: [list(getattr(m, hooks)) for hooks in HOOKS] for n, m in model.named_modules()},
        "tensor hooks": {
            n: (list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ()))  # type: ignore[attr-defined]
            for n, p in model.named_parameters()
        },
        "modes": {n: m.training for n, m in model.named_modules()},
        "gradients": {n: id(p.grad) if p.grad is not None else None for n, p in model.named_parameters()},
        "gradient values": {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None},
        "objects": {n: id(t) for n, t in tensors.items()},
        "values": {n: t.tolist() for n, t in tensors.items()},
        "flags": {n: t.requires_grad for n, t in tensors.items()},
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "function modes": len(_get_current_function_mode_stack()),
    }


def test_state_sees_every_kind_of_trace() -> None:
    """The control: a plain pass changes most of it."""
    assert len(HOOKS) >= 5
    model = worn()
    before = state(model)
    model(seeded(8, 6, dtype=torch.float32)).sum().backward()
    model.block.register_forward_hook(lambda *_: None)
    model.norm.eval()
    model.out.bias.requires_grad_(True)
    after = state(model)
    changed = {key for key in before if before[key] != after[key]}
    assert changed >= {"hooks", "modes", "gradients", "gradient values", "objects", "values", "flags", "random"}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_propagation_leaves_no_trace(fails: bool, training: bool) -> None:
    model = worn() if training else worn().eval()
    x = seeded(8, 6, dtype=torch.float32)
    plan = propagate(model, x).plan
    model.fails = fails
    before = state(model)
    if fails:
        with pytest.raises(KeyError, match="halfway"):
            propagate(model, x, plan=plan)
    else:
        propagate(model, x)
    assert state(model) == before
    gc.collect()
    assert model.seen
    assert all(tensor() is None for tensor in model.seen)


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-1"])
@pytest.mark.parametrize("method", ["fixup", "batchnorm", "spectralnorm", "wn"])
def test_propagation_leaves_no_trace_on_our_models(name: str, method: str) -> None:
    x = seeded(2, 3, 8, 8, dtype=torch.float32)
    model = own(name, method, x)
    before = state(model)
    propagate(model, x, labels(2))
    assert state(model) == before


def test_error_of_a_backward_pass_leaves_no_trace() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise KeyError("backward")

    model = worn()
    handle = model.stem.register_forward_hook(lambda _m, _a, out: Fails.apply(out))
    before = state(model)
    with pytest.raises(KeyError, match="backward"):
        propagate(model, seeded(8, 6, dtype=torch.float32))
    assert state(model) == before
    handle.remove()


class PostActivation(nn.Module):
    """A block whose sum goes through a ReLU, of which the graph keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(self.inner(self.norm(x)).relu())).relu()


class CheckpointedBlocks(nn.Module):
    """Keeps nothing of its blocks, or takes derivatives of them in its forward pass, or fails in the second run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.runs = kind, 0
        self.stem, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([PostActivation() for _ in range(3)])

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.runs += 1
        if self.kind == "fails" and self.runs > 3:
            raise KeyError("again")
        return block(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.kind == "plain" else checkpoint(self.run, block, x, use_reentrant=False)
        if self.kind == "differentiates":
            (slope,) = torch.autograd.grad(x.sum(), x, retain_graph=True, create_graph=True)
            self.stem.weight.grad = torch.autograd.grad(x.sum(), self.stem.weight, retain_graph=True)[0]
            x = x + 0 * slope
        return self.out(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "differentiates"])
def test_blocks_that_run_again_in_the_backward_pass_are_measured_once(kind: str) -> None:
    x, y = seeded(16, 6), labels(16, 3)
    expected = propagate(foreign(lambda: CheckpointedBlocks("plain")), x, y)
    model = foreign(lambda: CheckpointedBlocks(kind))
    before = state(model)
    found = diagnose(model, x, y).signal
    record = Monitor(model).step(x, y)
    assert state(model) == before
    assert [s.name for s in found.sums] == ["blocks.0", "blocks.1", "blocks.2"]
    for part in ("sum", "branch", "sum_gradient", "shortcut_gradient"):
        assert found.series(part) == pytest.approx(expected.series(part), rel=1e-12)
    assert record is not None
    assert record.forward == pytest.approx(expected.series("sum"), rel=1e-12)


def test_error_of_a_second_run_in_the_backward_pass_leaves_no_trace() -> None:
    model = foreign(lambda: CheckpointedBlocks("fails"))
    plan = discover(foreign(lambda: CheckpointedBlocks("plain")), seeded(16, 6))
    before = state(model)
    with pytest.raises(KeyError, match="again"):
        propagate(model, seeded(16, 6), plan=plan)
    assert state(model) == before


def test_optimizer_in_the_backward_pass_does_not_step() -> None:
    model = foreign(TwoSums)
    steps: list[Tensor] = []

    def step(p: Tensor) -> None:
        steps.append(p)
        with torch.no_grad():
            p.add_(1.0)

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    before = state(model)
    propagate(model, seeded(8, 6), labels(8, 3))
    assert state(model) == before
    assert not steps
    F.cross_entropy(model(seeded(8, 6)), labels(8, 3)).backward()
    assert len(steps) == len(handles)


def test_graph_of_the_caller_survives() -> None:
    """Batch norm in evaluation mode reads its buffers in the backward pass: they must not have been written."""
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x).eval()
    loss = F.cross_entropy(model(x), labels(4))
    propagate(model, x)
    loss.backward()


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "of a graph"])
def test_input_of_the_caller_gets_no_gradient(leaf: bool) -> None:
    source = seeded(8, 6).requires_grad_()
    x = source if leaf else source.square()
    expected = propagate(foreign(TwoSums), seeded(8, 6) if leaf else seeded(8, 6).square())
    assert propagate(foreign(TwoSums), x).sums == expected.sums
    assert source.grad is None
    assert not x._backward_hooks
    x.sum().backward()  # the caller's graph is still there


class Overwriting(TwoSums):
    """Scales its input in place, as preprocessing does."""

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        return super().forward(x.mul_(2.0), seen)


def test_input_of_the_caller_is_not_written_into() -> None:
    model, x = foreign(Overwriting), seeded(8, 6)
    first, again = propagate(model, x), propagate(model, x)
    assert first.sums == again.sums
    assert torch.equal(x, seeded(8, 6))


def test_sum_with_an_input_that_needs_a_gradient_leaves_no_hook() -> None:
    model, x = foreign(Block), seeded(8, 6).requires_grad_()
    signal = propagate(model, x)
    assert signal.sums[0].shortcut_gradient.variance > 0
    assert not x._backward_hooks
    assert x.grad is None


def test_measurements_repeat_exactly() -> None:
    """Dropout draws the same numbers, since the random state is as before."""
    model, x = worn(), seeded(8, 6, dtype=torch.float32)
    assert propagate(model, x).sums == propagate(model, x).sums


def test_thousand_blocks_leave_only_numbers() -> None:
    model = build("resmlp-1000-8", "fixup", generator=torch.Generator().manual_seed(0))
    signal = propagate(model, seeded(8, 3, 28, 28, dtype=torch.float32))
    assert len(signal.sums) == 1000
    assert {type(leaf) for leaf in leaves([signal.sums, signal.layers])} == {float, str, int, bool, type(None)}
    assert signal.series("sum")[-1] == pytest.approx(signal.series("sum")[0], rel=1e-4)  # branches begin at zero


def test_parts_have_the_names_of_torch() -> None:
    for model in (foreign(Composed), foreign(Shared), worn(), build("resnet8", "wn")):
        found = parts_of(model)
        assert list(found.modules.items()) == list(model.named_modules())
        assert list(found.parameters) == [name for name, _ in model.named_parameters()]
        assert all(found.parameters[name] is p for name, p in model.named_parameters())
