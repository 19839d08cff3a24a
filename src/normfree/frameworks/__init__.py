"""Callbacks and helpers for training frameworks; each module imports its framework, so import the one that you use.

- `normfree.frameworks.huggingface`: `Trainer` and checkpoints of transformers.
- `normfree.frameworks.lightning`: Lightning.
"""
