"""The observer follows the stack of modules, numbers additions per module, and removes its hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from normfree.graph.observer import FunctionCall, Observer

X = torch.ones(2, 3)


class Inner(nn.Module):
    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return x + shift


class Outer(nn.Module):
    """Adds before and after two calls of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = self.inner(self.inner(x, shift=2.0))
        return x - x.mul(2)


class Notes(Observer):
    def __init__(self, homes: set[str] | None = None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.homes = homes

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.events.append(("enter", name, list(self.running)))

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.events.append(("leave", name, sorted(kwargs)))

    def on_function(self, call: FunctionCall) -> Any:
        self.events.append((self.home, call.name, call.addition))
        return call.run()


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_with_kwargs) for m in model.modules()
    )


def test_events_come_in_the_order_they_happen() -> None:
    model, notes = Outer(), Notes()
    with notes.following(dict(model.named_modules())):
        out = model(X)
    assert torch.equal(out, -(X + 3))
    assert notes.events == [
        ("enter", "", [""]),
        ("", "add", 0),
        ("enter", "inner", ["", "inner"]),
        ("inner", "add", 0),
        ("leave", "inner", ["shift"]),
        ("enter", "inner", ["", "inner"]),
        ("inner", "add", 1),
        ("leave", "inner", []),
        ("", "mul", -1),
        ("", "sub", 1),
        ("leave", "", []),
    ]
    assert notes.calls == {"": 1, "inner": 2}


def test_functions_are_observed_only_while_it_listens() -> None:
    model, notes = Outer(), Notes({"inner"})
    with notes.following(dict(model.named_modules())):
        model(X)
        X + 1
    assert [event for event in notes.events if event[0] not in ("enter", "leave")] == [
        ("inner", "add", 0),
        ("inner", "add", 1),
    ]


def stop(model: nn.Module, notes: Notes) -> None:
    with notes.following(dict(model.named_modules())):
        assert hooks(model) == 6
        model("no tensor")


def test_hooks_and_mode_are_gone_after_an_error() -> None:
    model, notes = Outer(), Notes()
    with pytest.raises(TypeError):
        stop(model, notes)
    assert not hooks(model)
    assert not notes.running
    seen = len(notes.events)
    model(X)
    assert len(notes.events) == seen


class Distance(nn.Module):
    """Calls a module inside of a torch function, which sets modes aside, and goes on after an error of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.fails = Failing()

    def forward(self, x: Tensor) -> Tensor:
        def distance(a: Tensor, b: Tensor) -> Tensor:
            return (self.inner(a) - b).square().sum(-1)

        try:
            self.fails(x)
        except ArithmeticError:
            x = x + 1
        return nn.functional.triplet_margin_with_distance_loss(x, x, x, distance_function=distance) + 1


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).mul(2)
        raise ArithmeticError


@pytest.mark.parametrize("homes", [None, {""}, {"", "fails"}, {"inner"}])
def test_modes_of_torch_are_balanced_whatever_the_model_does(homes: set[str] | None) -> None:
    model, notes = Distance(), Notes(homes)
    before = len(_get_current_function_mode_stack())
    with notes.following(dict(model.named_modules())):
        model(X)
        assert notes.running == []
        assert notes.events[-1][:2] == ("leave", "")
    assert len(_get_current_function_mode_stack()) == before
    assert hooks(model) == 0
