"""Mamba-2, a state-space model that is a linear attention with decay."""

from dataclasses import replace
from typing import Literal

from pydantic import StrictBool, model_validator

from moe.spec.base import Count, NonNegative
from moe.spec.block import AttentionDims, SavedWidths
from moe.spec.errors import spec_error
from moe.spec.language.chunks import CHUNK, POSITIONS_AT_ONCE
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.parameter import Parameter, Size, bias, linear, norm


class Mamba2Spec(LinearAttentionSpec):
    """Mamba-2 (arXiv 2405.21060): each head has a state of `state_dim` times `head_dim`, which decays by a time step
    that depends on the token."""

    kind: Literal["mamba2"]
    num_heads: Count
    head_dim: Count
    state_dim: Count
    num_groups: Count = 1
    """Groups of heads that share B and C, the projections into and out of the state; the norm of the output is over one
    group. Tensor ranks have whole groups."""
    conv_tokens: Count = 4
    """Kernel size of the convolution over the heads' inputs, B and C."""
    conv_bias: StrictBool = True
    bias: StrictBool = False
    """Whether the projections have a bias."""
    min_time_step: NonNegative = 0.0
    """Lower bound of time steps."""

    @model_validator(mode="after")
    def _check_groups(self) -> "Mamba2Spec":
        if self.num_heads % self.num_groups:
            raise spec_error("not_divisible", "num_groups", self.num_groups,
                             f"must divide num_heads (={self.num_heads})", "use one of its divisors")  # fmt: skip
        return self

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def group_widths(self) -> tuple[int, int, int, int, int]:
        """Widths of a group's gates, inputs, B, C and time steps in the projection."""
        inner = self.heads_per_group * self.head_dim
        return inner, inner, self.state_dim, self.state_dim, self.heads_per_group

    def heads(self, model_dim: int) -> dict[str, int]:
        return {"linear_attention.num_groups": self.num_groups}

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Parameters of a layer. Rows are ordered by group, so that tensor ranks have whole groups."""
        inner, states = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        width: Size = ("model", model_dim)
        projected: Size = ("heads", 2 * inner + 2 * states + self.num_heads)
        channels: Size = ("heads", inner + 2 * states)
        per_head = Parameter("skip", (self.num_heads,), ("heads",))
        table = [
            linear("projection", projected, width),
            linear("convolution", channels, ("none", self.conv_tokens)),
            replace(per_head, name="decay", log_of=(1.0, 16.0)),
            replace(per_head, name="time_step", log_of=(0.001, 0.1)),  # softplus(log(t)) is about t
            per_head,
            norm("group_norm", inner, "heads"),
            linear("out_projection", width, ("heads", inner)),
        ]
        table += [bias("convolution", channels)] if self.conv_bias else []
        table += [bias("projection", projected), bias("out_projection", width)] if self.bias else []
        return tuple(table)

    def dims(self, model_dim: int) -> AttentionDims:
        """Dimensions of a layer. The state is read and written; in a chunk, scores of C and B weigh the inputs."""
        inner, states = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return AttentionDims(
            states, self.num_heads * self.state_dim, inner, states + inner,
            model_dim * (3 * inner + 2 * states + self.num_heads), chunk=CHUNK,
            state_flops=4 * inner * self.state_dim, chunk_flops=2 * (states + inner),
            saved_widths=self._saved_widths(inner, states), heads=self.num_heads, key_heads=self.num_groups,
        )  # fmt: skip

    def _saved_widths(self, inner: int, states: int) -> SavedWidths:
        """Saved: inputs and outputs of the convolution, inputs of the heads, and normed outputs. In float32: B and C;
        inputs of the heads, also times time steps; outputs, gates before and after activation, gated outputs before
        and after their norm; scalars per head, periodic states. Temporary: scores and decays of some chunks."""
        channels, periodic_states = inner + 2 * states, inner * self.state_dim // POSITIONS_AT_ONCE
        wide = 7 * inner + 2 * states + 5 * self.num_heads + periodic_states
        workspace = self.num_heads * 4 * CHUNK + 2 * inner + 2 * states
        unfused = 2 * channels + 2 * inner
        return SavedWidths(
            0, 0, unfused=unfused, wide=wide, backward_temporaries=workspace, temporary_positions=POSITIONS_AT_ONCE
        )
