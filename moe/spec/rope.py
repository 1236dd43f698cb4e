"""Rotary positions (RoFormer, arXiv 2104.09864), and how they are stretched for texts longer than a model was trained
on."""

from math import log
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from moe.spec.base import Count, Positive, Spec


class LinearScaling(Spec):
    """Positions divided by a factor (arXiv 2306.15595)."""

    kind: Literal["linear"]
    factor: Positive = Field(ge=1)


class DynamicScaling(Spec):
    """A base that grows with the length of the sequence, once that is above `original_tokens` (dynamic NTK)."""

    kind: Literal["dynamic"]
    factor: Positive = Field(ge=1)
    original_tokens: Count


class Llama3Scaling(Spec):
    """Low frequencies divided by a factor, high ones left, and those between blended (Llama 3.1)."""

    kind: Literal["llama3"]
    factor: Positive = Field(ge=1)
    original_tokens: Count
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0


class YarnScaling(Spec):
    """YaRN (arXiv 2309.00071)."""

    kind: Literal["yarn"]
    factor: Positive
    original_tokens: Count
    beta_fast: Positive = 32.0
    """Turns within `original_tokens` above which a frequency is left as it is."""
    beta_slow: Positive = 1.0
    """Turns below which it is divided by the factor."""
    truncate: StrictBool = True
    """Whether the channels between which frequencies are blended are rounded outwards to whole ones."""
    attention_factor: Positive | None = None
    """Multiplies cosines and sines; 0.1·ln(factor) + 1 when left out, with `mscale` where that is given."""
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    """Where both are given, the factor is M(mscale) / M(mscale_all_dim), M(c) = 0.1·c·ln(factor) + 1; latent attention
    multiplies its scores by M(mscale_all_dim)² (DeepSeek)."""


RopeScaling = Annotated[
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")
]


class RopeSpec(Spec):
    """Positions that turn pairs of channels of queries and keys."""

    base: Positive = 10_000.0
    fraction: Positive = Field(default=1.0, le=1)
    """Share of a head's channels that turn, the first ones."""
    pairing: Literal["half", "interleaved"] = "half"
    """Channels that turn together, of the r that turn: i and i + r/2, or 2i and 2i + 1."""
    scaling: RopeScaling | None = None

    def turned(self, head_dim: int) -> int:
        """Channels of a head that turn."""
        return int(head_dim * self.fraction)

    @property
    def sharpening(self) -> float:
        """M(mscale_all_dim) of YaRN; 1 without it."""
        scaling = self.scaling
        if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None or scaling.factor <= 1:
            return 1.0
        return 0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1
