"""The blocks of the two stacks: attention, then a feed-forward layer or experts, each in a residual."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.layers.attention import Attention, KeyValueCache
from moe.layers.feed_forward import FeedForward
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm
from moe.parallel import Layout
from moe.random import Purpose, dropout, fold
from moe.routing import Routing, TokenContext
from moe.spec import ModelSpec


@dataclass(frozen=True)
class Pass:
    """What every block of one stack needs to know in one forward pass."""

    tokens: TokenContext
    """Ids and padding `[G, S]`: the rows are the groups."""
    num_rows: int
    """Rows that are really there; groups may be filled up with more."""
    dropout: float
    routings: list[Routing] | None
    """Where given, each MoE layer adds what it decided."""

    def drop(self, x: Tensor, layer: int, purpose: Purpose) -> Tensor:
        """Dropout keyed by (seed, step, layer, purpose, token) on `x` `[B, L, M]`."""
        if not self.tokens.training or self.dropout == 0:
            return x
        assert self.tokens.ids is not None
        ids = self.tokens.ids.view(-1)[: x.shape[0] * x.shape[1]].view(x.shape[:2])
        return dropout(x, self.dropout, fold(self.tokens.seed, self.tokens.step, layer, purpose), ids)


class FeedForwardBlock(nn.Module):
    """Norm, a feed-forward layer or experts, dropout, residual."""

    def __init__(
        self, spec: ModelSpec, layer: int, layout: Layout, *, name: str, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm(spec.model_dim, dtype=dtype, device=layout.device)
        self.moe: MoELayer | None = None
        self.dense: FeedForward | None = None
        if spec.moe is not None and layer in spec.moe_layers:
            self.moe = MoELayer(spec.moe, layer, layout=layout, name=f"{name}.moe", seed=seed, dtype=dtype)
        else:
            self.dense = FeedForward(
                spec.model_dim,
                _ffn_dim(spec, layer),
                name=f"{name}.dense",
                seed=seed,
                dtype=dtype,
                device=layout.device,
            )

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """`[B, L, M]` for `x` `[B, L, M]`. A token that no expert kept is carried on by the residual alone."""
        normed = self.norm(x)
        if self.moe is not None:
            y, routing = self.moe(normed.reshape(-1, x.shape[-1]), run.tokens)
            y = y.view(x.shape)
            if run.routings is not None:
                run.routings.append(routing)
        else:
            assert self.dense is not None
            y = self.dense(normed)
        return x + run.drop(y, self.layer, Purpose.FEED_FORWARD_DROPOUT)


def _ffn_dim(spec: ModelSpec, layer: int) -> int:
    """The width of a layer without experts: a dense twin's are wider where its model has experts."""
    in_stack = layer if layer < spec.num_encoder_layers else layer - spec.num_encoder_layers
    replaces_experts = in_stack % spec.moe_every == spec.moe_every - 1
    if spec.moe is None and replaces_experts and spec.dense_twin_ffn_dim is not None:
        return spec.dense_twin_ffn_dim
    return spec.ffn_dim


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(
        self, spec: ModelSpec, layer: int, layout: Layout, *, name: str, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm(spec.model_dim, dtype=dtype, device=layout.device)
        self.attention = _attention(spec, layout, f"{name}.attention", seed, dtype)
        self.feed_forward = FeedForwardBlock(spec, layer, layout, name=f"{name}.ff", seed=seed, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor, run: Pass) -> Tensor:
        """`[B, L, M]` for `x` `[B, L, M]`; `mask` bool `[B, 1, 1, L]`, True where there is a token."""
        normed = self.norm(x)
        attended = self.attention(normed, self.attention.keys_values(normed), mask)
        x = x + run.drop(attended, self.layer, Purpose.SELF_ATTENTION_DROPOUT)
        return self.feed_forward(x, run)


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, then feed-forward."""

    def __init__(
        self, spec: ModelSpec, layer: int, layout: Layout, *, name: str, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm(spec.model_dim, dtype=dtype, device=layout.device)
        self.attention = _attention(spec, layout, f"{name}.attention", seed, dtype)
        self.cross_norm = LayerNorm(spec.model_dim, dtype=dtype, device=layout.device)
        self.cross_attention = _attention(spec, layout, f"{name}.cross_attention", seed, dtype)
        self.feed_forward = FeedForwardBlock(spec, layer, layout, name=f"{name}.ff", seed=seed, dtype=dtype)

    def forward(self, x: Tensor, memory: KeyValueCache, memory_mask: Tensor, run: Pass) -> Tensor:
        """`[B, N, M]` for `x` `[B, N, M]`, looking at itself up to each position and at all of the source."""
        normed = self.norm(x)
        attended = self.attention(normed, self.attention.keys_values(normed), causal=True)
        return self._rest(x, attended, memory, memory_mask, run)

    def step(
        self,
        x: Tensor,
        cache: KeyValueCache,
        position: int,
        memory: KeyValueCache,
        memory_mask: Tensor,
        run: Pass,
    ) -> Tensor:
        """`[B, 1, M]` for the token at `position`, whose keys and values join `cache` in place."""
        normed = self.norm(x)
        new = self.attention.keys_values(normed)
        cache.keys[:, :, position] = new.keys[:, :, 0]
        cache.values[:, :, position] = new.values[:, :, 0]
        so_far = KeyValueCache(cache.keys[:, :, : position + 1], cache.values[:, :, : position + 1])
        return self._rest(x, self.attention(normed, so_far), memory, memory_mask, run)

    def _rest(
        self, x: Tensor, attended: Tensor, memory: KeyValueCache, memory_mask: Tensor, run: Pass
    ) -> Tensor:
        x = x + run.drop(attended, self.layer, Purpose.SELF_ATTENTION_DROPOUT)
        attended = self.cross_attention(self.cross_norm(x), memory, memory_mask)
        x = x + run.drop(attended, self.layer, Purpose.CROSS_ATTENTION_DROPOUT)
        return self.feed_forward(x, run)


def _attention(spec: ModelSpec, layout: Layout, name: str, seed: int, dtype: torch.dtype) -> Attention:
    return Attention(
        spec.model_dim,
        spec.num_heads,
        spec.head_dim,
        name=name,
        seed=seed,
        dtype=dtype,
        device=layout.device,
    )
