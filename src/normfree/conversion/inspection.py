"""What a model does in one forward pass on the example: which modules it calls, what its own code does with norms."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from normfree.conversion.norms import may_normalize, normalizes, weight_readers
from normfree.nn.model_state import leave_no_trace

_NORMALIZING = frozenset(
    {"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize"}
)


@dataclass
class Watched:
    """What was seen: the calls of each module; `read`, normalizers whose weight is read from outside; normalization
    that is in no module, by home and function; `overwritten`, normalizers whose output is written to in place;
    `like_norms`, modules of a class we do not know that do what a normalizer does.
    """

    called: Counter[str] = field(default_factory=Counter)
    read: set[str] = field(default_factory=set)
    normalizing: list[tuple[str, str]] = field(default_factory=list)
    overwritten: set[str] = field(default_factory=set)
    like_norms: list[str] = field(default_factory=list)


class _Functions(TorchFunctionMode):
    """Notes every normalizing function with the module in whose forward pass it stands, and every write in place."""

    def __init__(self, homes: list[str], seen: Callable[[str, str], None], written: Callable[[Any], None]) -> None:
        super().__init__()
        self.homes = homes
        self.seen = seen
        self.written = written

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NORMALIZING and not isinstance(next(iter(args), None), nn.Parameter):  # a weight is another matter
            self.seen(self.homes[-1] if self.homes else "", name)
        in_place = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
        if args and (in_place or name == "__setitem__" or (kwargs or {}).get("inplace")):
            self.written(args[0])
        return func(*args, **(kwargs or {}))


def watch(model: nn.Module, norms: Mapping[str, nn.Module], args: Any, kwargs: Any) -> Watched:
    """Run the model once and leave no trace.

    Raises `ValueError` when it does not run.
    """
    watched = Watched()
    homes: list[str] = []

    def seen(home: str, name: str) -> None:
        if home not in norms and (home, name) not in watched.normalizing:
            watched.normalizing.append((home, name))

    given: dict[str, Tensor] = {}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            watched.called[name] += 1
            homes.append(name)
            alone = len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point()
            if alone and name not in given and may_normalize(module):
                given[name] = args[0].detach().clone()

        return hook

    put_out: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
    modules = dict(model.named_modules())

    def leave(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            homes.pop()
            if name in norms and isinstance(out, Tensor):
                put_out[id(out)] = (name, weakref.ref(out))

        return hook

    def written(tensor: Any) -> None:
        name, reference = put_out.get(id(tensor), ("", None))
        # A module that can be told not to write into its input will be.
        told = homes and getattr(modules[homes[-1]], "inplace", False) is True
        if reference is not None and reference() is tensor and not told:
            watched.overwritten.add(name)

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        with trial(model), weight_readers(norms) as watched.read, _Functions(homes, seen, written):
            run(model, args, kwargs)
        with trial(model):
            watched.like_norms = [name for name, x in given.items() if normalizes(modules[name], x)]
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} stopped: {error}; "
            "pass an example that it accepts"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return watched


def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the model puts out on copies of its inputs, which it may write into."""
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return model(*args, **kwargs)


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Run the model in inference mode and leave no trace; attention calls its parts one by one."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with leave_no_trace(model), torch.no_grad():
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
