"""The claims of `robust`. ICLR 2022 submission: a robust initialization of residual blocks."""
