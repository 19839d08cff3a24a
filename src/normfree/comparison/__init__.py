"""Compare methods over depths, learning rates and seeds; and the demo."""

from normfree.comparison.sweep import compare

__all__ = ["compare"]
