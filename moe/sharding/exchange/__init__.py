"""Exchange: this rank on a mesh, and what programs call where tensors move between ranks."""
