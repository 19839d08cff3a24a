"""Folding: batch norms and scalars become part of the weights beside them."""
