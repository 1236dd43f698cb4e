"""Constants of kernels, fitted on tables of measurements on GPUs."""
