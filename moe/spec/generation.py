"""Text generation: sampling, beam search and stop conditions."""

from typing import Annotated

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Positive, Spec, Text
from moe.spec.errors import Problem, SpecError

MAX_NEW_TOKENS = 1 << 20
MAX_BEAMS = 64
_LENGTH_PENALTY = 0.6


class GenerationSpec(Spec):
    """How tokens are chosen: greedily, by sampling or by beam search."""

    max_tokens: Count = Field(default=256, le=MAX_NEW_TOKENS)
    """Maximum number of new tokens."""
    temperature: NonNegative = Field(default=0.0, le=100)
    """Divides the logits before sampling; 0 is greedy."""
    top_k: Count | None = None
    """Sample from the k most likely tokens. Default: from all."""
    top_p: Positive = Field(default=1.0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this (nucleus sampling, arXiv 1904.09751)."""
    num_beams: Count = Field(default=1, le=MAX_BEAMS)
    """Number of beams; 1 disables beam search."""
    length_penalty: NonNegative = Field(default=_LENGTH_PENALTY, le=10)
    """Exponent of length normalization in beam search: log-likelihood of n tokens divided by ((5 + n) / 6)^exponent
    (arXiv 1609.08144, eq. 14)."""
    stop: tuple[Annotated[Text, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    """Stop strings: the text ends before the first one that occurs."""
    chat: StrictBool = False
    """Whether the prompt is a user's message, rendered by the chat template, and the text the answer."""
    seed: CountOrZero = 0
    """Draws are keyed by seed, text number and position: the same on every layout."""

    @model_validator(mode="after")
    def _check_options(self) -> "GenerationSpec":
        problems = []
        if self.num_beams > 1 and self.temperature:
            problems.append(Problem("not_applicable", "num_beams", self.num_beams,
                                    f"has no effect on sampling (temperature is {self.temperature})",
                                    "omit one of them"))  # fmt: skip
        if self.num_beams == 1 and self.length_penalty != _LENGTH_PENALTY:
            problems.append(Problem("not_applicable", "length_penalty", self.length_penalty,
                                    "has no effect without beam search",
                                    "set several beams, such as 4, or omit it"))  # fmt: skip
        sampling_defaults = {"top_k": None, "top_p": 1.0, "seed": 0}
        options = [name for name, default in sampling_defaults.items() if getattr(self, name) != default]
        if options and not self.temperature:
            rule = "has no effect on greedy decoding (temperature is 0)"
            remedy = "set a temperature, such as 1, or omit it"
            problems += [Problem("not_applicable", name, getattr(self, name), rule, remedy) for name in options]
        if problems:
            raise SpecError(problems)
        return self
