"""Checkpoints: written beside training, committed by a marker, read at any number of ranks."""
