"""Data sets by name: the catalog, downloads, checksums and file formats."""
