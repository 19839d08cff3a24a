"""Rendering of plain records as tables and terminal plots; this room imports no other."""

from normfree.report.tables import Column, Table, print_table, to_markdown
from normfree.report.terminal import line_plot, open_console, sparkline

__all__ = ["Column", "Table", "line_plot", "open_console", "print_table", "sparkline", "to_markdown"]
