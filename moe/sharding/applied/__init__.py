"""Applied modules: this rank's parts of tensors, and the program that computes with them."""
