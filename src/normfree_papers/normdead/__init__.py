"""The claims of `normdead`. Hoedt, Hochreiter, Klambauer 2022: what normalization does, and what can stand in."""
