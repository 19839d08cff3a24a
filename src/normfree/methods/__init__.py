"""The methods of the four papers, one file a family; importing a family registers its methods.

The order here is the order of the table that `normfree methods` prints.
"""

from importlib import import_module

from normfree.methods.init_context import Batch, InitContext
from normfree.methods.initialize import initialize_
from normfree.methods.method import FORMS, Form, Law, Method, Rule, ScalarRate, Skip
from normfree.methods.registry import get, names, register, unregister

FAMILIES = tuple(
    import_module(f"normfree.methods.{name}")
    for name in (
        "plain",
        "shortcut",
        "isograd",
        "scaled_sums",
        "fixup",
        "data_driven",
        "weightnorm",
        "normalizer_free",
        "dyt",
        "tfixup",
        "deepnorm",
        "admin",
        "normalized",
    )
)

__all__ = [
    "FAMILIES",
    "FORMS",
    "Batch",
    "Form",
    "InitContext",
    "Law",
    "Method",
    "Rule",
    "ScalarRate",
    "Skip",
    "get",
    "initialize_",
    "names",
    "register",
    "unregister",
]
