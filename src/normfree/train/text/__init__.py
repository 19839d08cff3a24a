"""Training on text: token batches, decoding, translation and generation."""
