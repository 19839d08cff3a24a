"""Images: sets in memory, folders, augmentation and batches."""
