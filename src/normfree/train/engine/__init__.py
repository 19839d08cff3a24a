"""The engine: the setup of a run, its training step and its training loop."""
