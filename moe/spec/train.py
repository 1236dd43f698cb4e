"""Training settings: steps, batches, schedule, precision, evaluation."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, Fraction, NonNegative, Positive, Spec, Text
from moe.spec.errors import Problem, RuleError, SpecError, spec_error
from moe.spec.optimizer import AdamWSpec, OptimizerSpec

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?:\d{1,9}[smhd])+")


def _duration(text: str) -> str:
    if not _DURATION.fullmatch(text) or seconds_of(text) <= 0:
        raise RuleError("invalid_value", "must be a duration", "write it as 90s, 10m, 1h30m or 2d")
    return text


def seconds_of(duration: str) -> float:
    """Return the seconds of a well-formed duration."""
    return float(sum(int(count) * _UNITS_S[unit] for count, unit in re.findall(r"(\d+)([smhd])", duration)))


Duration = Annotated[str, Field(max_length=40), AfterValidator(_duration)]


class ScheduleSpec(Spec):
    """Learning rate schedule: linear warm-up to the peak, then decay."""

    decay: Literal["inverse_sqrt", "cosine", "cosine_with_restarts", "linear", "constant", "warmup_stable_decay"] = (
        "cosine"
    )
    """`warmup_stable_decay` (WSD, arXiv 2404.06395) stays at the peak and decays only over the last `decay_steps`;
    `cosine_with_restarts` (SGDR, arXiv 1608.03983) starts `num_cycles` times from the peak."""
    warmup_steps: CountOrZero | None = None
    """Default: 8% of `num_steps`, at least 1."""
    final_fraction: NonNegative = Field(default=0.0, le=1)
    """Final learning rate of a decay, as a fraction of the peak. Ignored by `inverse_sqrt` and `constant`."""
    decay_steps: Count | None = None
    """For `warmup_stable_decay`: steps of the decay at the end. Default: 10% of `num_steps`, at least 1 if the
    warm-up leaves any."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = None
    """For `warmup_stable_decay`: shape of the decay at the end. Default: `1-sqrt` (arXiv 2405.18392)."""
    num_cycles: Count | None = None
    """For `cosine_with_restarts`: cosine cycles of equal length. Default: 2."""

    @model_validator(mode="after")
    def _check_fields(self) -> "ScheduleSpec":
        problems = [
            Problem("not_applicable", name, value, f"does not apply to the decay {self.decay}",
                    f"omit it, or use the decay {decay}")
            for decay, names in _FIELDS_OF_DECAY.items() if decay != self.decay
            for name in names if (value := getattr(self, name)) is not None
        ]  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self


_FIELDS_OF_DECAY = {"warmup_stable_decay": ("decay_steps", "decay_shape"), "cosine_with_restarts": ("num_cycles",)}


class EvaluationSpec(Spec):
    """Evaluation on held-out sets, during training and at its end."""

    every_steps: Count | None = None
    """Steps between held-out losses during training, each on `max_pairs_along_the_way` pairs of a set. Default:
    none."""
    max_pairs_along_the_way: Count = 512
    max_pairs: Count | None = None
    """Pairs per held-out set translated and scored at the end. Default: all."""
    max_sequences_along_the_way: Count = 64
    """For language models, instead of pairs: sequences per source."""
    max_sequences: Count | None = None
    """For language models: sequences per source measured at the end. Default: all."""
    stop_after: Count | None = None
    """Number of consecutive evaluations without improvement of `checkpoint.keep_best.metric`, or else of the mean
    held-out loss, after which training ends. Default: training does not end early."""
    prompts: tuple[Annotated[Text, Field(min_length=1, max_length=4000)], ...] = Field(default=(), max_length=16)
    """For language models: prompts to complete at each evaluation during training, greedily. User messages if the model
    is trained on conversations."""
    prompt_max_tokens: Count = Field(default=64, le=1024)
    """Maximum number of new tokens of a completion."""
    use_ema: StrictBool = False
    """Whether the average of the weights (`train.ema_decay`) is evaluated instead of the weights."""
    num_examples: CountOrZero = 8
    """Rows of source, reference and translation in the report; for language models, completions, at most 3."""


class ProfileSpec(Spec):
    """Steps to trace with torch's profiler; traces of each rank are in the job's storage, under `profile/`."""

    from_step: Count
    """First traced step, counted from 1."""
    num_steps: Count = Field(default=3, le=100)


PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo", "kto", "apo_zero_unpaired"]
UNPAIRED_LOSSES: tuple[PreferenceLoss, ...] = ("kto", "apo_zero_unpaired")
"""Losses of answers with a label, rather than of pairs."""
LOSSES_WITH_REFERENCE: tuple[PreferenceLoss, ...] = ("dpo", "ipo", *UNPAIRED_LOSSES)


