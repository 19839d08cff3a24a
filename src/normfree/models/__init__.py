"""The models that the papers were tested on, by name."""

from normfree.models.network import Network
from normfree.models.registry import Family, build, catalog, find

__all__ = ["Family", "Network", "build", "catalog", "find"]
