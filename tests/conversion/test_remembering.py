"""A converted, loaded or built model remembers its plan, method and example."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normed_blocks import Block, X, network, perturb_
from normfree.conversion import load_converted, save_converted
from normfree.optim import agc_parameters
from normfree.plan import remember_plan_, remembered_method, remembered_plan, unwrapped


class Wrapper(nn.Module):
    """Holds a model as `DistributedDataParallel` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        Wrapper,
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(Wrapper(m), backend="eager"),
        lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    ],
    ids=["itself", "copy", "pickle", "wrapped", "compiled", "both", "averaged"],
)
def test_plan_survives_copies_and_wrappers(wrap) -> None:
    model, plan = nf.convert(network(), "fixup:bias=false", X)
    held = wrap(model)
    assert remembered_plan(held) == plan
    assert remembered_method(held) == plan.changes.method
    groups = nf.param_groups(held, lr=1.0)
    expected = nf.param_groups(held, lr=1.0, method="fixup:bias=false", plan=plan)
    assert [(g["name"], g["lr"], len(g["params"])) for g in groups] == [
        (g["name"], g["lr"], len(g["params"])) for g in expected
    ]
    left_out = {id(p) for p in unwrapped(held)[-1].parameters()}
    assert {id(p) for p in held.parameters()} - {id(p) for p in agc_parameters(held)} == left_out


def test_model_that_was_neither_built_nor_converted_has_no_plan() -> None:
    for model in (network(), Wrapper(network())):
        assert remembered_plan(model) is None
        assert remembered_method(model) is None
        with pytest.raises(ValueError, match=r"expected a model that was built or converted"):
            nf.param_groups(model, lr=0.1)


def test_built_model_states_its_plan_also_through_a_wrapper() -> None:
    model = nf.build("resmlp-2-8", "hanin:r=0.8", num_classes=4)
    assert remembered_plan(Wrapper(model)) == model.plan
    assert remembered_method(Wrapper(model)) == "hanin:r=0.8"


def test_conversion_of_a_built_model_takes_the_place_of_its_own_method() -> None:
    built = nf.build("resmlp-2-8", "batchnorm", in_channels=8, size=1, num_classes=4)
    model, plan = nf.convert(built, "rezero", X)
    assert remembered_method(built) == "batchnorm"
    assert remembered_method(model) == "rezero"
    assert nf.diagnose(model, X).signal.plan is plan is remembered_plan(model)


def test_diagnosis_folding_and_initialization_need_only_the_model() -> None:
    model, plan = nf.convert(network(), "fixup", X)
    assert nf.diagnose(model, X).signal.plan is plan
    nf.initialize_(model, "fixup")
    perturb_(model)
    model.eval()
    before = model(X)
    record = nf.fold_(model)
    assert record.folded
    torch.testing.assert_close(model(X), before)


def test_saving_and_loading_need_only_the_model(tmp_path: Path) -> None:
    model, plan = nf.convert(network(), "nf", X)
    perturb_(model)
    save_converted(tmp_path / "a", model)
    again, read = load_converted(tmp_path / "a", network)
    assert read == plan
    assert torch.equal(again(X), model(X))
    assert remembered_plan(again) == plan
    assert nf.param_groups(again, lr=0.1)
    save_converted(tmp_path / "b", again)
    assert remembered_plan(nf.load(tmp_path / "b", network)) == plan
    with pytest.raises(ValueError, match=r"expected a model that remembers its conversion, got Sequential; pass plan="):
        save_converted(tmp_path / "c", network())


def test_images_that_a_model_remembers_are_two() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    converted, _ = nf.convert(model, "wn", torch.randn(16, 3, 8, 8))
    plain = io.BytesIO()
    torch.save(converted, plain)
    assert len(plain.getvalue()) < 20_000  # sixteen images alone have 12,288 numbers


class TwoHeads(nn.Module):
    """Output layers that are no `Linear` or not the last one; a Linear that is none is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Conv1d(8, 3, 1)
        self.blocks = nn.Sequential(Block(), Block())
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(self.blocks(self.stem(x)).unsqueeze(2))


def test_clipping_leaves_out_the_output_layer_of_the_plan() -> None:
    model, plan = nf.convert(TwoHeads(), "fixup", X)
    kept = {id(p) for p in agc_parameters(model)}
    assert {n.split(".")[0] for n, p in model.named_parameters() if id(p) not in kept} == {"mask"}
    assert [layer.name for layer in plan.classifier] == ["mask"]
    original = TwoHeads()  # control: without a plan, the last Linear is taken
    kept = {id(p) for p in agc_parameters(original)}
    assert {n.split(".")[0] for n, p in original.named_parameters() if id(p) not in kept} == {"stem"}
    remember_plan_(original, plan)
    assert {id(p) for p in original.mask.parameters()}.isdisjoint(map(id, agc_parameters(original)))
    nf.clip_grad_agc_(model)
