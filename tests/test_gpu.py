"""What must hold on a GPU too; run by hand with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from normfree.diagnostics.propagation import propagate
from normfree.methods import get, names
from normfree.models import build
from normfree.nn.residual import Residual, set_precision_

pytestmark = pytest.mark.gpu


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(batch: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=seeded())


RESIDUAL = [name for name in names() if "residual" in get(name).skips]


@pytest.mark.parametrize("method", RESIDUAL)
def test_method_gives_one_network_on_every_device(method: str) -> None:
    on_cpu = build("resnet20", method, example=images(), generator=seeded())
    on_gpu = build("resnet20", method, example=images(), generator=seeded(), device="cuda")
    for a, b in zip(on_cpu.state_dict().values(), on_gpu.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b.cpu())


@pytest.mark.parametrize("method", RESIDUAL)
def test_method_learns_in_bf16_and_channels_last(method: str) -> None:
    model = build("resnet20", method, example=images(), generator=seeded(), device="cuda")
    model.to(memory_format=torch.channels_last)
    x = images(64).cuda().to(memory_format=torch.channels_last)
    y = torch.arange(64, device="cuda") % 10
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(x)
        return torch.nn.functional.cross_entropy(logits.float(), y)  # bf16 would round small steps away

    def step(rate: float) -> tuple[float, float]:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
                p.grad = None
        before = loss()
        before.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(rate * p.grad)
            return before.item(), loss().item()

    results = [step(10.0**-k) for k in range(7)]
    assert any(after < before for before, after in results), results


def test_propagation_equals_cpu() -> None:
    model = build("preact_resnet18", "nf", generator=seeded()).double()
    x = images().double()
    cpu = propagate(model, x)
    gpu = propagate(model.cuda(), x.cuda(), plan=cpu.plan)
    for part in ("sum", "branch", "shortcut", "sum_gradient"):
        assert gpu.series(part) == pytest.approx(cpu.series(part), rel=1e-6)


@pytest.mark.parametrize("method", ["nf", "fixup", "wn", "shao"])
def test_blocks_of_one_shape_share_one_compiled_program(method: str) -> None:
    """18 blocks of a stage differ in the values of their scalars only; a stage must not compile 18 times."""
    torch._dynamo.reset()
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        nonlocal compiled
        compiled += 1
        return graph

    model = build("resnet110", method, generator=seeded(), device="cuda")
    x = images(2).cuda()
    expected = model(x)
    for module in model.modules():
        if isinstance(module, Residual):
            module.compile(backend=backend, dynamic=False)
    torch.testing.assert_close(model(x), expected)
    assert compiled <= 8  # a first, a transition and a plain block in each of three stages, some of them alike


def test_ten_thousand_layers_keep_a_float32_stream() -> None:
    model = set_precision_(build("wrn-10000-1", "fixup:scalar_lr=1/L", generator=seeded(), device="cuda"))
    model.stem.float()
    kinds: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, Residual):
            module.register_forward_hook(lambda _m, _a, out: kinds.add(out.dtype))
    loss = torch.nn.functional.cross_entropy(model(images(2).cuda()), torch.tensor([0, 1], device="cuda"))
    loss.backward()
    assert kinds == {torch.float32}
    assert loss.item() == pytest.approx(2.302585, abs=1e-4)


def test_ten_thousand_layers_are_diagnosed_at_the_memory_of_a_plain_pass() -> None:
    model = build("wrn-10000-1", "wn", generator=seeded(), device="cuda")
    x = images(2).cuda()

    def peak(run: object) -> int:
        torch.cuda.reset_peak_memory_stats()
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def plain() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    baseline = peak(plain)
    measured = peak(lambda: propagate(model, x))
    # The plain pass holds all gradients at its end; the measurement throws each away as it comes.
    assert measured <= 1.05 * baseline
