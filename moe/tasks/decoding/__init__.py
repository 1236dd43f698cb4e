"""Decoding algorithms (greedy, sampling, beam search) for any model that returns next-token logits."""

from moe.tasks.decoding.beams import beam_search
from moe.tasks.decoding.one_by_one import choose_tokens, decode, one_by_one
from moe.tasks.decoding.steps import DecodingSteps, ModelSteps

__all__ = ["DecodingSteps", "ModelSteps", "beam_search", "choose_tokens", "decode", "one_by_one"]
