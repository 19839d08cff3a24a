"""Discovery: any traceable model → its residual plan."""

from normfree.graph.discovery import discover

__all__ = ["discover"]
