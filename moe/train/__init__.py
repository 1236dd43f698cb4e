"""The run: batches, steps, checkpoints, evaluation."""
