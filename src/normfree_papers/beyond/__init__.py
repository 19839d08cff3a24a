"""Claims of our own, on questions that the papers leave open; written down before their runs."""
