"""The claims of `fixup`. Zhang, Dauphin, Ma 2019: residual learning without normalization."""
