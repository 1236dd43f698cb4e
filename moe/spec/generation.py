"""Text generation: sampling, beam search and stop conditions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Positive, Spec, Text
from moe.spec.errors import Problem, SpecError

MAX_NEW_TOKENS = 1 << 20
MAX_BEAMS = 64
_LENGTH_PENALTY = 0.6
_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
"""Options that only sampling has, with the values that change nothing."""


class GenerationSpec(Spec):
    """How tokens are chosen: greedily, by sampling or by beam search.

    Options that are None take a model's own settings in `resolve`.
    """

    max_tokens: Count = Field(default=256, le=MAX_NEW_TOKENS)
    """Maximum number of new tokens."""
    temperature: NonNegative | None = Field(default=None, le=100)
    """Divides the logits before sampling; 0 is greedy. Default: the model's, or greedy."""
    top_k: CountOrZero | None = None
    """Sample from the k most likely tokens; 0: from all. Default: the model's, or all."""
    top_p: Positive | None = Field(default=None, le=1)
    """Sample from the most likely tokens whose probabilities add up to this (nucleus sampling, arXiv 1904.09751); 1:
    from all. Default: the model's, or 1."""
    min_p: NonNegative | None = Field(default=None, le=1)
    """Sample from tokens with at least this share of the most likely one's probability (arXiv 2407.01082); 0: from all.
    Default: the model's, or 0."""
    repetition_penalty: Positive | None = Field(default=None, le=100)
    """Divides positive scores and multiplies negative ones of tokens that the text has (arXiv 1909.05858); 1: none.
    Scores are logits, or log-probabilities in beam search. Default: the model's, or 1."""
    num_beams: Count = Field(default=1, le=MAX_BEAMS)
    """Number of beams; 1 disables beam search."""
    length_penalty: NonNegative = Field(default=_LENGTH_PENALTY, le=10)
    """Exponent of length normalization in beam search: log-likelihood of n tokens divided by ((5 + n) / 6)^exponent
    (arXiv 1609.08144, eq. 14)."""
    stop: tuple[Annotated[Text, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    """Stop strings: the text ends before the first one that occurs."""
    chat: StrictBool = False
    """Whether the prompt is a user's message, rendered by the chat template, and the text the answer."""
    log_probs: StrictBool = False
    """Whether streams return the log-probability of every new token under the model, before temperature, penalty and
    filters."""
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
        if self.num_beams > 1 and self.log_probs:
            problems.append(Problem("not_applicable", "log_probs", True, "does not apply to beam search",
                                    "omit it, or num_beams"))  # fmt: skip
        options = [name for name, neutral in _SAMPLING.items() if getattr(self, name) not in (None, neutral)]
        if options and (self.temperature == 0 or (self.temperature is None and self.num_beams > 1)):
            rule = "has no effect on greedy decoding (temperature is 0)"
            remedy = "set a temperature, such as 1, or omit it"
            problems += [Problem("not_applicable", name, getattr(self, name), rule, remedy) for name in options]
        if problems:
            raise SpecError(problems)
        return self

    def resolve(self, model_settings: Mapping[str, float] = MappingProxyType({})) -> "GenerationSpec":
        """Spec with a temperature: with `model_settings`, by field, for options that are None, else greedy.

        Greedy decoding and beam search take no sampling options from `model_settings`. Raises SpecError for sampling
        options without a temperature.
        """
        fields = self.model_dump(exclude_none=True)
        temperature = 0.0 if self.num_beams > 1 else fields.get("temperature", model_settings.get("temperature", 0.0))
        settings = {name: value for name, value in model_settings.items() if temperature or name not in _SAMPLING}
        return GenerationSpec(**{**settings, **fields, "temperature": temperature})
