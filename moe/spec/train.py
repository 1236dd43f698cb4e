"""Training settings: steps, batches, optimizer, schedule, precision, evaluation."""

from math import prod
from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, Fraction, NonNegative, Positive, Spec, Text
from moe.spec.duration import Duration, seconds_of
from moe.spec.errors import RuleError


class AdamWSpec(Spec):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"]
    peak_lr: Positive = Field(default=1e-3, le=100)
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: Positive = 1e-9
    weight_decay: NonNegative = 0.0
    moments: Literal["float32", "bfloat16"] = "float32"
    """Numbers that both moments are kept in. Narrower ones can be planned, but not be run yet."""
    offload: StrictBool = False
    """Whether moments, and float32 weights where narrower ones are used, lie in the host's memory and are updated
    there. Can be planned, but not be run yet."""

    def state_elements(self, shape: tuple[int, ...], of_experts: bool) -> int:
        """Elements of optimizer state for a rank's `shape`: two moments."""
        return 2 * prod(shape)


class AdafactorSpec(Spec):
    """Adafactor (arXiv 1804.04235) without first moment, as the GShard paper uses it.

    Its factored statistics are kept for each expert, so that an update never depends on the layout.
    """

    name: Literal["adafactor"]
    peak_lr: Positive = Field(default=1e-2, le=100)
    beta2: Fraction = 0.99
    clip_threshold: Positive = 1.0
    """The largest root mean square of one tensor's (or one expert's) update."""
    eps: Positive = 1e-30
    """Added to squares of gradients, as published. So small, it makes whole steps of rounding where a gradient is zero
    in exact arithmetic; 1e-18 bounds them as AdamW's `eps` does."""
    weight_decay: NonNegative = 0.0

    def state_elements(self, shape: tuple[int, ...], of_experts: bool) -> int:
        """Elements of optimizer state for a rank's `shape`: row and column means of each matrix, experts apart; of a
        vector, one per element."""
        own = 1 if of_experts else 0
        if len(shape) - own < 2:
            return prod(shape)
        return prod(shape[:-1]) + prod(shape[:own]) * shape[-1]


OptimizerSpec = Annotated[AdamWSpec | AdafactorSpec, Field(discriminator="name")]


class ScheduleSpec(Spec):
    """The learning rate over steps: a linear warm-up to the peak, then a decay."""

    decay: Literal["inverse_sqrt", "cosine", "linear", "constant"] = "cosine"
    warmup_steps: CountOrZero | None = None
    """8% of num_steps when left out."""
    final_fraction: NonNegative = Field(default=0.0, le=1)
    """End of cosine and linear decay, as a share of the peak."""


class EvaluationSpec(Spec):
    """Evaluation on the held-out sets, when the run ends and along the way."""

    every_steps: Count | None = None
    """Held-out loss along the way, on `max_pairs_along_the_way` pairs of each set; never when left out."""
    max_pairs_along_the_way: Count = 512
    max_pairs: Count | None = None
    """Pairs of each held-out set translated and scored at the end; all of them when left out."""
    max_sequences_along_the_way: Count = 64
    """Of language models, in place of pairs: sequences of each source."""
    max_sequences: Count | None = None
    """Of language models: sequences of each source measured at the end; all of them when left out."""
    num_examples: CountOrZero = 8
    """Source / reference / translation rows kept in the report; of language models, completions, three at most."""


class ProfileSpec(Spec):
    """Steps that torch's profiler traces; each rank's trace lies in the job's storage, under `profile/`."""

    from_step: Count
    """The first of them, counted from 1."""
    num_steps: Count = Field(default=3, le=100)


class TrainSpec(Spec):
    num_steps: Count
    max_duration: Duration | None = None
    """Time of training, as `90m` or `1h30m`, after which it ends as at its last step, with a checkpoint and the
    evaluation. Steps count, over all attempts; loading, checkpoints and evaluations do not. No limit when left out."""
    batch_tokens: Count = Field(default=4096, le=1_000_000_000)
    """Positions of the global batch, sources and targets together, padding included. The model's
    `moe.group_tokens` divides it."""
    seed: CountOrZero = 0
    optimizer: OptimizerSpec = AdamWSpec(name="adamw")
    schedule: ScheduleSpec = ScheduleSpec()
    label_smoothing: Fraction | None = None
    """0.1 for translation and 0 for language models when left out."""
    preference_beta: Positive | None = Field(default=None, le=1000)
    """β of direct preference optimisation (arXiv 2305.18290, eq. 7), for `corpus: preference`; 0.1 when left out.
    Larger ones keep the model nearer to the one that it began as."""
    clip_norm: Positive | None = 1.0
    """The largest global norm of the gradients of all parameters together."""
    dtype: Literal["float32", "bfloat16", "float64", "fp8"] = "float32"
    """Precision of the arithmetic. Under bfloat16, weights and optimizer state stay float32. `fp8`, whose matrix
    products have 8-bit operands, can be planned, but not be run yet."""
    dispatch_dtype: Literal["fp8"] | None = None
    """Numbers that rows travel to experts in, with a scale for each 128 of them; back, and their gradients, they travel
    as wide as the arithmetic. As wide on all ways when left out. Can be planned, but not be run yet."""
    evaluation: EvaluationSpec = EvaluationSpec()
    freeze: tuple[Annotated[Text, Field(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=100
    )
    """Parameters that keep the values they begin with, by patterns of their names: `*` stands for any characters, as in
    `*.moe.router`, all routers. A frozen router's selection bias stays as it is too."""

    profile: ProfileSpec | None = None
    """Traces of some steps; none when left out. They take time and memory, so that these steps are slower."""

    @property
    def max_duration_s(self) -> float | None:
        """`max_duration` in seconds."""
        return None if self.max_duration is None else seconds_of(self.max_duration)

    @model_validator(mode="after")
    def _profile_comes(self) -> "TrainSpec":
        if self.profile is not None and self.profile.from_step > self.num_steps:
            raise RuleError(
                "out_of_range",
                f"has profile.from_step (={self.profile.from_step}) after num_steps (={self.num_steps})",
                "lower it, or leave profile out",
            )
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> "TrainSpec":
        warmup = self.schedule.warmup_steps
        if warmup is not None and warmup > self.num_steps:
            raise RuleError(
                "out_of_range",
                f"warms up for {warmup} steps but runs only num_steps (={self.num_steps})",
                "lower schedule.warmup_steps or leave it out",
            )
        return self

    @property
    def warmup_steps(self) -> int:
        if self.schedule.warmup_steps is not None:
            return self.schedule.warmup_steps
        return max(1, round(0.08 * self.num_steps))
