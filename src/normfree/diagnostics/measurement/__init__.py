"""What observes the one pass of `propagation.py`, and reduces tensors to numbers."""
