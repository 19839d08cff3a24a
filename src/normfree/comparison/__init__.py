"""Compare methods over depths, learning rates and seeds; and the demo."""

from normfree.comparison.compare_runs import compare

__all__ = ["compare"]
