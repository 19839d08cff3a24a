"""The claims of `wninit`. Arpit, Campos, Bengio 2019: how to initialize networks with weight normalization."""
