"""The claims of `normdead`. Hoedt, Hochreiter, Klambauer 2022: the effects of normalization, and its substitutes."""
