"""Kinds of models that can be trained, a folder each."""
