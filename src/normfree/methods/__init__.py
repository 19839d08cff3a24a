"""The methods of the four papers, one file a family; importing a family registers its methods.

The order here is the order of the table that `normfree methods` prints.
"""

from importlib import import_module

from normfree.methods.init_context import Batch, Site
from normfree.methods.initialize import initialize_
from normfree.methods.method import FORMS, Form, Law, Method, Rule, ScalarRate, Skip
from normfree.methods.registry import get, names, register, unknown, unregister

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
    "Law",
    "Method",
    "Rule",
    "ScalarRate",
    "Site",
    "Skip",
    "get",
    "initialize_",
    "names",
    "register",
    "unknown",
    "unregister",
]
