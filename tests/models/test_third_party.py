"""Third-party models by name: building them, and errors."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from normfree.models.builder import is_foreign
from normfree.models.third_party import create_model

MODULE = """
from functools import partial
import torch
from torch import nn

ready = nn.Linear(2, 2)
number = 3
def factory():
    return nn.Linear(4, 4)
def needs(width):
    return nn.Linear(width, width)
def options(width=5, *, bias=False, **rest):
    return nn.Linear(width, width, bias=bias)
def nothing():
    pass
def a_list():
    return [nn.Linear(2, 2)]
def a_class():
    return nn.Linear
def fails():
    raise TypeError("from the factory's own code")
bound = partial(needs, 6)
class Holder:
    @staticmethod
    def build():
        return nn.Linear(7, 7)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with modules; path and modules as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "made_up_zoo.py").write_text(MODULE)
    (tmp_path / "made_up_half.py").write_text("import no_such_dependency\n")
    (tmp_path / "made_up_broken.py").write_text("raise RuntimeError('operator zoo::nms does not exist')\n")
    package = tmp_path / "made_up_package" / "inner"
    package.mkdir(parents=True)
    (package / "models.py").write_text("from made_up_zoo import factory\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("made_up_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["resnet18", "wrn-40-10", ""])
def test_plain_name_is_not_foreign(name: str) -> None:
    assert not is_foreign(name)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("made_up_zoo:factory", 4),
        ("made_up_zoo:ready", 2),
        ("made_up_zoo:options", 5),
        ("made_up_zoo:bound", 6),
        ("made_up_zoo:Holder.build", 7),
        ("made_up_package.inner.models:factory", 4),
    ],
)
def test_factory_is_called(name: str, width: int) -> None:
    model = create_model(name)
    assert is_foreign(name)
    assert isinstance(model, nn.Linear)
    assert model.in_features == width


def test_torchvision_and_timm_are_built_with_random_weights() -> None:
    with torch.random.fork_rng(devices=[]):
        first, second = create_model("torchvision:resnet18"), create_model("torchvision:resnet18")
        assert not torch.equal(first.get_parameter("conv1.weight"), second.get_parameter("conv1.weight"))
        assert isinstance(create_model("timm:test_resnet"), nn.Module)
        for name in ("torchvision:resnet18", "timm:test_resnet"):
            assert create_model(name, classes=7).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_weights_of_a_backbone_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    create_model("torchvision:resnet18")  # imports what is looked at below

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(sys.modules["torchvision.models._api"], "load_state_dict_from_url", fetch)
    with torch.random.fork_rng(devices=[]):
        assert isinstance(create_model("torchvision:lraspp_mobilenet_v3_large"), nn.Module)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torchvision:resnet81", r"unknown model of torchvision 'resnet81'; did you mean 'resnet18'"),
        ("timm:resnet10y", r"unknown model of timm 'resnet10y'; did you mean 'resnet10t'"),
        ("made_up_zoo:factry", r"unknown name 'factry' in 'made_up_zoo'; did you mean 'factory'\?"),
        ("made_up_zoo:Holder.bild", "did you mean 'build'"),
        ("made_up_zoo:number.denominater", "did you mean 'denominator'"),
    ],
)
def test_unknown_name_gives_the_closest(name: str, says: str) -> None:
    refuse(name, says)


def refuse(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        create_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("made_up_zoo:nothing", "expected 'made_up_zoo:nothing' to give a torch.nn.Module, got NoneType"),
        ("made_up_zoo:a_list", "to give a torch.nn.Module, got list"),
        ("made_up_zoo:a_class", "to give a torch.nn.Module, got type"),
        ("made_up_zoo:number", "to give a torch.nn.Module, got int"),
        ("made_up_zoo:needs", "to need no arguments, but calling it failed: missing a required argument: 'width'"),
        ("made_up_zoo:Holder", "to give a torch.nn.Module, got Holder"),
    ],
)
def test_factory_without_a_model_is_refused(name: str, says: str) -> None:
    refuse(name, says)


def test_error_of_the_factory_itself_is_one_line() -> None:
    refuse("made_up_zoo:fails", "expected 'made_up_zoo:fails' to run, but it stopped: TypeError: from the .* own code")
    with pytest.raises(ValueError, match="stopped") as caught:
        create_model("made_up_zoo:fails")
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("undefined", "NameError: name 'undefined' is not defined"),
        ("def broken(:\n    pass", "SyntaxError: .*made_up_wrong.py, line 1"),
        ("from torch import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("{}['key']", "KeyError: 'key'"),
    ],
)
def test_error_of_the_module_itself_is_one_line(code: str, says: str, folder: Path) -> None:
    (folder / "made_up_wrong.py").write_text(code + "\n")
    refuse("made_up_wrong:model", f"expected to import 'made_up_wrong' for model .* but it stopped: {says}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package:model", "expected to import 'no_such_package' .* run in its folder or install it"),
        ("no_such_package.module:model", "expected to import 'no_such_package'"),
        ("made_up_half:model", "expected to import 'no_such_dependency' for model 'made_up_half:model'"),
        (
            "made_up_broken:model",
            "expected to import 'made_up_broken' .* but it stopped: RuntimeError: operator zoo::nms",
        ),
        ("folder/file.py:model", "leave out folders and the ending .py"),
        (".relative:model", "expected the name of a module before ':'"),
        (":model", "expected a model such as 'torchvision:resnet50'"),
        ("torchvision:", "expected a model such as 'torchvision:resnet50'"),
        ("made_up_zoo:factory.<locals>.Net", "got 'made_up_zoo:factory.<locals>.Net', .* pass model= to load the run"),
        ("__main__:NoSuchNet", "'__main__:NoSuchNet', which is defined in a script or inside a function; pass model="),
    ],
)
def test_missing_module_is_refused(name: str, says: str) -> None:
    refuse(name, says)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_missing_library_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    refuse(f"{library}:resnet18", rf"for model '{library}:resnet18', but it was not found; .*install '\.\[vision\]'")
