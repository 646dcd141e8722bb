"""Training: one loop with its optimizer, checkpoints and metrics, and the recipes that run on it."""
