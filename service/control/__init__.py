"""The control plane: accepts job specs over HTTP, keeps jobs running on a Ray cluster, and reports on them."""
