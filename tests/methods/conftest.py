"""A registry that is as before after the test."""

from collections.abc import Iterator

import pytest

from normfree.methods import names, unregister


@pytest.fixture
def clean() -> Iterator[None]:
    """Remove every method that the test registers."""
    before = names()
    yield
    for name in set(names()) - set(before):
        unregister(name)
    assert names() == before
