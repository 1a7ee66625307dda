"""Image files to embeddings: decoding, patches, the vision tower."""
