"""Exchange: this rank on a mesh, and the functions with which programs move tensors between ranks."""
