"""A converted model loads from its folder bit for bit, and any other folder is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import normfree as nf
from foreign_models import CASES
from normfree.conversion import convert, fold_batchnorm
from normfree.conversion.changes import plan_from_json
from normfree.conversion.saving import load_converted, pack_example, read_plan, save_converted, unpack_example
from normfree.models.third_party import create_model
from normfree.plan import ResidualPlan
from thin_resnet import ThinResNet, thin_resnet

METHODS = ("fixup", "skipinit", "rezero", "small_branch", "hanin", "wn", "nf", "dyt", "lsuv")


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, 14, 14, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def trained(model: nn.Module) -> nn.Module:
    """As after some training: every parameter and statistic is somewhere else."""
    g = torch.Generator().manual_seed(5)
    for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():  # a tied one once
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=g).to(tensor.dtype))
    return model


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def saved(folder: Path, method: str = "fixup", **more: Any) -> tuple[nn.Module, ResidualPlan]:
    model, plan = convert(thin_resnet(), method, images(), generator=torch.Generator().manual_seed(0))
    save_converted(folder, trained(model), plan, example=images(), **more)
    return model.eval(), plan


@pytest.mark.parametrize("method", METHODS)
def test_loaded_model_computes_the_same_bits(tmp_path: Path, method: str) -> None:
    model, plan = saved(tmp_path / "m", method)
    state = torch.get_rng_state()
    loaded, read = load_converted(tmp_path / "m", lambda: thin_resnet(seed=9))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(loaded, model)
    assert [type(m).__name__ for m in loaded.modules()] == [type(m).__name__ for m in model.modules()]
    assert torch.equal(loaded(images(3, 1)), model(images(3, 1)))
    assert not loaded.training
    assert read == plan == read_plan(tmp_path / "m")


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5", "llama"])
def test_transformer_with_a_dict_as_example_comes_back(tmp_path: Path, name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case, other = CASES[name](), CASES[name]()
    model, plan = convert(case.model, "fixup", case.example)
    save_converted(tmp_path / "m", trained(model), plan, example=case.example)
    loaded = nf.load(tmp_path / "m", lambda: other.model)
    assert same(loaded, model)
    assert torch.equal(loaded(**case.example).logits, model.eval()(**case.example).logits)


@pytest.mark.parametrize("statistics", ["trained", "fresh"])
def test_folded_model_comes_back(tmp_path: Path, statistics: str) -> None:
    """Fresh statistics shift nothing, so that no layer gets a bias that it did not have."""
    model = trained(thin_resnet()) if statistics == "trained" else thin_resnet()
    folded, record = fold_batchnorm(model.eval(), images())
    plan = replace(nf.discover(folded, images()), changes=record)
    save_converted(tmp_path / "m", folded, plan, example=images())
    loaded, read = load_converted(tmp_path / "m", thin_resnet)
    assert same(loaded, folded)
    assert torch.equal(loaded(images(3, 1)), folded(images(3, 1)))
    assert read == plan
    assert (loaded.get_submodule("conv1").bias is None) == (statistics == "fresh")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_type_of_the_weights_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model, plan = convert(thin_resnet().to(dtype), "nf", images().to(dtype))
    save_converted(tmp_path / "m", model, plan, example=images().to(dtype))
    given = thin_resnet()
    assert same(nf.load(tmp_path / "m", given), model)
    assert {p.dtype for p in given.parameters()} == {torch.float32}  # a model as factory is not touched
    assert any(isinstance(m, nn.BatchNorm2d) for m in given.modules())


def test_stored_name_of_the_original_is_enough(tmp_path: Path) -> None:
    model, _ = saved(tmp_path / "m", source="thin_resnet:ThinResNet")
    assert same(nf.load(tmp_path / "m", trust=True), model)
    assert same(nf.load(str(tmp_path / "m"), "thin_resnet:ThinResNet"), model)


def test_lines_in_the_folder_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets_to_load.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "my_nets_to_load:make"
    model, plan = convert(create_model(name), "wn", images())
    save_converted("m", model, plan, example=images(), source=name)
    code = "import sys; sys.path[0] = 'm'; from load import load; print(load()[0].weight.sum().item())"
    environment = {**os.environ, "PYTHONPATH": str(Path(nf.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == model.get_parameter("0.weight").sum().item()
    del sys.modules["my_nets_to_load"]


def test_hand_written_plan_is_used_again(tmp_path: Path) -> None:
    found = nf.discover(thin_resnet(), images())
    first = replace(found, branches=found.branches[:1], body=found.branches[1].layers)
    model, plan = convert(thin_resnet(), "skipinit", images(), plan=first)
    save_converted(tmp_path / "m", model, plan, example=images())
    loaded, read = load_converted(tmp_path / "m", thin_resnet)
    assert len(read.branches) == 1
    assert same(loaded, model)


def test_files_have_common_formats(tmp_path: Path) -> None:
    model, plan = saved(tmp_path / "m", source="thin_resnet:ThinResNet")
    assert {p.name for p in (tmp_path / "m").iterdir()} == {
        "weights.safetensors", "plan.json", "example.safetensors", "load.py",
    }  # fmt: skip
    assert load_file(tmp_path / "m" / "weights.safetensors").keys() == model.state_dict().keys()
    record = json.loads((tmp_path / "m" / "plan.json").read_text())
    assert record["method"] == plan.changes.method
    assert record["plan"]["changes"]["parameters_after"] == sum(p.numel() for p in model.parameters())
    assert len(record["plan"]["branches"]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m"]  # nothing unfinished is left


# What is refused


def test_another_architecture_is_one_sentence(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    others: list[tuple[Callable[[], nn.Module], str]] = [
        (lambda: thin_resnet(width=4), "got a ThinResNet that differs: .*shape"),
        (lambda: thin_resnet(blocks=2), "got a ThinResNet that differs: .* missing"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "got a Sequential that differs: it has no 'conv1'"),
    ]
    for factory, says in others:
        with pytest.raises(ValueError, match=says) as caught:
            nf.load(tmp_path / "m", factory)
        assert "pass a factory that returns the model as it was" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"to return a torch.nn.Module, got int"):
        nf.load(tmp_path / "m", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="expected a factory for the model in"):
        nf.load(tmp_path / "m")
    with pytest.raises(ValueError, match="got model="):
        nf.load(tmp_path / "m", model=thin_resnet())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("weights.safetensors", None, "'.*weights.safetensors' is missing"),
        ("example.safetensors", None, "is missing"),
        ("weights.safetensors", b"no tensors at all", "in '.*weights.safetensors', got 17: the file is truncated"),
        ("plan.json", b"{", "'.*plan.json' is damaged"),
        ("plan.json", b"[]", "is damaged: it holds no JSON object"),
        ("plan.json", b'{"format": 99, "source": null, "method": "nf", "plan": {}}', "of another version"),
        ("plan.json", b'{"format": 1, "source": null, "method": "nf", "plan": {"trunk": []}}', "no trunk"),
        ("plan.json", b'{"format": 1, "source": null, "method": "nf", "plan": {}}', "example that was stored"),
        ("plan.json", b"\xff\xfe", "is damaged"),
    ],
)
def test_damaged_folder_is_one_sentence(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    saved(tmp_path / "m")
    path = tmp_path / "m" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        load_converted(tmp_path / "m", thin_resnet)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"found no plan.json"):
        load_converted(tmp_path)


def test_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder, says in (("notes", "holds 'mine.txt'"), ("file", "got the file")):
        with pytest.raises(ValueError, match=says):
            saved(tmp_path / folder)
    saved(tmp_path / "m")
    (tmp_path / "m" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'mine.txt'"):
        saved(tmp_path / "m")
    assert {p.name for p in tmp_path.iterdir()} == {"notes", "file", "m"}


def test_converted_model_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = saved(tmp_path / "m")
    with monkeypatch.context() as patched:
        patched.setattr(
            "normfree.conversion.saving.write_sealed_json", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(OSError, match=r"could not write the converted model .* free some room"):
            saved(tmp_path / "m", "nf")
    assert same(nf.load(tmp_path / "m", thin_resnet), first)
    second, _ = saved(tmp_path / "m", "nf")
    assert same(nf.load(tmp_path / "m", thin_resnet), second)
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "empty")
    assert {p.name for p in tmp_path.iterdir()} == {"m", "empty"}


def test_plan_without_a_conversion_is_refused(tmp_path: Path) -> None:
    plan = nf.discover(thin_resnet(), images())
    with pytest.raises(ValueError, match="expected a plan with the changes of a conversion"):
        save_converted(tmp_path / "m", thin_resnet(), plan, example=images())
    assert not list(tmp_path.iterdir())


def test_plan_and_example_come_back_as_they_were() -> None:
    plan = nf.discover(thin_resnet(), images())
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    example = ({"a": torch.ones(2), "b": [torch.zeros(1), None]}, 3, "x", False, ())
    tensors, packed = pack_example(example)
    back: Any = unpack_example(tensors, json.loads(json.dumps(packed)))
    assert back[1:] == example[1:]
    assert torch.equal(back[0]["a"], torch.ones(2))
    assert back[0]["b"][1] is None
    with pytest.raises(ValueError, match=r"got object at 'a\.0'"):
        pack_example({"a": [object()]})


def test_thin_resnet_is_made_by_its_name() -> None:
    from normfree.models.third_party import create_model

    assert type(create_model("thin_resnet:ThinResNet")) is ThinResNet
