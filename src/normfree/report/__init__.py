"""Tables, plots and pages from plain records. It imports of normfree only `errors` and `storage`, and no torch."""

from normfree.report.tables import Column, Link, Table, print_table, sparkline, to_markdown
from normfree.report.terminal import open_console

__all__ = ["Column", "Link", "Table", "open_console", "print_table", "sparkline", "to_markdown"]
