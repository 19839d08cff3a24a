"""Text: vocabularies, prepared folders and batches of tokens."""
