"""Decoding algorithms (greedy, sampling, beam search) for any model that returns next-token logits."""

from moe.tasks.decoding.beams import beam_search
from moe.tasks.decoding.sampling import choose_tokens, decode, sample_tokens
from moe.tasks.decoding.steps import DecodingSteps, ModelSteps

__all__ = ["DecodingSteps", "ModelSteps", "beam_search", "choose_tokens", "decode", "sample_tokens"]