class TrainSpec(Spec):
    num_steps: Count
    max_duration: Duration | None = None
    """Time limit such as `90m` or `1h30m`, after which training ends as after its last step, with checkpoint and
    evaluation. Counts steps of all attempts, but not loading, checkpoints or evaluations. Default: none."""
    batch_tokens: Count = Field(default=4096, le=1_000_000_000)
    """Positions of the global batch: sources and targets, including padding. Must be a multiple of the model's
    `moe.group_tokens`."""
    seed: CountOrZero = 0
    optimizer: OptimizerSpec = AdamWSpec(name="adamw")
    schedule: ScheduleSpec = ScheduleSpec()
    label_smoothing: Fraction | None = None
    """Default: 0.1 for translation, 0 for language models."""
    preference_loss: PreferenceLoss = "dpo"
    """Loss over pairs of answers, for `corpus: preference`: DPO (arXiv 2305.18290, eq. 7) or IPO (arXiv 2310.12036,
    eq. 17, per token), which compare with a reference model (the adapter's base, or a frozen copy of the initial
    weights); SimPO (arXiv 2405.14734, eq. 6) or ORPO (arXiv 2403.07691, eq. 6), which do not. Over answers with a
    label, for `corpus: unpaired_preference`: KTO (arXiv 2402.01306, eq. 7) or APO-zero (arXiv 2408.06266), which
    compare with a reference model."""
    preference_beta: Positive | None = Field(default=None, le=1000)
    """β of DPO, SimPO, KTO and APO-zero, τ of IPO, λ of ORPO. With a reference model, larger values keep the model
    closer to it. Default: 0.1; for SimPO 2.0."""
    preference_margin: NonNegative | None = Field(default=None, le=1000)
    """γ of SimPO: reward margin that the preferred answer should reach. Default: 1.0."""
    desirable_weight: NonNegative | None = Field(default=None, le=1000)
    """For KTO and APO-zero: factor of the losses of desirable answers. Default: 1.0."""
    undesirable_weight: NonNegative | None = Field(default=None, le=1000)
    """For KTO and APO-zero: factor of the losses of undesirable answers. Default: 1.0."""
    ema_decay: Fraction | None = Field(default=None, gt=0)
    """Decay per step of an exponential moving average of the weights, kept beside them in checkpoints, evaluated with
    `evaluation.use_ema` and exported with `shardyard export --ema`. Default: none."""
    clip_norm: Positive | None = 1.0
    """Maximum global gradient norm over all parameters."""
    dtype: Literal["float32", "bfloat16", "float64", "fp8"] = "float32"
    """Compute dtype. Under bfloat16, weights and optimizer state stay in float32. `fp8`, for operands of matrix
    products, is planned only."""
    dispatch_dtype: Literal["fp8"] | None = None
    """Dtype of rows dispatched to experts, with a scale per 128 elements; combined rows and all gradients keep the
    compute dtype. Default: the compute dtype. Planned only."""
    evaluation: EvaluationSpec = EvaluationSpec()
    freeze: tuple[Annotated[Text, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=100)
    """Name patterns of parameters to freeze; `*` matches any characters, as in `*.moe.router`. A frozen router's
    selection bias is frozen too."""

    cuda_graphs: StrictBool = False
    """Whether GPUs replay micro-batches as CUDA graphs, each with one launch by the host. For language models, in
    layouts whose ranks are replicas, so that micro-batches do not communicate. Costs logits of positions without a
    label."""
    profile: ProfileSpec | None = None
    """Profiler traces of some steps, which take more time and memory. Default: none."""

    @property
    def max_duration_s(self) -> float | None:
        """`max_duration` in seconds."""
        return None if self.max_duration is None else seconds_of(self.max_duration)

    @model_validator(mode="after")
    def _check_profile(self) -> "TrainSpec":
        if self.profile is not None and self.profile.from_step > self.num_steps:
            raise RuleError("out_of_range",
                            f"has profile.from_step (={self.profile.from_step}) after num_steps (={self.num_steps})",
                            "lower it, or omit profile")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_average(self) -> "TrainSpec":
        if self.evaluation.use_ema and self.ema_decay is None:
            raise spec_error("requires", "evaluation.use_ema", True, "requires an average of the weights",
                             "set ema_decay, or omit it")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_warm_up(self) -> "TrainSpec":
        warmup = self.schedule.warmup_steps
        if warmup is not None and warmup > self.num_steps:
            raise RuleError("out_of_range", f"warms up for {warmup} steps but runs only num_steps (={self.num_steps})",
                            "lower schedule.warmup_steps or omit it")  # fmt: skip
        if (cycles := self.schedule.num_cycles) is not None and 2 * cycles > self.num_steps - self.warmup_steps:
            raise spec_error("out_of_range", "schedule.num_cycles", cycles,
                             f"must leave each cycle two steps or more of the {self.num_steps - self.warmup_steps} "
                             "after the warm-up", "lower it, or omit it")  # fmt: skip
        if self.schedule.decay_steps is not None and self.warmup_steps + self.decay_steps > self.num_steps:
            raise spec_error("out_of_range", "schedule.decay_steps", self.decay_steps,
                             f"must fit between the {self.warmup_steps} steps of warm-up and the end of training, "
                             f"num_steps (={self.num_steps})",
                             "lower it or schedule.warmup_steps")  # fmt: skip
        return self

    @property
    def warmup_steps(self) -> int:
        if self.schedule.warmup_steps is not None:
            return self.schedule.warmup_steps
        return max(1, round(0.08 * self.num_steps))

    @property
    def decay_steps(self) -> int:
        """Steps of the decay at the end under `warmup_stable_decay`."""
        if self.schedule.decay_steps is not None:
            return self.schedule.decay_steps
        return min(max(1, round(0.1 * self.num_steps)), self.num_steps - self.warmup_steps)
