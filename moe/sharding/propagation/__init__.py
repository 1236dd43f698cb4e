"""Propagation: from hints to the tensors of a captured graph."""
