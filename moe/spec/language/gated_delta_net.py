"""Gated DeltaNet, a linear attention."""

from typing import Literal

from pydantic import StrictBool, model_validator

from moe.spec.base import Count
from moe.spec.block import AttentionDims, SavedWidths
from moe.spec.errors import spec_error
from moe.spec.language.chunks import CHUNK, POSITIONS_AT_ONCE
from moe.spec.language.linear import LinearAttentionSpec
from moe.spec.parameter import Parameter, Size, linear, norm


class GatedDeltaNetSpec(LinearAttentionSpec):
    """Linear attention (Gated DeltaNet, arXiv 2412.06464): a state of fixed size per head instead of keys and
    values."""

    kind: Literal["gated_delta_net"] = "gated_delta_net"
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
    def _check_heads(self) -> "GatedDeltaNetSpec":
        if self.num_value_heads % self.num_key_heads:
            raise spec_error("not_divisible", "num_value_heads", self.num_value_heads,
                        f"must be a multiple of num_key_heads (={self.num_key_heads})", "use a multiple")  # fmt: skip
        return self

    @property
    def values_per_key(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    def heads(self, model_dim: int) -> dict[str, int]:
        return {"linear_attention.num_key_heads": self.num_key_heads}

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

    def dims(self, model_dim: int) -> AttentionDims:
        """Dimensions of a layer.

        In chunks (arXiv 2412.06464, section 3.3) the state is read for queries and keys, and written; in a chunk, keys
        multiply keys and queries, the triangular system is solved for values and for keys that meet the state, and
        written values are weighted.
        """
        keys, heads = self.num_key_heads * self.key_dim, self.num_value_heads
        values, expanded_keys = heads * self.value_dim, heads * self.key_dim
        kept_elements = 2 * (keys + values)  # before and after the convolution, with the gate
        projections = model_dim * (2 * keys + 3 * values + 2 * heads)
        return AttentionDims(
            2 * keys, expanded_keys, values, kept_elements, projections, chunk=CHUNK,
            state_flops=6 * expanded_keys * self.value_dim, chunk_flops=4 * keys + expanded_keys + 3 * values,
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
