"""Sharding of any torch module: where its tensors lie on a mesh of one or two axes, and what moves them."""
