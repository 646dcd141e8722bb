"""Training data: sources of documents, mixtures, packed batches, shifted positions."""
