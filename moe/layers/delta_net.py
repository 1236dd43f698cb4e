"""Gated DeltaNet: linear attention with a fixed-size state (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.cache import RecurrentState
from moe.layers.delta_rule import gated_delta_rule, gated_delta_rule_of_chunks
from moe.layers.linear import Linear
from moe.layers.norm import RMSNorm
from moe.layers.sequence import PassRows
from moe.layers.short_convolution import ShortConvolution
from moe.spec.language import GatedDeltaNetSpec

_LENGTH_EPS = 1e-6


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer. If split over tensor-parallel ranks, each has some of the heads and processes all
    tokens."""

    decay: nn.Parameter
    """`[value heads]`: logarithm of the decay rate."""
    time_step: nn.Parameter
    """`[value heads]`"""

    def __init__(self, spec: GatedDeltaNetSpec, *, norm_eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.projection, self.convolution, self.output = Linear(), ShortConvolution(), Linear()
        if spec.split_projections:
            self.gate, self.strength, self.step = Linear(), Linear(), Linear()
        else:
            self.decays = Linear()
        self.value_norm = RMSNorm(norm_eps)
        self.register_parameter("decay", None)
        self.register_parameter("time_step", None)

    def forward(self, x: Tensor, rows: PassRows, cache: RecurrentState | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, they continue from its state
        and update it."""
        spec, shard = self.spec, rows.shard
        x = shard.gather_rows(x)
        value_width = spec.values_per_key * spec.value_dim
        widths = [spec.key_dim, spec.key_dim, value_width]
        qkv, gates, strengths, steps = self._project(x, rows)
        qkv = functional.silu(self.convolution(qkv, rows, cache)).unflatten(-1, (-1, sum(widths)))
        queries, keys, values = qkv.split(widths, dim=-1)
        values = values.unflatten(-1, (-1, spec.value_dim)).flatten(2, 3)
        inputs = (
            _unit(queries) * spec.key_dim**-0.5, _unit(keys), values, self._log_decay(steps), strengths.sigmoid(),
        )  # fmt: skip
        if (chunks := rows.chunks) is not None:
            outputs = gated_delta_rule_of_chunks(*inputs, chunks)
        else:
            initial = None if cache is None else cache.state
            outputs, state = gated_delta_rule(*inputs, documents=rows.documents, state=initial)
            if cache is not None:
                cache.state = state
        gates = gates.unflatten(-1, (-1, spec.value_dim))
        outputs = self.value_norm(outputs.to(x.dtype)) * functional.silu(gates)
        return shard.scatter_rows(self.output(outputs.flatten(2), rows.dropout_key))

    def _project(self, x: Tensor, rows: PassRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values by key head; output gates; and, per value head, logits of the strength of writing,
        and steps of the decay. All are `[B, N, width]`, for `x` `[B, N, M]`."""
        spec, key = self.spec, rows.dropout_key
        if spec.split_projections:
            return self.projection(x, key), self.gate(x, key), self.strength(x, key), self.step(x, key)
        value_width = spec.values_per_key * spec.value_dim
        widths = [2 * spec.key_dim + value_width, value_width]
        qkv, gates = self.projection(x, key).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        strengths, steps = self.decays(x, key).unflatten(-1, (-1, 2, spec.values_per_key)).unbind(-2)
        return qkv.flatten(-2), gates.flatten(-2), strengths.flatten(-2), steps.flatten(-2)

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> RecurrentState:
        """State before the first token."""
        return RecurrentState()

    def _log_decay(self, steps: Tensor) -> Tensor:
        """`[B, N, value heads]`: log decay, at most 0, in at least float32."""
        wide = torch.promote_types(steps.dtype, torch.float32)
        rate = self.decay.to(wide).exp()
        return -rate * functional.softplus(steps.to(wide) + self.time_step.to(wide))


def _unit(x: Tensor) -> Tensor:
    """L2-normalize `x` `[..., d]`, in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()
