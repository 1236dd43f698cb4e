"""Applied modules: this rank's parts, and the program that computes with them."""
