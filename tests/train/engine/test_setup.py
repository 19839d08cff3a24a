"""Training of models that were converted: by a configuration's name and method, or given with their plan."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normfree as nf
from normfree.conversion.saving import read_plan, save_converted
from normfree.train import RunFolder
from normfree.train.data_sources import AS_BUILT, as_data
from normfree.train.engine import loop as engine
from normfree.train.engine import setup
from normfree.train.engine.setup import classifier_parameters, model_settings, parameter_groups
from normfree.train.engine.step import TrainStep
from thin_resnet import thin_resnet
from tiny_images import tiny_images

THIN = "thin_resnet:ThinResNet"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    monkeypatch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())


def config(method: str, **changes: Any) -> nf.TrainConfig:
    return nf.TrainConfig(**{"model": THIN, "method": method, "epochs": 2, "batch_size": 16, **changes})


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["fixup", "nf", "wn", "dyt", "hanin:r=0.8", "lsuv"])
def test_named_model_is_converted_trained_and_loaded(tmp_path: Path, method: str) -> None:
    result = nf.fit(config(method), out=tmp_path)
    assert (result.status, result.config.model, result.config.method) == ("finished", THIN, method)
    assert norms(result.model) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["config"]["method"] == method
    assert record["parameters"] == read_plan(tmp_path).changes.parameters_after
    state = torch.get_rng_state()
    loaded = nf.load(tmp_path, trust=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(loaded, result.model)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in result.model.modules()]
    assert nf.evaluate(tmp_path, trust=True) == result.test
    assert same(nf.load(tmp_path, thin_resnet), result.model)


def test_as_built_keeps_the_normalizers(tmp_path: Path) -> None:
    result = nf.fit(config(AS_BUILT), out=tmp_path)
    assert result.config.method == AS_BUILT
    assert norms(result.model) == norms(thin_resnet()) == 6
    assert not (tmp_path / "plan.json").exists()
    assert same(nf.load(tmp_path, trust=True), result.model)


def test_conversion_is_seeded() -> None:
    one, again, other = (nf.fit(config("nf", seed=seed, epochs=1)).model for seed in (1, 1, 2))
    assert same(one, again)
    assert not same(one, other)


def test_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config("fixup", ema=0.9)
    whole = nf.fit(chosen, out=tmp_path / "whole")
    original, calls = TrainStep.__call__, [0]

    def step(self: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", step)
        stopped = nf.fit(chosen, out=tmp_path / "run")
    assert (stopped.status, stopped.steps) == ("interrupted", 4)
    assert same(nf.load(tmp_path / "run", trust=True), stopped.model)
    resumed = nf.fit(chosen, out=tmp_path / "run", resume=True)
    assert resumed.status == "finished"
    assert same(resumed.model, whole.model)
    assert same(nf.load(tmp_path / "run", trust=True), whole.model)


def test_groups_follow_the_method() -> None:
    chosen = config("fixup", lr=0.2, weight_decay=1e-3)
    model, plan = as_data(tiny_images()).build_model(chosen)
    groups = {g["name"]: g for g in parameter_groups(model, chosen, plan)}
    assert groups["scalars"]["lr"] == pytest.approx(0.02)
    assert groups["weights"]["lr"] == 0.2
    assert [tuple(p.shape) for p in groups["scalars"]["params"] if p.numel() > 1] == [(10,)]  # the bias of fc
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    chosen = config("nf", lr=0.2, weight_decay=1e-3)
    model, plan = as_data(tiny_images()).build_model(chosen)
    gains = next(g for g in parameter_groups(model, chosen, plan) if g["name"] == "gains and biases")
    assert gains["weight_decay"] == 0
    assert any(p is model.get_parameter("conv1.gain") for p in gains["params"])
    assert classifier_parameters(model, plan) == ("fc.weight", "fc.bias")
    (everything,) = parameter_groups(thin_resnet(), config(AS_BUILT))
    assert everything["name"] == "weights"


def test_given_model_with_its_plan_is_trained_by_its_method(tmp_path: Path) -> None:
    example = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    model, plan = nf.convert(thin_resnet(), "rezero", example)
    result = nf.fit(config("fixup"), model=model, plan=plan, out=tmp_path / "run")
    assert result.model is model
    assert (result.config.model, result.config.method) == (THIN, "rezero")
    assert read_plan(tmp_path / "run") == plan
    assert same(nf.load(tmp_path / "run", trust=True), model)
    assert same(nf.load(tmp_path / "run", thin_resnet), model)
    save_converted(tmp_path / "saved", model, plan, example=example, source=THIN)
    assert same(nf.load(tmp_path / "saved", trust=True), model)


def test_converted_model_is_trained_by_the_method_that_it_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without plan=, a run has the same groups, method, numbers and files."""
    seen: list[list[tuple[str, float, float, int]]] = []
    build_step = TrainStep.__init__

    def init(self: TrainStep, model: nn.Module, groups: list[dict[str, Any]], *args: Any, **rest: Any) -> None:
        seen.append([(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups])
        build_step(self, model, groups, *args, **rest)

    monkeypatch.setattr(TrainStep, "__init__", init)
    example = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    results = []
    for name, passed in (("with", True), ("without", False)):
        model, plan = nf.convert(thin_resnet(), "fixup", example, generator=torch.Generator().manual_seed(0))
        results.append(nf.fit(config("hanin"), model=model, plan=plan if passed else None, out=tmp_path / name))
        assert read_plan(tmp_path / name) == plan
        assert same(nf.load(tmp_path / name, trust=True), model)
    assert seen[0] == seen[1]
    rates = {name: lr for name, lr, *_ in seen[1]}
    assert rates["scalars"] == pytest.approx(rates["weights"] / 10)
    assert [result.config.method for result in results] == [plan.changes.method] * 2
    assert same(results[0].model, results[1].model)
    assert results[0].test == results[1].test


def test_run_that_began_as_built_goes_on_as_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 0.1 trained a converted model without plan= by one group, and its stored configuration says so."""
    example = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))

    def converted() -> nn.Module:
        return nf.convert(thin_resnet(), "fixup", example, generator=torch.Generator().manual_seed(0))[0]

    with monkeypatch.context() as earlier:
        earlier.setattr(setup, "kept_plan", lambda model: None)
        nf.fit(config("fixup", epochs=1), model=converted(), out=tmp_path / "run")
        whole = nf.fit(config("fixup", epochs=1), model=converted(), out=tmp_path / "longer")
        nf.fit(config("fixup", epochs=2), model=converted(), out=tmp_path / "longer", resume=True)
    resumed = nf.fit(config("fixup", epochs=2), model=converted(), out=tmp_path / "run", resume=True)
    assert (resumed.status, resumed.config.method) == ("finished", AS_BUILT)
    assert not (tmp_path / "run" / "plan.json").exists()
    assert same(resumed.model, nf.load(tmp_path / "longer", model=converted()))
    assert not same(resumed.model, whole.model)


def test_given_model_without_a_plan_is_trained_as_it_is() -> None:
    result = nf.fit(config("fixup", epochs=1), model=thin_resnet())
    assert (result.config.method, norms(result.model)) == (AS_BUILT, 6)


def test_method_comes_with_a_plan_that_no_conversion_made() -> None:
    model = thin_resnet()
    plan = nf.discover(model, torch.zeros(2, 1, 14, 14))
    assert model_settings(config("hanin"), model, plan)["method"] == "hanin"
    folded, record = nf.fold_batchnorm(model.eval(), torch.zeros(2, 1, 14, 14))
    assert model_settings(config("hanin"), folded, replace(plan, changes=record))["method"] == AS_BUILT


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "batchnorm"}, "with method='as built'"),
        ({"method": "convshort"}, "cannot be converted by|cannot be done"),
        ({"method": "fixupp"}, "did you mean 'fixup'"),
        (
            {"model": "torchvision:resnet18"},
            r"images of \(1, 14, 14\).*ResNet failed.*images are grey.*colour images",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        nf.fit(config(**{"method": "fixup", **changes}), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert RunFolder(tmp_path / "run").status is None


def test_plan_alone_is_refused() -> None:
    plan = nf.discover(thin_resnet(), torch.zeros(2, 1, 14, 14))
    with pytest.raises(ValueError, match="pass model="):
        nf.fit(config("fixup"), plan=plan)


@pytest.mark.slow
def test_converted_network_learns_as_well_as_its_original() -> None:
    """In the same few epochs within a few points of batch norm; on a GPU with CIFAR-10 three are asked for."""
    data = tiny_images(2500, 1000, "fashion")
    accuracy = {}
    for method in (AS_BUILT, "fixup", "nf"):
        found = nf.fit(config(method, epochs=5, lr=0.1, validation=0.0), data=data).test
        assert found is not None
        accuracy[method] = found.accuracy
    assert accuracy[AS_BUILT] > 0.7
    assert accuracy["fixup"] > accuracy[AS_BUILT] - 0.05
    assert accuracy["nf"] > accuracy[AS_BUILT] - 0.05
