"""Observe a forward pass: which module is running, and which torch functions its code calls.

Recording a flow, inspecting a model before its conversion and measuring residual sums are three subclasses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.overrides import TorchFunctionMode

from normfree.graph.functions import SUMS, name_of


class FunctionCall(NamedTuple):
    """A call of a torch function in a forward pass.

    `name` is the function's name. `addition` numbers the sums in the forward pass of one module from 0; it is -1 for
    any other function.
    """

    function: Callable[..., Any]
    name: str
    addition: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


class Observer(TorchFunctionMode):
    """Base class of everything that follows a model while it runs.

    Inside `with observer.following(modules)` it keeps the stack of modules that are running and counts the calls of
    each. Subclasses override `on_enter`, `on_leave` and `on_function`, and `listens` to save time.

    Attributes:
        running: The names of the modules whose forward passes are running, the innermost last.
        calls: The number of calls of each module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.calls: Counter[str] = Counter()
        self._additions: Counter[str] = Counter()
        self._listening = False
        self._hooked: list[tuple[dict[Any, Any], object]] = []

    @property
    def home(self) -> str:
        """The name of the module whose own forward pass is running, '' for the model itself."""
        return self.running[-1] if self.running else ""

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Act when a module is called; it is on the stack already."""

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Act when a module returns; it is off the stack already."""

    def on_function(self, call: FunctionCall) -> Any:
        """Run the function, and return its result."""
        return call.run()

    def listens(self) -> bool:
        """Whether functions are observed now. Every observed call costs time."""
        return True

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observe until the context ends; only calls of these modules change the stack."""
        try:
            for name, module in modules.items():
                self._follow(name, module)
            self._switch(self.listens())
            yield
        finally:
            self.running.clear()
            self._switch(False)
            self.remove_hooks()

    def add_hook(self, table: dict[Any, Any], hook: Callable[..., None], *more: dict[Any, Any]) -> None:
        """Put a hook into one of a module's tables, `_forward_hooks` for example, until `remove_hooks`.

        This is `register_forward_hook` without the handle: hundreds of handles cost as much as some layers.
        Tables in `more` turn on an option for the hook, for example `_forward_hooks_with_kwargs`.
        """
        key = object()
        table[key] = hook
        self._hooked.append((table, key))
        for marks in more:
            marks[key] = True
            self._hooked.append((marks, key))

    def remove_hooks(self) -> None:
        """Remove every hook that was added."""
        for table, key in self._hooked:
            table.pop(key, None)
        self._hooked.clear()

    def _follow(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.running.append(name)
            self.calls[name] += 1
            self._switch(self.listens())
            self.on_enter(name, module, args)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            self.running.pop()
            self._switch(self.listens())
            self.on_leave(name, module, args, kwargs, out)

        self.add_hook(module._forward_pre_hooks, enter)
        self.add_hook(module._forward_hooks, leave, module._forward_hooks_with_kwargs)

    def _switch(self, on: bool) -> None:
        if on is not self._listening:
            self._listening = on
            if on:
                self.__enter__()  # type: ignore[no-untyped-call]
            else:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        addition = -1
        if name in SUMS:
            addition = self._additions[self.home]
            self._additions[self.home] += 1
        return self.on_function(FunctionCall(func, name, addition, args, kwargs or {}))
