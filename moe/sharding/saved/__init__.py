"""Checkpoints of applied modules: written part by part, and loaded with any other plan."""
