"""A converted model in other tools: private training with opacus, torch.export, ONNX."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normfree.conversion import convert

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet18(method: str) -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    model, _ = convert(torchvision.models.resnet18(num_classes=4), method, IMAGES)
    with torch.no_grad():
        for p in (
            p for p in model.parameters() if p.requires_grad
        ):  # else the branches are 0 and every answer is right
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["fixup", "hanin", "nf", "wn"])
def test_converted_model_trains_privately(method: str) -> None:
    opacus = pytest.importorskip("opacus")
    model = resnet18(method).train()
    assert opacus.validators.ModuleValidator.validate(model, strict=True) == []
    data = torch.utils.data.TensorDataset(IMAGES, torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    twin = copy.deepcopy(model)
    before = dict(twin.named_parameters())
    private, optimizer, _ = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    F.cross_entropy(private(IMAGES), torch.arange(4)).backward()
    learning = {name: p for name, p in private._module.named_parameters() if p.requires_grad}
    samples = {name: p.grad_sample for name, p in learning.items()}
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in learning.items())
    # Gradients of single samples, scalars too, are those that a batch of one gives.
    F.cross_entropy(twin(IMAGES[:1]), torch.arange(1)).backward()
    for name, p in ((name, p) for name, p in twin.named_parameters() if p.requires_grad):
        torch.testing.assert_close(samples[name][0], p.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_converted_model_is_exported(method: str) -> None:
    model = resnet18(method).eval()
    exported = torch.export.export(model, (IMAGES,))
    torch.testing.assert_close(exported.module()(IMAGES), model(IMAGES))


@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_converted_model_is_one_graph(method: str) -> None:
    model = resnet18(method).eval().layer1
    signal = torch.randn(2, 64, 4, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(signal), model(signal))


def test_converted_attention_is_one_graph() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tokens = torch.randn(2, 5, 8)
    model, _ = convert(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 4)), "fixup", tokens)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["fixup", "nf"])
def test_converted_model_runs_in_onnxruntime(method: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = resnet18(method).eval()
    torch.onnx.export(model, (IMAGES,), dynamo=True, verbose=False).save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (out,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(IMAGES).detach(), atol=1e-5, rtol=1e-4)
