"""The engine: what a run is set up with, its step and its loop."""
