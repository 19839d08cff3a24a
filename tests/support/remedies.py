"""The methods that a refusal names, and a check that they, and no others, convert the model."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import normfree as nf

METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv:by=layer")
QUOTED = r"('[^']*'(?:(?:, | or | and )'[^']*')*)"


def named_methods(text: str) -> list[str] | None:
    """The methods that a refusal advises, none if it says that there are none, None if it does not speak of methods."""
    if "none of the other methods converts it" in text:
        return []
    found = re.search(rf"; use {QUOTED}(; |$)", text)
    return re.findall(r"'([^']*)'", found[1]) if found else None


def untried_methods(text: str) -> list[str]:
    """The methods that a refusal says were not tried."""
    found = re.search(rf"; {QUOTED} (was|were) not tried", text)
    return re.findall(r"'([^']*)'", found[1]) if found else []


def refusal(model: nn.Module, method: str, example: Any) -> str:
    """The text of a refusal; of the methods of `METHODS`, those that it names convert the model, and no others do.

    LSUV is named for networks without residual sums only.
    """
    with pytest.raises(ValueError, match=r".") as caught:
        nf.convert(model, method, example, generator=torch.Generator().manual_seed(0))
    text = str(caught.value)
    named = named_methods(text)
    if named is not None:
        unsure = {method.partition(":")[0], *(name.partition(":")[0] for name in untried_methods(text))}
        assert set(named) <= set(METHODS)
        for other in METHODS:
            if other in named or (other.partition(":")[0] not in unsure and other != "lsuv:by=layer"):
                assert converts(model, other, example) is (other in named), f"{other}: {text}"
    return text


def converts(model: nn.Module, method: str, example: Any) -> bool:
    try:
        nf.convert(model, method, example, generator=torch.Generator().manual_seed(0))
    except ValueError:
        return False
    return True
