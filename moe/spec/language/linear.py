"""Linear attention of a decoder: Gated DeltaNet."""

from pydantic import StrictBool, model_validator

from moe.spec.base import Count, Spec
from moe.spec.block import AttentionDims, SavedWidths
from moe.spec.errors import spec_error
from moe.spec.parameter import Parameter, Size, linear, norm

CHUNK = 64
"""Positions whose state updates form one triangular system."""
POSITIONS_AT_ONCE = 16 * CHUNK
"""Positions of a row whose systems are in memory at the same time."""


class LinearAttentionSpec(Spec):
    """Linear attention (Gated DeltaNet, arXiv 2412.06464): a state of fixed size per head instead of keys and
    values."""

    num_key_heads: Count
    num_value_heads: Count
    key_dim: Count
    """Per head."""
    value_dim: Count
    conv_tokens: Count = 4
    """Kernel size of the convolution over queries, keys and values."""
    split_projections: StrictBool = False
    """Whether output gates and each of the two scalars per value head have projections of their own (Qwen3.5), instead
    of the gates sharing one with queries, keys and values, and the scalars another (Qwen3-Next)."""

    @model_validator(mode="after")
    def _check_heads(self) -> "LinearAttentionSpec":
        if self.num_value_heads % self.num_key_heads:
            raise spec_error("not_divisible", "num_value_heads", self.num_value_heads,
                        f"must be a multiple of num_key_heads (={self.num_key_heads})", "use a multiple")  # fmt: skip
        return self

    @property
    def values_per_key(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    def parameters(self, model_dim: int) -> tuple[Parameter, ...]:
        """Parameters of a layer. Rows are ordered by key head, so that tensor ranks have whole heads."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        width: Size = ("model", model_dim)
        conv: Size = ("none", self.conv_tokens)
        if self.split_projections:
            rows = {"projection": 2 * keys + values, "gate": values, "strength": self.num_value_heads,
                    "step": self.num_value_heads}  # fmt: skip
        else:
            rows = {"projection": 2 * keys + 2 * values, "decays": 2 * self.num_value_heads}
        return (
            *(linear(name, ("heads", num_rows), width) for name, num_rows in rows.items()),
            linear("convolution", ("heads", 2 * keys + values), conv),
            Parameter("decay", (self.num_value_heads,), ("heads",), log_of=(0.01, 16.0)),
            Parameter("time_step", (self.num_value_heads,), ("heads",)),
            norm("value_norm", self.value_dim),
            linear("output", width, ("heads", values)),
        )

    def dims(self, projections: int, window: int | None) -> AttentionDims:
        """Dimensions of a layer with `projections` weights, convolution included, without a window."""
        keys, heads = self.num_key_heads * self.key_dim, self.num_value_heads
        values = heads * self.value_dim
        kept_elements = 2 * (keys + values)  # before and after the convolution, with the gate
        projections -= (2 * keys + values) * self.conv_tokens
        return AttentionDims(
            2 * keys, heads * self.key_dim, values, kept_elements, projections, linear=self.value_dim, chunk=CHUNK,
            saved_widths=self._saved_widths(keys, values), heads=heads, key_heads=self.num_key_heads,
        )  # fmt: skip

    def _saved_widths(self, keys: int, values: int) -> SavedWidths:
        """Saved: inputs, outputs and activated outputs of the convolution; gates before and after activation; the
        state's outputs before and after their norm, and gated. In float32: queries and keys before and after
        normalization, values, scalars per head, periodic states.

        Temporary: systems of some chunks, with solutions and gradients.
        """
        heads = self.num_value_heads
        states = heads * self.key_dim * self.value_dim // POSITIONS_AT_ONCE
        wide = 4 * keys + values + 7 * heads + 2 * self.num_key_heads + states
        workspace = heads * (4 * CHUNK + 5 * (self.key_dim + self.value_dim)) + 2 * keys + values
        unfused = 2 * (2 * keys + values) + 6 * values
        return SavedWidths(
            0, 0, unfused=unfused, wide=wide, backward_temporaries=workspace, temporary_positions=POSITIONS_AT_ONCE
        )
