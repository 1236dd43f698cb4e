"""Triton kernels of a mixture-of-experts layer on GPUs. All modules but `support`
import Triton.

Shapes: `T` tokens, `K` experts per token, `E` experts, `M` model dimension, `H` hidden dimension, `n` rows (at most
T · K), one per kept choice, sorted by expert, then token.
"""
