"""Optimizers, and settings of parameter groups."""

from collections.abc import Collection, Iterator
from math import prod
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, StrictBool, model_validator

from moe.spec.base import Count, Fraction, NonNegative, Positive, Spec, Text
from moe.spec.errors import Problem, SpecError
from moe.spec.patterns import layer_pattern, matches


class ParameterGroupSpec(Spec):
    """Learning rate and weight decay of the parameters whose names match a pattern."""

    pattern: Text = Field(min_length=1, max_length=256)
    """Name pattern; `*` matches any characters, as in `*.moe.router`."""
    lr_factor: Positive = Field(default=1.0, le=1000)
    """Factor of the learning rate, at every step of the schedule."""
    weight_decay: NonNegative | None = None
    """Default: as without a group."""


class UpdateSettings(NamedTuple):
    """Settings of one parameter's updates."""

    lr_factor: float
    weight_decay: float


class _OptimizerFields(Spec):
    """Fields of all optimizers."""

    is_elementwise: ClassVar[bool] = False
    """Whether an element's update depends only on that element, so that shards can be updated independently."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, of matrices only unless `decay_vectors`."""
    decay_vectors: StrictBool = False
    """Whether weight decay applies to norms, biases and other vectors too."""
    groups: tuple[ParameterGroupSpec, ...] = Field(default=(), max_length=100)
    """Parameters with settings of their own. A parameter belongs to the first group that matches it."""

    @property
    def resolved(self) -> Self:
        """The same, with equal fields for equal meaning."""
        return self if self.weight_decay else self.model_copy(update={"decay_vectors": False})

    def update_settings(self, name: str, *, is_vector: bool) -> UpdateSettings:
        """Settings of a parameter. `is_vector`: whether it, or each expert's part of it, is no matrix."""
        default_decay = 0.0 if is_vector and not self.decay_vectors else self.weight_decay
        for group in self.groups:
            if matches(group.pattern, name):
                decay = default_decay if group.weight_decay is None else group.weight_decay
                return UpdateSettings(group.lr_factor, decay)
        return UpdateSettings(1.0, default_decay)

    def group_problems(self, trained_names: Collection[str]) -> Iterator[Problem]:
        """Problems of groups without parameters. Paths are those in a job."""
        for index, group in enumerate(self.groups):
            place = f"train.optimizer.groups[{index}].pattern"
            matching = [name for name in trained_names if matches(group.pattern, name)]
            if not matching:
                kinds = dict.fromkeys(map(layer_pattern, trained_names))
                yield Problem("not_found", place, group.pattern, "matches no trained parameter of the model",
                              f"use one of {', '.join(kinds)}")  # fmt: skip
            elif all(any(matches(other.pattern, name) for other in self.groups[:index]) for name in matching):
                yield Problem("duplicate", place, group.pattern, "matches only parameters of earlier groups",
                              "put it before them, or omit it")  # fmt: skip


MIN_QUANTIZED_ELEMENTS = 4096
"""Elements of the smallest parameter with 8-bit moments, as in bitsandbytes and torchao."""
_BLOCK_ELEMENTS = (256, 128, 64, 32)


def moment_block_elements(shape: tuple[int, ...], *, of_experts: bool) -> int | None:
    """Elements of a block of 8-bit moments of a full parameter: the most, up to 256, of which whole blocks fill a row
    along the last dimension, so that blocks do not depend on the layout. None if its moments are float32: those of
    vectors, of small parameters, and of rows that blocks of 32 do not fill."""
    if len(shape) - of_experts < 2 or prod(shape) < MIN_QUANTIZED_ELEMENTS:
        return None
    return next((number for number in _BLOCK_ELEMENTS if shape[-1] % number == 0), None)


_MAX_NARROW_BETA = 1 - 2**-8
"""Smaller relative changes, 1 - beta, may be rounded away in bfloat16."""


