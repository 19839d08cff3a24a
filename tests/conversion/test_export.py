"""Our models leave the library: export, ONNX, compilation, copies, processes, and differentially private training.

opacus needs nothing of us in its default mode ("hooks"), which differentiates layers it does not know by functorch, nor
in mode "functorch". Its mode "ew" knows no scalars, and it refuses layers that have both parameters and buffers:
spectral norm.
"""

import io
from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import onnxruntime
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from normfree.conversion import convert
from normfree.conversion.folding.inference_folding import fold_
from normfree.models import build
from normfree.models.third_party import create_model

METHODS = ("fixup", "wn", "nf")


def batch(count: int = 4, size: int = 16) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def network(method: str, *, folded: bool = False) -> nn.Module:
    """A small network with weights a method would not start from, so that no part of it is silent."""
    generator = torch.Generator().manual_seed(1)
    model = build("resnet8", method, num_classes=5, generator=generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if folded:
        fold_(model)
    return model


every_network = pytest.mark.parametrize(
    ("method", "folded"), [(method, folded) for method in METHODS for folded in (False, True)]
)


@every_network
def test_exported_program_computes_the_same(method: str, folded: bool) -> None:
    model, x = network(method, folded=folded), batch()
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("method", "folded"), [("fixup", False), ("fixup", True), ("nf", True)])
def test_onnx_computes_the_same(method: str, folded: bool) -> None:
    model, x = network(method, folded=folded), batch()
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(out, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    kinds = {node.op_type for node in program.model_proto.graph.node}
    assert ("Mul" in kinds) is (not folded)
    if folded:  # the pooling and the shortcut without weights besides
        assert kinds <= {"Pad", "Conv", "Relu", "Add", "Gemm", "ReduceMean", "Reshape", "Slice", "GlobalAveragePool"}


@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True])
def test_compiled_network_computes_the_same(folded: bool) -> None:
    model, x = network("fixup", folded=folded), batch()
    torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-4, atol=1e-5)


@every_network
def test_copy_computes_the_same_and_shares_nothing(method: str, folded: bool) -> None:
    model, x = network(method, folded=folded), batch()
    before = model(x)
    twin = deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)


@every_network
def test_state_dict_goes_to_a_network_of_the_same_kind(method: str, folded: bool) -> None:
    model, x = network(method, folded=folded), batch()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@every_network
def test_network_trains_in_processes(method: str, folded: bool) -> None:
    model, x = network(method, folded=folded), batch()
    wrapped = DistributedDataParallel(model)
    F.cross_entropy(wrapped(x), torch.arange(4)).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    F.cross_entropy(model(x), torch.arange(4)).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def private(model: nn.Module, x: Tensor, mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    data = DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=len(x))
    engine = PrivacyEngine()
    module, optimizer, _ = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    return module, optimizer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("method", ["fixup", "skipinit", "hanin", "wn", "nf", "idshort"])
def test_private_step_runs_with_the_gradient_of_every_sample(method: str, mode: str) -> None:
    """Gradients a sample are those of a batch of one, of scalars and reparametrized layers, too."""
    model, x = network(method).train(), batch()
    assert ModuleValidator.validate(model, strict=True) == []
    alone = deepcopy(model)
    F.cross_entropy(alone(x[2:3]), torch.tensor([2])).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    module, optimizer = private(model, x, mode)
    F.cross_entropy(module(x), torch.arange(4)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_sample[2], expected[name], rtol=1e-4, atol=1e-6)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_converted_model_takes_a_private_step() -> None:
    x = batch(2, 32)
    original = create_model("torchvision:resnet18")
    assert ModuleValidator.validate(original, strict=False)  # batch norm mixes samples
    model, _ = convert(original, method="fixup", example=x)
    assert ModuleValidator.validate(model, strict=True) == []
    module, optimizer = private(model, x, "hooks")
    F.cross_entropy(module(x), torch.arange(2)).backward()
    optimizer.step()
    assert module(x).isfinite().all()
