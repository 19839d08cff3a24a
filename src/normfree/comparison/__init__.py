"""Methods compared over depths, learning rates and seeds; and the demo."""

from normfree.comparison.running import compare

__all__ = ["compare"]
