"""Constants of kernels, fitted on tables of what was measured on real GPUs."""