class AdamWSpec(_OptimizerFields):
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    is_elementwise: ClassVar[bool] = True

    name: Literal["adamw"]
    peak_lr: Positive = Field(default=1e-3, le=100)
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: Positive = 1e-9
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Dtype that both moments are stored in. The update is computed in that of the weights. `8bit`: codes with a scale
    per block of 256 (arXiv 2110.02861) for matrices of 4,096 elements or more, float32 for other parameters."""
    offload: StrictBool = False
    """Whether moments of weights on a GPU are stored in host memory, where the update is computed. Same results."""

    @model_validator(mode="after")
    def _check_moments(self) -> "AdamWSpec":
        problems = [
            Problem("out_of_range", name, beta, f"must be below {_MAX_NARROW_BETA} with moments in bfloat16, in which "
                    "they would never decrease", "lower it, or use moments: float32")
            for name, beta in (("beta1", self.beta1), ("beta2", self.beta2))
            if self.moments == "bfloat16" and beta >= _MAX_NARROW_BETA
        ]  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

    def state_elements(
        self, shape: tuple[int, ...], *, full_shape: tuple[int, ...], of_experts: bool, is_hidden_matrix: bool
    ) -> int:
        """Elements of optimizer state for a rank's `shape`: two moments; with 8-bit ones, bytes of codes and scales.
        Ranks whose shards cut blocks have the scales of full rows."""
        if self.moments != "8bit":
            return 2 * prod(shape)
        block_elements = moment_block_elements(full_shape, of_experts=of_experts)
        if block_elements is None:
            return 2 * 4 * prod(shape)
        row_elements = full_shape[-1] if shape[-1] % block_elements else shape[-1]
        return 2 * (prod(shape) + 4 * prod(shape[:-1]) * row_elements // block_elements)


class AdafactorSpec(_OptimizerFields):
    """Adafactor (arXiv 1804.04235) without a first moment, as in the GShard paper.

    Factored statistics are per expert: updates do not depend on the layout.
    """

    name: Literal["adafactor"]
    peak_lr: Positive = Field(default=1e-2, le=100)
    beta2: Fraction = 0.99
    clip_threshold: Positive = 1.0
    """Maximum root mean square of the update of a tensor, or of one expert's part of it."""
    eps: Positive = 1e-30
    """Added to squared gradients; the default is the published value. With it, rounding errors of gradients that are
    zero in exact arithmetic become full steps; 1e-18 bounds these as AdamW's `eps` does."""

    def state_elements(
        self, shape: tuple[int, ...], *, full_shape: tuple[int, ...], of_experts: bool, is_hidden_matrix: bool
    ) -> int:
        """Elements of optimizer state for a rank's `shape`: row and column means of each matrix, separately per expert;
        one per element of a vector."""
        num_expert_dims = 1 if of_experts else 0
        if len(shape) - num_expert_dims < 2:
            return prod(shape)
        return prod(shape[:-1]) + prod(shape[:num_expert_dims]) * shape[-1]


class MuonSpec(_OptimizerFields):
    """Muon (https://kellerjordan.github.io/posts/muon/) for hidden matrices, each expert's by itself, and AdamW for all
    other parameters: embeddings, output projections, routers, norms, biases.

    Updates of matrices are scaled to the usual size of AdamW's (arXiv 2502.16982), so that learning rate and weight
    decay are for both.
    """

    name: Literal["muon"]
    peak_lr: Positive = Field(default=1e-3, le=100)
    momentum: Fraction = 0.95
    nesterov: StrictBool = True
    ns_steps: Count = Field(default=5, le=20)
    """Steps of the Newton-Schulz iteration that orthogonalizes the momentum."""
    beta1: Fraction = 0.9
    """β1 of AdamW, which updates all other parameters; likewise `beta2` and `eps`."""
    beta2: Fraction = 0.98
    eps: Positive = 1e-9

    def state_elements(
        self, shape: tuple[int, ...], *, full_shape: tuple[int, ...], of_experts: bool, is_hidden_matrix: bool
    ) -> int:
        """Elements of optimizer state for a rank's `shape`: the momentum, or AdamW's two moments."""
        return prod(shape) if is_hidden_matrix else 2 * prod(shape)


OptimizerSpec = Annotated[AdamWSpec | AdafactorSpec | MuonSpec, Field(discriminator="name")]
