"""Further passes: of a few samples for any model, and of the whole batch to find the module behind a fault."""
