"""Decoding algorithms (greedy, sampling, beam search) for any model that returns next-token logits."""

from moe.tasks.decoding.beams import beam_search
from moe.tasks.decoding.choice import choose_tokens
from moe.tasks.decoding.decode import decode
from moe.tasks.decoding.model_steps import ModelSteps
from moe.tasks.decoding.one_by_one import one_by_one
from moe.tasks.decoding.steps import DecodingSteps

__all__ = ["DecodingSteps", "ModelSteps", "beam_search", "choose_tokens", "decode", "one_by_one"]
