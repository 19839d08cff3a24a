"""Very deep networks: 10,000 layers within a minute and 3 GB, and nothing that recurses over depth."""

import copy
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import normfree
from normfree.models import Network, build
from normfree.optim import param_groups

# Time is the processor's and the thread is one, so that other work on the machine does not count: two cores only help.
DEEP = """
import json, resource, time
import torch
torch.set_num_threads(1)
from normfree.models import build

def peak():
    # ru_maxrss would begin with the memory of the process that started this one.
    try:
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        scale = 1 if __import__("sys").platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

def used():
    return {"seconds": time.process_time(), "bytes": peak()}

start = used()
model = build("wrn-10000-1", "fixup", generator=torch.Generator().manual_seed(0))
built = used()
x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
logits = model(x)
torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
done = used()
missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
convolutions = sum(isinstance(m, torch.nn.Conv2d) for m in model.modules())
print(json.dumps({"start": start, "built": built, "done": done, "missing": missing, "convolutions": convolutions,
    "branches": len(model.plan.branches), "largest": logits.abs().max().item(),
    "classifier": model.classifier.weight.grad.abs().max().item()}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_layers_build_within_a_minute_and_three_gigabytes() -> None:
    source = str(Path(normfree.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", DEEP], env=environment, capture_output=True, text=True, check=True)
    measured = json.loads(run.stdout)
    assert measured["built"]["seconds"] - measured["start"]["seconds"] < 60
    assert measured["built"]["bytes"] < 3e9
    assert (measured["branches"], measured["convolutions"]) == (3 * 1666, 1 + 6 * 1666 + 2)
    # A forward and a backward pass of two images run: Fixup starts at logits of 0, and the classifier learns first.
    assert measured["largest"] == 0.0
    assert not measured["missing"]
    assert measured["classifier"] > 0
    # Control: the peak is seen to move, since the passes keep what they need for the gradient.
    assert measured["done"]["bytes"] > measured["built"]["bytes"] + 5e7 > measured["start"]["bytes"] + 5e8


@contextmanager
def frames_left(count: int) -> Iterator[None]:
    """Allow only so many more nested calls."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


FRAMES = 300
BRANCHES = 600


@pytest.fixture(scope="module")
def chain() -> Network:
    """A network of 600 branches, built where only 300 calls may nest."""
    with frames_left(FRAMES):
        return build(f"resmlp-{BRANCHES}-4", "skipinit", size=2, generator=torch.Generator().manual_seed(0))


def test_plan_of_a_deep_network_needs_no_recursion(chain: Network) -> None:
    with frames_left(FRAMES):
        plan = chain.plan
        text, data = str(plan), plan.to_json()
    assert len(plan.branches) == len(data["branches"]) == BRANCHES
    assert plan.branches[-1].position.index == plan.branches[0].position.total == BRANCHES
    assert f"{BRANCHES} × [branch.linear1, branch.linear2] + identity" in text
    assert len(text.splitlines()) == 4


@pytest.mark.timeout(300)
def test_discovery_of_a_deep_network_needs_no_recursion(chain: Network) -> None:
    with frames_left(FRAMES):
        found = normfree.discover(chain, torch.zeros(2, 3, 2, 2))
    assert found == chain.plan


def test_forward_and_backward_of_a_deep_network_need_no_recursion(chain: Network) -> None:
    with frames_left(FRAMES):
        loss = chain(torch.ones(2, 3, 2, 2)).square().sum()
        gradients = torch.autograd.grad(loss, [chain.stem.linear.weight, chain.body[0][-1].beta.value])
    assert all(g.isfinite().all() and g.any() for g in gradients)


def test_groups_of_a_deep_network_need_no_recursion(chain: Network) -> None:
    with frames_left(FRAMES):
        groups = param_groups(chain, lr=0.1, method="fixup:scalar_lr=1/L")
    scalars = next(g for g in groups if g["name"] == "scalars")
    assert len(scalars["params"]) == BRANCHES + 1  # with the classifier's bias
    assert scalars["lr"] == pytest.approx(0.1 / BRANCHES)


def test_state_of_a_deep_network_needs_no_recursion(chain: Network) -> None:
    with frames_left(FRAMES):
        state = chain.state_dict()
        chain.load_state_dict(state)
    assert len(state) == len(list(chain.parameters()))


def test_deep_copy_needs_no_recursion() -> None:
    chain = build(f"resmlp-{2 * FRAMES}-4", "skipinit", size=2)
    with frames_left(FRAMES):
        twin = copy.deepcopy(chain)
    assert twin.plan == chain.plan
    x = torch.ones(2, 3, 2, 2)
    assert torch.equal(twin(x), chain(x))


def test_reinitialization_of_a_deep_network_needs_no_recursion(chain: Network) -> None:
    before = chain.stem.linear.weight.detach().clone()
    with frames_left(FRAMES):
        normfree.initialize_(chain, "skipinit", generator=torch.Generator().manual_seed(0))
    assert torch.equal(chain.stem.linear.weight, before)


def test_nested_modules_exceed_the_limit() -> None:
    """The control: a network that holds each layer inside the one before needs a call a layer."""
    nested: nn.Module = nn.Identity()
    for _ in range(FRAMES):
        nested = nn.Sequential(nested)
    with frames_left(FRAMES), pytest.raises(RecursionError):
        nested(torch.zeros(1))
    with frames_left(FRAMES), pytest.raises(RecursionError):
        copy.deepcopy(nested)
