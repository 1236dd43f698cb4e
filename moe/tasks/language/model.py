"""Decoder-only language model; the spec selects its family."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe.experts import Experts
from moe.layers.adapter_dropout import AdapterDropout, DropoutKey
from moe.layers.attention_mask import AttentionMask
from moe.layers.block import Block
from moe.layers.cache import LayerCache
from moe.layers.linear import Linear, linear
from moe.layers.moe import MoELayer
from moe.layers.rotary import rotary_table
from moe.layers.sequence import PassRows, SequencePass
from moe.layers.shared_experts import SharedExperts
from moe.parallel import SequenceShard
from moe.routing import TokenContext
from moe.spec import LanguageModelSpec
from moe.spec.language import LatentAttentionSpec
from moe.tasks.language.blocks import build_block, build_norm
from moe.tasks.language.context import SequenceContext, lengths_of, positions_of


class Table(nn.Module):
    """Token embedding table."""

    weight: nn.Parameter
    """`[V, M]`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)


class LanguageModel(nn.Module):
    """Decoder-only transformer; parameters have no values until `moe.parallel.apply`."""

    entry_points = ("hidden_states", "extend")
    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, spec: LanguageModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec, self.compute_dtype = spec, dtype
        self.embedding = Table()
        self.layers = nn.ModuleList(build_block(spec, layer) for layer in range(spec.num_layers))
        self.norm = build_norm(spec)
        self.output = None if spec.tie_embeddings else Linear()
        if spec.adapter is not None:
            self._scale_adapters(spec.adapter.scale)
            if spec.adapter.dropout:
                self._set_dropout(spec.adapter.dropout)

    def _set_dropout(self, probability: float) -> None:
        """Set dropout on LoRA inputs, except in routed experts, whose rows arrive without token ids."""
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                module.dropout = AdapterDropout(probability, f"{path}.weight")
            elif isinstance(module, SharedExperts):
                names = ("w_in", "w_gate", "w_out")
                module.dropout = {name: AdapterDropout(probability, f"{path}.{name}") for name in names}
            elif isinstance(module, MoELayer):
                module.router_dropout = AdapterDropout(probability, f"{path}.router")

    @property
    def output_embedding(self) -> nn.Parameter:
        """`[V, M]`: output projection, possibly tied to the token embedding."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(self, tokens: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Next-token logits `[B, L, V]` of `tokens` int64 `[B, L]`.

        Without `context` each row is one document, at step 0 of seed 0, in training mode as set by `train()` or
        `eval()`. Tensor ranks get the same logits and must compute the same loss; training uses `hidden_states`,
        which needs no logits of other ranks' tokens.
        """
        logits = self._project(self.hidden_states(tokens, context))
        return self._shares(tokens).gather_results(logits).view(*tokens.shape, logits.shape[-1])

    def hidden_states(self, tokens: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Final normalized hidden states `[t, M]` of this rank's shard of the tokens (see `share`)."""
        context = context or SequenceContext(training=self.training)
        run, x = self._pass(tokens, context), self._embed(tokens)
        for block in self.layers:
            x = block(x, run)
        return self._last(x)

    def share(self, tokens: Tensor) -> Tensor:
        """This rank's sequence-parallel shard `[t]` of `tokens` `[B, L]`."""
        return self._shares(tokens).take(tokens.reshape(-1))

    def gather_tokens(self, tokens: Tensor, share: Tensor) -> Tensor:
        """All-gather `[T, ...]` of the tensor ranks' shards `[t, ...]`."""
        return self._shares(tokens).gather_results(share)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Disable the LoRA adapters within the block."""
        assert self.spec.adapter is not None
        self._scale_adapters(0.0)
        try:
            yield
        finally:
            self._scale_adapters(self.spec.adapter.scale)

    def _scale_adapters(self, scale: float) -> None:
        for module in self.modules():
            if isinstance(module, Linear | SharedExperts | MoELayer | Experts):
                module.lora_scale = scale

    def start(self, num_rows: int, num_positions: int) -> "GenerationState":
        """Generation state with empty KV caches."""
        # Take only the device from the weight: under FSDP, tensors derived from it would be sharded too.
        like = torch.empty(0, dtype=self.compute_dtype, device=self.embedding.weight.device)
        caches = [block.new_cache(num_rows, num_positions, like) for block in self._blocks()]
        return GenerationState(caches, torch.arange(num_rows, device=like.device), num_positions)

    def extend(self, tokens: Tensor, state: "GenerationState", padding: Tensor | None = None) -> Tensor:
        """Append `tokens` `[B, N]` to `state`; return the next-token logits `[B, V]`.

        `padding` bool `[B, N]` is True before the first token of shorter rows, in the first call only. Raises
        ValueError for other padding, a wrong number of rows, no position, or more positions than `state` has room
        for.
        """
        if tokens.dim() != 2 or tokens.shape[0] != len(state.rows) or not tokens.shape[1]:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must be a position at least of each of the {len(state.rows)} rows that "
                "the state has, [B, N]"
            )
        if padding is not None and padding.shape != tokens.shape:
            raise ValueError(
                f"padding {tuple(padding.shape)} must have the shape of tokens {tuple(tokens.shape)}"
            )
        if state.num_positions + tokens.shape[1] > state.room:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must fit behind {state.num_positions} positions in the room "
                f"(={state.room}) that the state has; give start() as many as are to come"
            )
        if padding is not None:
            is_elsewhere = padding if state.num_positions else padding[:, 1:] & ~padding[:, :-1]
            if bool(is_elsewhere.any()):
                raise ValueError(
                    "padding must lie before the first token of each row, in the first call alone; put it there"
                )
            if not state.num_positions:
                state.first = padding.sum(1)
        run, x = self._going_on(tokens, state), self._embed(tokens)
        for block, cache in zip(self._blocks(), state.caches, strict=True):
            x = block(x, run, cache)
        state.num_positions += tokens.shape[1]
        x = run.rows.shares.gather_results(x).view(*tokens.shape, x.shape[-1])[:, -1]
        return self._project(self._last(x))

    def _blocks(self) -> Iterator[Block]:
        return iter(self.layers)  # type: ignore[arg-type]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[t, M]` of this rank's shard of tokens `[B, L]`."""
        x = functional.embedding(self.share(tokens), self.embedding.weight).to(self.compute_dtype)
        return x if self.spec.embedding_multiplier == 1 else x * self.spec.embedding_multiplier

    def _last(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.spec.logits_divisor == 1 else x / self.spec.logits_divisor

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., M]`."""
        return linear(hidden_states, self.output_embedding)

    def _pass(self, tokens: Tensor, context: SequenceContext) -> SequencePass:
        """Pass inputs for `tokens` `[B, L]` in groups of whole rows, the last padded with empty rows."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be [B, L]; give a row for each sequence")
        num_rows, length = tokens.shape
        documents = context.documents
        if documents is not None and documents.shape != tokens.shape:
            raise ValueError(
                f"documents {tuple(documents.shape)} must have the shape of tokens {tuple(tokens.shape)}; number "
                "each position"
            )
        lengths = None
        if documents is None:
            positions = torch.arange(length, device=tokens.device).expand(num_rows, -1)
        else:
            positions = positions_of(documents)
            lengths = lengths_of(positions)
        rows = self._rows(tokens, positions, lengths, AttentionMask(documents=documents), length, documents)
        per_group = context.rows_per_group or self._rows_per_group(length)
        num_groups = -(-num_rows // per_group)
        total, first = num_groups * per_group, context.first_row * length
        ids = torch.arange(first, first + total * length, device=tokens.device)
        ids = ids.view(num_groups, per_group * length)
        padding = context.padding
        if padding is None and total > num_rows:
            padding = tokens.new_zeros(tokens.shape, dtype=torch.bool)
        if padding is not None:
            padding = functional.pad(padding, (0, 0, 0, total - num_rows), value=True).view(ids.shape)
        facts = TokenContext(
            ids, padding, context.step, context.seed, context.training, length, context.counts
        )
        draws = DropoutKey.from_tokens(facts, ids.reshape(-1)[: tokens.numel()].view(tokens.shape))
        return SequencePass(facts, replace(rows, draws=draws))

    def _going_on(self, tokens: Tensor, state: "GenerationState") -> SequencePass:
        """Pass inputs for tokens `[B, N]` after those of `state`, without capacity limits."""
        num_rows, num_new = tokens.shape
        begins = state.num_positions
        places = torch.arange(begins, begins + num_new, device=tokens.device).expand(num_rows, -1)
        documents, positions = None, places
        if state.first is not None:
            documents = torch.where(places < state.first[:, None], -1, 0)
            positions = (places - state.first[:, None]).clamp(min=0)
        rows = self._rows(
            tokens, positions, None, AttentionMask(first=state.first), begins + num_new, documents
        )
        padding = None if documents is None else documents < 0
        ids = state.rows[:, None] * state.room + positions
        return SequencePass(TokenContext(ids, padding, training=False, sequence_tokens=num_new), rows)

    def _rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        visible: AttentionMask,
        num_positions: int,
        documents: Tensor | None,
    ) -> PassRows:
        attention = self.spec.attention
        width = attention.head_dim
        if isinstance(attention, LatentAttentionSpec):
            width = attention.rope_dim
        rotary = rotary_table(
            positions, width, attention.rope, dtype=self.compute_dtype, num_positions=lengths
        )
        return PassRows(self._shares(tokens), visible, num_positions, rotary, documents)

    def _rows_per_group(self, row_tokens: int) -> int:
        group_tokens = self.spec.moe.group_tokens if self.spec.moe is not None else row_tokens
        return max(1, group_tokens // max(1, row_tokens))

    def _shares(self, tokens: Tensor) -> SequenceShard:
        """Sequence sharding of tokens `[B, L]`."""
        num_rows, length = tokens.shape
        return SequenceShard(tokens.numel(), self.tensor_group, shape=(num_rows, length))


class GenerationState:
    """KV caches and other layer state of rows being generated."""

    def __init__(self, caches: Sequence[LayerCache], rows: Tensor, room: int) -> None:
        self.caches, self.rows, self.room = caches, rows, room
        """`rows` int64 `[B]`: original row numbers. Position p of row r, from the row's first token, has the id r *
        `room` + p (`moe.routing.recorded`).
        """
        self.first: Tensor | None = None
        """int64 `[B]`: position of each row's first token; None: 0 for all."""
        self.num_positions = 0

    def take_rows(self, rows: Tensor) -> None:
        """Select rows by int64 index, in this order; indices may repeat."""
        for cache in self.caches:
            cache.take_rows(rows)
        self.rows = self.rows.index_select(0, rows)
        self.first = None if self.first is None else self.first.index_select(0, rows)
