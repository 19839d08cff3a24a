"""Discovery: any model → its residual plan."""

from normfree.graph.coverage import unaccounted
from normfree.graph.discovery import discover

__all__ = ["discover", "unaccounted"]
