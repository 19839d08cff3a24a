"""A method that a test adds to the registry."""

from dataclasses import replace

from normfree.methods import Law, Method, Rule
from normfree.methods.standard_init import he_fan_in_


def mine(**changes: object) -> Method:
    """Half of every branch, with some fields changed."""
    record = Method(
        name="mine",
        summary="half of every branch",
        reference="here",
        weights_text="plain; He fan-in",
        rule=Rule(beta=Law(0.5)),
        initializer=he_fan_in_,
    )
    return replace(record, **changes)  # type: ignore[arg-type]
