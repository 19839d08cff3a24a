"""Data sets by name: where they are, how they are checked and read."""
