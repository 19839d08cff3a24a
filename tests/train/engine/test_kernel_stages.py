"""The choice of blocks that run by the stage kernels, and their stacks, with the plain equation for a kernel."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.kernels.tiling import why_not_shape
from normfree.methods import get, names
from normfree.models import Network, build
from normfree.optim.master_weights import MasterWeights
from normfree.train import RunFolder, TrainConfig, fit
from normfree.train.config import NOT_IN_FINGERPRINT
from normfree.train.engine import kernel_stages, step
from normfree.train.engine.forward import forward_of
from normfree.train.engine.kernel_stages import StageChoice, choose_stages
from normfree.train.engine.setup import parameter_groups
from stage_oracle import equation
from tiny_images import tiny_images

CPU = torch.device("cpu")
NORM_FREE = [name for name in names() if get(name).norm is None and "residual" in get(name).skips]
# What of a method has no kernel, by its name; every other method runs.
REFUSED = {
    "convshort": "shortcuts are not the identity",
    "convshort_brock": "shortcuts are not the identity",
    "spectralnorm": "spectral norm",
    "selu": "SELU",
    "normprop": "NormPropReLU",
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=seeded(5))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the equation in plain PyTorch take the place of the kernels, for the shapes that they have."""
    monkeypatch.setattr(kernel_stages, "why_not", lambda c, s, form, device: why_not_shape(c, s, form))
    monkeypatch.setattr(kernel_stages, "stage", equation)


def make(name: str, method: str, form: str | None = None) -> Network:
    model = build(name, method, form=form, num_classes=5, example=images(8), generator=seeded())  # type: ignore[arg-type]
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # away from zero layers, behind which all gradients vanish
            p.add_(0.05 * torch.randn(p.shape, generator=seeded(i)))
    return model  # type: ignore[return-value]


def choose(model: nn.Module, count: int = 2, **settings: object) -> StageChoice:
    config = TrainConfig(precision="mixed").with_changes(**settings)
    return choose_stages(model, config, CPU, count)


def attached(model: Network, choice: StageChoice, *, channels_last: bool = True) -> MasterWeights:
    groups = parameter_groups(model, TrainConfig())
    listed = [stack for stage in choice.stages for stack in stage.stacks()]
    masters = MasterWeights(model, groups, channels_last=channels_last, stacks=listed)
    stacks = iter(masters.stacks)
    for stage in choice.stages:
        stage.attach_([next(stacks) for _ in stage.stacks()])
    return masters


def forward(model: Network, choice: StageChoice) -> object:
    return forward_of(model, stages=choice.stages)


def loss(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(len(out)))


@pytest.mark.parametrize("method", [*NORM_FREE, "fixup/pre", "fixup/linear", "he_out/pre"])
def test_stacks_compute_what_the_blocks_compute(method: str) -> None:
    """Output and every gradient, for every method without normalizers, or the reason why not."""
    method, _, form = method.partition("/")
    model = make("resnet14", method, form or None)
    choice = choose(model)
    if method in REFUSED:
        assert not choice.stages
        assert REFUSED[method] in choice.explain()
        return
    assert [len(stage.parts) for stage in choice.stages] == [2, 1, 1], choice.explain()
    reference = copy.deepcopy(model)
    expected = reference(images())
    loss(expected).backward()
    masters = attached(model, choice)
    out = forward(model, choice)(images())  # type: ignore[operator]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    loss(out).backward()
    masters.gather_gradients_()
    masters.unfold_gradients_()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(masters.gradients[name], parameter.grad, rtol=1e-3, atol=2e-5, msg=name)


def test_a_change_of_the_vector_changes_the_stage() -> None:
    """A planted error in one weight of one block is seen, so the stack holds the weights in the right order."""
    model = make("resnet14", "fixup")
    choice = choose(model)
    masters = attached(model, choice)
    run = forward(model, choice)
    before = run(images())  # type: ignore[operator]
    masters.named(masters.values)["body.0.1.branch.conv2.weight"][3, 5, 1, 2] += 1
    assert not torch.allclose(run(images()), before)  # type: ignore[operator]
    torch.testing.assert_close(run(images()), model(images()), rtol=1e-4, atol=1e-4)  # type: ignore[operator]


def test_micro_batches_add_their_gradients() -> None:
    model = make("resnet14", "nf")
    choice = choose(model)
    masters = attached(model, choice)
    run = forward(model, choice)
    total: dict[str, Tensor] = {}
    for i in range(2):
        loss(run(images()[i : i + 1])).backward()  # type: ignore[operator]
        masters.gather_gradients_(add=i > 0)
        if i == 0:
            total = {name: g.clone() for name, g in masters.gradients.items()}
    loss(run(images()[1:])).backward()  # type: ignore[operator]
    both = {name: g.clone() for name, g in masters.gradients.items()}
    masters.gather_gradients_()
    for name, g in masters.gradients.items():
        torch.testing.assert_close(total[name] + g, both[name])


def test_a_missing_gradient_counts_as_zero() -> None:
    model = make("resnet14", "fixup")
    masters = attached(model, choose(model))
    masters.gradient.fill_(1.0)
    masters.gather_gradients_()
    assert not any(gradient.any() for gradient in masters.gradients.values())


