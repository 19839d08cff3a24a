"""The intervals of `judgement` under their earlier name, which the benchmarks import."""

from normfree_papers.claims.judgement import mean, mean_interval, share_interval

__all__ = ["mean", "mean_interval", "share_interval"]
