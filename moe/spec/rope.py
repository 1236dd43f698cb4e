"""Rotary position embedding (RoPE), and its scaling to longer sequences."""

from math import log
from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, NonNegative, Positive, Spec
from moe.spec.errors import RuleError

Factor = Annotated[float, Field(strict=True, ge=1)]
"""Extended sequence length divided by the original."""


class LinearScaling(Spec):
    """Position interpolation: positions divided by `factor` (arXiv 2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: Factor


class DynamicScaling(Spec):
    """Dynamic NTK: the base grows with sequence length beyond `original_tokens`."""

    kind: Literal["dynamic"] = "dynamic"
    factor: Factor
    original_tokens: Count
    """Length up to which the base is unchanged."""


class Llama3Scaling(Spec):
    """Llama 3.1: low frequencies divided by `factor`, high ones unchanged, those between blended, if there are any."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    original_tokens: Count
    low_frequency_factor: Positive = 1.0
    """Pairs with fewer rotations than this within `original_tokens` have low frequency."""
    high_frequency_factor: Positive = 4.0
    """Pairs with more rotations than this have high frequency."""

    @model_validator(mode="after")
    def _check_order(self) -> "Llama3Scaling":
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low > high:
            raise RuleError("out_of_range",
                            f"low_frequency_factor (={low}) must be at most high_frequency_factor (={high})",
                            "lower it")  # fmt: skip
        return self


class YarnScaling(Spec):
    """YaRN (arXiv 2309.00071): low frequencies divided by `factor`, high ones unchanged, blended along a ramp over
    dimensions; queries and keys scaled up."""

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_tokens: Count
    beta_fast: Positive = 32.0
    """Pairs with more rotations than this within `original_tokens` are unchanged."""
    beta_slow: Positive = 1.0
    """Frequencies of pairs with fewer rotations than this are divided by `factor`."""
    truncate: bool = Field(default=True, strict=True)
    """Whether the ramp's ends are rounded outward to whole dimensions."""
    attention_factor: Positive | None = None
    """Factor of cosines and sines. Default: from `factor`, and from `mscale` and `mscale_all_dim` if both are set."""
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None

    @model_validator(mode="after")
    def _check_order(self) -> "YarnScaling":
        fast, slow = self.beta_fast, self.beta_slow
        if fast < slow:
            raise RuleError("out_of_range", f"beta_fast (={fast}) must be at least beta_slow (={slow})", "raise it")
        return self


class LongRopeScaling(Spec):
    """LongRoPE (arXiv 2402.13753): each frequency divided by a factor of its own, and cosines and sines multiplied by
    one factor, each of two kinds, for sequences of up to `original_tokens` and for longer ones (Phi-3.5-MoE)."""

    kind: Literal["longrope"] = "longrope"
    original_tokens: Count
    """Length up to which the short factors apply."""
    short_factors: tuple[Positive, ...] = Field(max_length=4096)
    """Divisors of the r / 2 frequencies in sequences of at most `original_tokens`."""
    long_factors: tuple[Positive, ...] = Field(max_length=4096)
    """Divisors of the frequencies in longer sequences."""
    short_mscale: Positive = 1.0
    """Factor of cosines and sines in sequences of at most `original_tokens`."""
    long_mscale: Positive = 1.0
    """Factor of cosines and sines in longer sequences."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "LongRopeScaling":
        short, long = len(self.short_factors), len(self.long_factors)
        if short != long:
            raise RuleError("mismatch", f"long_factors (of {long}) must be as many as short_factors (of {short})",
                            "use one for each frequency in both")  # fmt: skip
        return self


RopeScaling = Annotated[
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling, Field(discriminator="kind")
]


class RopeSpec(Spec):
    """Rotary position embedding (RoPE, arXiv 2104.09864)."""

    base: Annotated[float, Field(strict=True, gt=1)] = 10000.0
    """Pair i of r / 2 rotates by base ** (-2i / r) radians per position."""
    fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0
    """Fraction of a head's dimensions that rotate, from the first on; 0: no rotary embedding (NoPE)."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that rotate together: (i, i + r / 2), or (2i, 2i + 1)."""
    proportional: StrictBool = False
    """Whether `fraction` selects pairs of the whole head (r = head_dim), from the first on, instead of dimensions
    (Gemma 4)."""
    scaling: RopeScaling | None = None

    @model_validator(mode="after")
    def _check_proportional(self) -> "RopeSpec":
        if self.proportional and not isinstance(self.scaling, LinearScaling | None):
            raise RuleError("unsupported", "scaling with proportional must be linear", "omit one of them")
        return self

    def rotated_dim(self, head_dim: int) -> int:
        """Rotated dimensions of a head, r. Raises ValueError if odd or too few."""
        if self.proportional and head_dim % 2:
            raise RuleError("not_divisible", f"head_dim (={head_dim}) must be even with proportional", "change it")
        dim = head_dim if self.proportional else int(head_dim * self.fraction)
        if dim % 2 or (not dim and self.fraction):
            raise RuleError(
                "not_divisible",
                f"head_dim (={head_dim}) times fraction (={self.fraction}) must be even and at least 2, not {dim}",
                "change one of them",
            )
        if isinstance(self.scaling, LongRopeScaling) and len(self.scaling.short_factors) != dim // 2:
            raise RuleError(
                "mismatch",
                f"scaling.short_factors (of {len(self.scaling.short_factors)}) must be one for each of the {dim // 2} "
                "frequencies of a head",
                "correct them",
            )
        if dim == 2 and isinstance(self.scaling, DynamicScaling):
            raise RuleError(
                "out_of_range", "dynamic scaling requires at least 4 rotated dimensions, not 2", "use linear scaling"
            )
        return dim

    def num_rotating_pairs(self, head_dim: int) -> int:
        """Pairs of dimensions that rotate; others among the r / 2 pairs have the frequency 0."""
        return int(self.fraction * head_dim // 2) if self.proportional else self.rotated_dim(head_dim) // 2

    @property
    def sharpening(self) -> float:
        """YaRN's M(mscale_all_dim), squared in the scores of latent attention (DeepSeek); else 1."""
        scaling = self.scaling
        if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
            return 1.0
        return 0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1