def test_released_model_is_an_ordinary_one() -> None:
    model = make("resnet14", "wn")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    masters = attached(model, choose(model))
    masters.release_()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
        assert value.is_contiguous()


def test_fixed_scalars_are_read_again() -> None:
    model = make("resnet14", "nf")
    choice = choose(model)
    attached(model, choice)
    run = forward(model, choice)
    for stage in choice.stages:
        for block in stage.blocks:
            block.beta.set_(0.7)  # type: ignore[operator, union-attr]
    assert not torch.allclose(run(images()), model(images()))  # type: ignore[operator]
    for stage in choice.stages:
        stage.refresh_()
    torch.testing.assert_close(run(images()), model(images()), rtol=1e-4, atol=1e-4)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("resnet20", [(3, 16, 32), (2, 32, 16), (2, 64, 8)]),
        ("wrn-16-1", [(2, 16, 32), (1, 32, 16), (1, 64, 8)]),
        ("wrn-16-2", [(1, 32, 32), (1, 64, 16), (1, 128, 8)]),
    ],
)
def test_stages_are_the_blocks_between_changes_of_shape(name: str, found: list[tuple[int, int, int]]) -> None:
    choice = choose(build(name, "fixup", generator=seeded()))
    assert [(len(s.parts), s.channels, s.size) for s in choice.stages] == found
    assert choice.explain().startswith("kernels: stage for ")


def test_other_widths_take_the_compiled_path() -> None:
    choice = choose(build("wrn-16-4", "fixup", generator=seeded()))
    assert not choice.stages
    assert "not 64 at 32×32" in choice.explain()


def test_transformers_and_other_models_take_the_compiled_path() -> None:
    assert "Linear" in choose(nn.Linear(2, 2)).explain()
    assert "has none" in choose(build("resmlp-3-16", "fixup", generator=seeded())).explain()
    assert "has none" in choose(build("cnn-5-16", "he_out", generator=seeded())).explain()


def test_settings_decide() -> None:
    model = build("resnet20", "fixup", generator=seeded())
    assert "float32" in choose(model, precision="float32").explain()
    assert choose(model, kernels="compiled").explain() == "kernels: compiled, because kernels=compiled"
    assert choose(model, precision="bf16").stages[0].stream == torch.bfloat16
    assert choose(model, kernels="stage").stages[0].stream == torch.float32
    with pytest.raises(ValueError, match=r"kernels=stage, got none: .* float32; use kernels=auto"):
        choose(model, kernels="stage", precision="float32")


def test_large_activations_are_computed_again() -> None:
    model = build("resnet20", "fixup", generator=seeded())
    per_image = 4 * (3 * 16 * 32**2 + 2 * 32 * 16**2 + 2 * 64 * 8**2)
    most = kernel_stages.KEPT_BYTES // per_image
    assert not choose(model, count=most).stages[0].recompute
    assert choose(model, count=most + 1).stages[0].recompute
    assert choose(model, recompute=2).stages[0].recompute


def test_what_cannot_run_says_so() -> None:
    frozen = build("resnet14", "fixup", generator=seeded())
    frozen.get_parameter("body.0.0.branch.conv1.weight").requires_grad_(False)
    hooked = build("resnet14", "fixup", generator=seeded())
    hooked.get_submodule("body.1.1").register_forward_hook(lambda *_: None)
    shared = build("resnet14", "fixup", generator=seeded())
    first, second = (shared.get_submodule(f"body.2.{i}.branch.conv2") for i in range(2))
    second.weight = first.weight
    for model, reason, left in ((frozen, "do not learn", 2), (hooked, "hooks", 2), (shared, "share parameters", 2)):
        choice = choose(model)
        assert len(choice.stages) == left
        assert reason in choice.explain()


def test_updates_in_parts_are_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (_trained(monkeypatch, size) for size in (2**22, 1000))
    assert torch.equal(whole, parts)


def _trained(monkeypatch: pytest.MonkeyPatch, size: int) -> Tensor:
    monkeypatch.setattr(step, "_UPDATED", size)
    config = TrainConfig(model="resnet8", epochs=1, batch_size=8, validation=0.0, device="cpu")
    result = fit(config, data=tiny_images())
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_resuming_by_the_other_path_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(kernels="stage")
    folder = RunFolder(tmp_path)
    folder.config_path.write_text(config.to_toml())
    folder.require_resumable(config, NOT_IN_FINGERPRINT)
    assert not caplog.text
    folder.require_resumable(config.with_changes(kernels="compiled"), NOT_IN_FINGERPRINT)
    assert "began with kernels=stage and goes on with kernels=compiled" in caplog.text
    caplog.clear()
    folder.config_path.write_text('model = "resnet20"\n')  # a run of an earlier release
    folder.require_resumable(TrainConfig(kernels="stage"), NOT_IN_FINGERPRINT)
    assert not caplog.text


def test_the_path_is_part_of_the_stored_configuration() -> None:
    """On a CPU 'auto' becomes 'compiled', so a resumed run goes on by the same path."""
    result = fit(TrainConfig(model="resnet8", epochs=1, batch_size=8, device="cpu"), data=tiny_images())
    assert result.config.kernels == "compiled"


def test_without_a_device_the_reason_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "need a CUDA device" in choose(build("resnet14", "fixup", generator=seeded())).explain()
