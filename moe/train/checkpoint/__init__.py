"""Checkpoints: written asynchronously, committed by a marker, loaded on any number of ranks (resharding)."""
