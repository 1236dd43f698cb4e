"""The control plane: accepts job specs over HTTP and keeps jobs running on a Ray cluster."""
