"""Checkpoints of applied modules, part by part, and loaded at any other plan."""
