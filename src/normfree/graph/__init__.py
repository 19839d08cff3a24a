"""Discovery: the residual plan of any model, and the methods that the model admits."""

from normfree.graph.convertibility import supports_conversion
from normfree.graph.discovery import discover, unaccounted

__all__ = ["discover", "supports_conversion", "unaccounted"]
