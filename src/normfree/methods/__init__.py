"""The methods of the four papers and their competitors, one file per family; importing a family registers its methods.

`normfree methods` prints them in the order of `FAMILIES`.
"""

from importlib import import_module

from normfree.methods.initialize import Batch, InitContext, initialize_
from normfree.methods.method import FORMS, Form, Law, Method, Rule, ScalarRate, Skip
from normfree.methods.method_registry import get, names, register, unregister

FAMILIES = tuple(
    import_module(f"normfree.methods.{name}")
    for name in (
        "standard_init",
        "residual_scaling",
        "isograd",
        "fixup",
        "lsuv",
        "weightnorm",
        "nf_resnets",
        "transformer_methods",
        "norm_baselines",
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
