"""Training: batches, steps, checkpoints, evaluation."""
