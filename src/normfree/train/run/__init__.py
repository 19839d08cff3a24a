"""A run on disk: its folder, checkpoints, lock, result and logs."""
