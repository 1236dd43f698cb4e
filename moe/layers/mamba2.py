"""Mamba-2 (arXiv 2405.21060), as in Granite 4 and Nemotron 3."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.cache import RecurrentState
from moe.layers.linear import Linear
from moe.layers.norm import RMSNorm, rms_norm
from moe.layers.sequence import PassRows
from moe.layers.short_convolution import ShortConvolution
from moe.layers.state_space import state_space, state_space_of_chunks
from moe.spec.language import Mamba2Spec


class Mamba2(nn.Module):
    """Mamba-2 of one layer. If split over tensor-parallel ranks, each has some of the groups and processes all
    tokens."""

    decay: nn.Parameter
    """`[heads]`: logarithm of the decay rate."""
    time_step: nn.Parameter
    """`[heads]`: bias of the time step, before softplus."""
    skip: nn.Parameter
    """`[heads]`: factor of a head's input that is added to its output."""

    def __init__(self, spec: Mamba2Spec, *, norm_eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.projection, self.convolution, self.out_projection = Linear(), ShortConvolution(), Linear()
        self.group_norm = RMSNorm(norm_eps)
        for name in ("decay", "time_step", "skip"):
            self.register_parameter(name, None)

    def forward(self, x: Tensor, rows: PassRows, cache: RecurrentState | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, they continue from its state
        and update it."""
        spec, shard = self.spec, rows.shard
        gate_width, *conv_widths, num_steps = spec.group_widths
        projected = self.projection(shard.gather_rows(x), rows.dropout_key)
        projected = projected.unflatten(-1, (-1, sum(spec.group_widths)))  # [B, N, groups, width]
        gates, mixed, steps = projected.split([gate_width, sum(conv_widths), num_steps], dim=-1)
        mixed = functional.silu(self.convolution(mixed.flatten(-2), rows, cache))
        inputs, b, c = mixed.unflatten(-1, (-1, sum(conv_widths))).split(conv_widths, dim=-1)
        inputs = inputs.flatten(-2).unflatten(-1, (-1, spec.head_dim))
        wide = torch.promote_types(inputs.dtype, torch.float32)
        steps = functional.softplus(steps.flatten(-2).to(wide) + self.time_step.to(wide)).clamp(min=spec.min_time_step)
        written, log_decay = inputs.to(wide) * steps[..., None], -self.decay.to(wide).exp() * steps
        if (chunks := rows.chunks) is not None:
            outputs = state_space_of_chunks(c, b, written, log_decay, chunks)
        else:
            initial = None if cache is None else cache.state
            outputs, state = state_space(c, b, written, log_decay, documents=rows.documents, state=initial)
            if cache is not None:
                cache.state = state
        outputs = outputs + self.skip.to(wide)[:, None] * inputs
        outputs = self._gated_norm(outputs.flatten(-2), gates.flatten(-2)).to(x.dtype)
        return self.out_projection.add_bias(shard.scatter_rows(self.out_projection.product(outputs, rows.dropout_key)))

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> RecurrentState:
        """State before the first token."""
        return RecurrentState()

    def _gated_norm(self, outputs: Tensor, gates: Tensor) -> Tensor:
        """RMS norm of each group's outputs times activated gates, `[B, N, inner]` both."""
        gated = outputs * functional.silu(gates.to(outputs.dtype))
        groups = gated.unflatten(-1, (-1, self.spec.group_widths[0]))
        unit = groups.new_ones(groups.shape[-1])
        return rms_norm(groups, unit, self.group_norm.eps).flatten(-2) * self.group_norm.weight.to(outputs.dtype)
