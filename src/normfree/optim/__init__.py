"""What an optimizer needs to know of a method."""

from normfree.optim.groups import param_groups

__all__ = ["param_groups"]
