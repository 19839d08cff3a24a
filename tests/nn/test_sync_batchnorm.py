"""Batch norm over several processes against one process with the whole batch."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normfree.nn.sync_batchnorm import sync_batch_norms_, unsync_batch_norms_


class Team:
    """Threads that stand for processes: `sum_` waits for all, and gives each the sum of their tensors."""

    def __init__(self, world: int) -> None:
        self.world, self._barrier, self._parts = world, threading.Barrier(world, timeout=100), {}

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over the threads."""
        self._parts[threading.get_ident()] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(list(self._parts.values())).sum(0)
        if self._barrier.wait() == 0:
            self._parts.clear()
        self._barrier.wait()
        tensor.copy_(total)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The return values of the threads, by number."""
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=lambda r=rank: results.update({r: work(r)})) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(self.world)]


def passes(norm: nn.Module, batches: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and gradients of the inputs, γ and β, of a weighted sum of outputs over two steps."""
    x = batches.clone().requires_grad_()
    out = torch.stack([norm(part) for part in x])
    found = torch.autograd.grad((out * weights).sum(), [x, *norm.parameters()])
    return out.detach(), list(found)


def both(norm: nn.Module, x: Tensor, world: int, *, sync: bool = True) -> tuple[Any, Any, nn.Module, nn.Module]:
    """The passes of a batch norm on whole batches x (steps, N, C, …), and of `world` that share them."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    team = Team(world)
    copies = [copy.deepcopy(norm) for _ in range(world)]
    if sync:
        for replica in copies:
            sync_batch_norms_(replica, team.sum_, world)
    parts, weight_parts = x.chunk(world, 1), weights.chunk(world, 1)
    shared = team.run(lambda rank: passes(copies[rank], parts[rank], weight_parts[rank]))
    out = torch.cat([s[0] for s in shared], 1)
    of_x = torch.cat([s[1][0] for s in shared], 1)
    of_parameters = [torch.stack(g).sum(0) for g in zip(*(s[1][1:] for s in shared), strict=True)]
    return passes(norm, x, weights), (out, [of_x, *of_parameters]), norm, copies[0]


def largest(whole: Any, shared: Any) -> float:
    """The largest difference of outputs and gradients."""
    pairs = zip([whole[0], *whole[1]], [shared[0], *shared[1]], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def example(kind: type[nn.Module], *, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = {nn.BatchNorm1d: (2, 8, 3), nn.BatchNorm2d: (2, 8, 3, 4, 5), nn.BatchNorm3d: (2, 8, 3, 2, 3, 2)}[kind]
    norm = kind(3, **options).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)
    return norm, 3 * torch.randn(shape, generator=generator, dtype=dtype) + 5


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_shared_batch_norm_is_that_of_the_whole_batch(kind: type[nn.Module], world: int) -> None:
    norm, x = example(kind)
    whole, shared, plain, synced = both(norm, x, world)
    assert largest(whole, shared) < 1e-10
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(synced.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def test_unsynchronized_batch_norm_is_another() -> None:
    norm, x = example(nn.BatchNorm2d)
    whole, shared, _, _ = both(norm, x, 2, sync=False)
    assert largest(whole, shared) > 1e-2


@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_options_of_batch_norm_hold(options: dict[str, Any]) -> None:
    norm, x = example(nn.BatchNorm2d, **options)
    whole, shared, plain, synced = both(norm, x, 2)
    assert largest(whole, shared) < 1e-10
    assert list(synced.state_dict()) == list(plain.state_dict())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(synced.get_buffer(name), buffer)


def test_mean_far_from_zero_does_not_cancel() -> None:
    norm, x = example(nn.BatchNorm2d, dtype=torch.float32)
    _, shared, _, _ = both(norm, x + 3000, 2)
    exact, _ = passes(copy.deepcopy(norm).double(), (x + 3000).double(), torch.zeros_like(x).double())
    assert float((shared[0] - exact).abs().max()) < 1e-3  # E x² - μ² in float32 is off by a tenth of the variance


def test_bfloat16_input_keeps_its_type() -> None:
    norm, x = example(nn.BatchNorm2d, dtype=torch.float32)
    whole, shared, _, _ = both(norm, x.bfloat16(), 2)
    assert shared[0].dtype == torch.bfloat16
    assert shared[1][0].dtype == torch.bfloat16
    assert shared[1][1].dtype == torch.float32
    assert largest(whole, shared) < 0.05


def test_evaluation_asks_nobody() -> None:
    norm, x = example(nn.BatchNorm2d)
    expected = copy.deepcopy(norm).eval()(x[0])
    sync_batch_norms_(norm, lambda tensor: pytest.fail("asked"), 2)
    torch.testing.assert_close(norm.eval()(x[0]), expected)


def test_one_value_a_process_is_enough_and_one_in_all_is_not() -> None:
    norm = nn.BatchNorm1d(3)
    _, shared, _, _ = both(norm, torch.randn(1, 2, 3), 2)
    assert bool(torch.isfinite(shared[0]).all())
    sync_batch_norms_(norm, lambda tensor: None, 1)
    with pytest.raises(ValueError, match="more than one value"):
        norm(torch.randn(1, 3))


def test_modules_stay_and_become_plain_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.GroupNorm(1, 3))
    norm, names = model[1], list(model.state_dict())
    sync_batch_norms_(model, lambda tensor: None, 2)
    assert model[1] is norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert type(norm) is not nn.BatchNorm2d
    assert list(model.state_dict()) == names
    kind = type(norm)
    sync_batch_norms_(model, lambda tensor: None, 2)  # a second time changes nothing
    assert type(norm) is kind
    unsync_batch_norms_(model)
    assert type(norm) is nn.BatchNorm2d
    assert vars(norm).keys() == vars(nn.BatchNorm2d(3)).keys()
    assert [type(module) for module in model] == [nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm]


def test_batch_norm_with_a_forward_of_its_own_is_refused() -> None:
    class Rectified(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    with pytest.raises(ValueError, match="Rectified at '1'"):
        sync_batch_norms_(nn.Sequential(nn.Identity(), Rectified(3)), lambda tensor: None, 2)
