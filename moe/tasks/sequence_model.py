"""Interface of models of token sequences, and what all share: passes over rows, decoding with KV caches, logits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.attention_mask import AttentionMask
from moe.layers.block import TransformerBlock
from moe.layers.cache import LayerCache
from moe.layers.linear import linear
from moe.layers.sequence import PassRows, SequencePass
from moe.parallel import SequenceShard
from moe.parallel.stages import ModelStages, Results, VirtualStage
from moe.routing import BatchCounts, TokenContext
from moe.spec import LanguageModelSpec, TranslationModelSpec
from moe.spec.parallel import ContextExchange
from moe.tasks.batch_context import BatchContext


class SequenceModel(nn.Module, ABC):
    """Transformer with a decoder, whose parameters have no values until `moe.parallel.apply`.

    Context ranks hold parts of each row, and tensor ranks sequence-parallel shards of their tokens. The logits of all
    are the same, and they must compute the same loss from them; training uses hidden states, which needs no logits of
    other ranks' tokens. In decoding, context ranks compute the same.
    """

    spec: LanguageModelSpec | TranslationModelSpec
    tensor_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    context_exchange: ContextExchange = "gather"
    dropout = 0.0
    """Probability of dropout of embeddings and sub-layer outputs."""

    def __init__(self, spec: LanguageModelSpec | TranslationModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.compute_dtype = spec, dtype
        self.stages = ModelStages.whole(spec.num_layers)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    @abstractmethod
    def output_embedding(self) -> nn.Parameter:
        """`[V, M]`: output projection, possibly tied to the decoder's token embedding."""

    @abstractmethod
    def stage_parts(self, stage: VirtualStage) -> Iterator[str]:
        """Paths of the modules and parameters of a pipeline stage; a tied table belongs to all that use it."""

    @property
    @abstractmethod
    def _vocab_size(self) -> int:
        """Tokens that logits are of."""

    @abstractmethod
    def _stage_blocks(self, stage: VirtualStage) -> Iterator[TransformerBlock]:
        """Blocks of a pipeline stage that predict tokens, in order."""

    def _decoder_blocks(self) -> Iterator[TransformerBlock]:
        """This rank's blocks that predict tokens, in order."""
        return (block for stage in self.stages.local for block in self._stage_blocks(stage))

    @abstractmethod
    def _embed(self, tokens: Tensor, run: SequencePass, begins: int = 0) -> Tensor:
        """Embeddings `[t, M]` of this rank's shard of the decoder's tokens `[B, L]`, from position `begins` on."""

    @abstractmethod
    def _final_states(self, x: Tensor) -> Tensor:
        """Hidden states `[..., M]` to project, from the output `x` `[..., M]` of the last block."""

    def _with_rotary(
        self, rows: PassRows, positions: Tensor, lengths: Tensor | None = None, max_lengths: Tensor | None = None
    ) -> PassRows:
        """The rows with rotary tables of positions int64 `[B, N]` in documents of `lengths`, or, in decoding, in rows
        of at most `max_lengths` int64 `[B]`, if the model has rotary embeddings."""
        return rows

    def share(self, tokens: Tensor) -> Tensor:
        """This rank's shard `[t]` of `tokens` `[B, L]`."""
        return self._sequence_shard(tokens).take(tokens.reshape(-1))

    def gather_tokens(self, tokens: Tensor, share: Tensor) -> Tensor:
        """All-gather `[T, ...]` of the shards `[t, ...]` of tensor and context ranks."""
        return self._sequence_shard(tokens).gather_results(share)

    def extend(self, tokens: Tensor, state: "DecodingState", padding: Tensor | None = None) -> Tensor:
        """Append `tokens` `[B, N]` to `state`; return the next-token logits `[B, V]`.

        `padding` bool `[B, N]` is True before the first token of shorter rows, in the first call only. Raises
        ValueError for other padding, a wrong number of rows, no position, or more positions than `state` has room
        for.
        """
        state.check(tokens, padding)
        if padding is not None and not state.num_positions:
            state.first = padding.sum(1)
        run = self._decoding_pass(tokens, state)
        caches = iter(state.caches)
        x = self._through_stages(
            run.rows,
            tokens.device,
            lambda: self._embed(tokens, run, state.num_positions),
            lambda block, x: block(x, run, next(caches), state.memory),
        )
        state.num_positions, state.memory = state.num_positions + tokens.shape[1], None

        def logits() -> tuple[Tensor]:
            last_BM = run.rows.shard.gather_results(x).view(*tokens.shape, x.shape[-1])[:, -1]
            return (self._project(self._final_states(last_BM)),)

        return self._on_last_stage(logits, [(len(tokens), self._vocab_size)], x)[0]

    def _through_stages(
        self,
        rows: PassRows,
        device: torch.device,
        embed: Callable[[], Tensor],
        run_block: Callable[[TransformerBlock, Tensor], Tensor],
    ) -> Tensor:
        """Output `[t, M]` of this rank's last stage, from the embeddings or the states that its stages receive."""
        x = None
        with self.stages.passing() as stages:
            for stage in stages:
                x = embed() if stage.is_first else self._receive(stage, rows.shard, device)
                self._receive_shared(stage, rows, device)
                for block in self._stage_blocks(stage):
                    x = run_block(block, x)
                if not stage.is_last:
                    self.stages.send(stage, x)
                    self._send_shared(stage, rows)
        assert x is not None
        return x

    def _receive_shared(self, stage: VirtualStage, rows: PassRows, device: torch.device) -> None:
        """Receive what layers of a stage or a later one share with an earlier one."""

    def _send_shared(self, stage: VirtualStage, rows: PassRows) -> None:
        """Send what layers of a later stage share with one of this stage or an earlier one."""

    def _receive(self, stage: VirtualStage, shard: SequenceShard, device: torch.device) -> Tensor:
        """Hidden states `[t, M]` of this rank's shard of some tokens, from the stage before."""
        share_shape = shard.stop - shard.first, self.spec.model_dim
        return self.stages.receive(stage, share_shape, self.compute_dtype, device)

    def _on_last_stage(
        self, compute: Callable[[], Results], shapes: Sequence[Sequence[int]], like: Tensor, *, is_wide: bool = False
    ) -> Results:
        """`ModelStages.on_last_stage` of results on the device and in the dtype of `like`, at least float32 if
        `is_wide`."""
        dtype = torch.promote_types(like.dtype, torch.float32) if is_wide else like.dtype
        return self.stages.on_last_stage(compute, shapes, dtype, like.device)

    def _new_state(self, num_rows: int, num_positions: int, device: torch.device) -> "DecodingState":
        # Not derived from a weight: under FSDP, tensors derived from it would be sharded too.
        like = torch.empty(0, dtype=self.compute_dtype, device=device)
        caches = [block.new_cache(num_rows, num_positions, like) for block in self._decoder_blocks()]
        return DecodingState(caches, torch.arange(num_rows, device=device), num_positions)

    def _logits(self, hidden_states: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[B, L, V]` of hidden states `[t, M]` of this rank's shard of `tokens` `[B, L]`."""
        logits = self._project(hidden_states)
        return self._sequence_shard(tokens).gather_results(logits).view(*tokens.shape, logits.shape[-1])

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., M]`."""
        return linear(hidden_states, self.output_embedding)

    def _pass(
        self,
        tokens: Tensor,
        context: BatchContext,
        rows: PassRows,
        counts: BatchCounts | None,
        rows_per_group: int,
        padding: Tensor | None,
    ) -> SequencePass:
        """Pass inputs for `tokens` `[B, L]` in groups of whole rows, the last padded with empty rows."""
        num_rows, length = tokens.shape
        num_groups = -(-num_rows // rows_per_group)
        total, first = num_groups * rows_per_group, context.first_row * length
        if isinstance(first, int):
            ids = torch.arange(first, first + total * length, device=tokens.device)
        else:
            ids = torch.arange(total * length, device=tokens.device) + first
        ids = ids.view(num_groups, rows_per_group * length)
        if padding is None and total > num_rows:
            padding = tokens.new_zeros(tokens.shape, dtype=torch.bool)
        if padding is not None:
            padding = functional.pad(padding, (0, 0, 0, total - num_rows), value=True).view(ids.shape)
        token_context = TokenContext(ids, padding, context.step, context.seed, context.training, length, counts)
        return SequencePass(token_context, rows, self.dropout)

    def _decoding_pass(self, tokens: Tensor, state: "DecodingState") -> SequencePass:
        """Pass inputs for tokens `[B, N]` after those of `state`, without capacity limits."""
        num_rows, num_new = tokens.shape
        begins = state.num_positions
        row_positions = torch.arange(begins, begins + num_new, device=tokens.device).expand(num_rows, -1)
        documents, positions = None, row_positions
        if state.first is not None:
            documents = torch.where(row_positions < state.first[:, None], -1, 0)
            positions = (row_positions - state.first[:, None]).clamp(min=0)
        rows = PassRows(
            self._sequence_shard(tokens, is_decoding=True),
            AttentionMask(first=state.first),
            begins + num_new,
            documents=documents,
            memory_mask=state.memory_mask,
        )
        max_lengths = torch.full_like(positions[:, 0], state.max_positions)
        if state.first is not None:
            max_lengths = max_lengths - state.first
        rows = self._with_rotary(rows, positions, max_lengths=max_lengths)
        padding = None if documents is None else documents < 0
        ids = state.rows[:, None] * state.max_positions + positions
        return SequencePass(TokenContext(ids, padding, training=False, sequence_tokens=num_new), rows)

    def _rows_per_group(self, row_tokens: int) -> int:
        group_tokens = self.spec.moe.group_tokens if self.spec.moe is not None else row_tokens
        return max(1, group_tokens // max(1, row_tokens))

    def _sequence_shard(self, tokens: Tensor, *, is_decoding: bool = False) -> SequenceShard:
        """Sharding of tokens `[B, L]`, in decoding over the tensor ranks alone."""
        num_rows, length = tokens.shape
        context_group = None if is_decoding else self.context_group
        return SequenceShard.of_rows(num_rows, length, self.tensor_group, context_group, self.context_exchange)


class DecodingState:
    """KV caches and other layer state of rows being decoded."""

    def __init__(self, caches: Sequence[LayerCache], rows: Tensor, max_positions: int) -> None:
        """`rows` int64 `[B]`: original row numbers. `max_positions`: largest number of positions. Position p of row r,
        from the row's first token, has the id r * `max_positions` + p (`moe.routing.record_routing`)."""
        self.caches, self.rows, self.max_positions = caches, rows, max_positions
        self.first: Tensor | None = None
        """int64 `[B]`: position of each row's first token; None: 0 for all."""
        self.num_positions = 0
        self.memory: Tensor | None = None
        """Encoder output `[B, L, M]`; None without encoder, and once the caches have its keys and values."""
        self.memory_mask: AttentionMask | None = None

    def check(self, tokens: Tensor, padding: Tensor | None) -> None:
        """Raise ValueError for tokens that `SequenceModel.extend` refuses."""
        if tokens.dim() != 2 or tokens.shape[0] != len(self.rows) or not tokens.shape[1]:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must have at least one position for each of the state's "
                f"{len(self.rows)} rows, [B, N]"
            )
        if padding is not None and padding.shape != tokens.shape:
            raise ValueError(f"padding {tuple(padding.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        if self.num_positions + tokens.shape[1] > self.max_positions:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} must fit after {self.num_positions} positions in the "
                f"state's max_positions (={self.max_positions}); give start() enough for all tokens"
            )
        if padding is not None:
            is_elsewhere = padding if self.num_positions else padding[:, 1:] & ~padding[:, :-1]
            if bool(is_elsewhere.any()):
                raise ValueError(
                    "padding must precede the first token of each row, in the first call only; put it there"
                )

    def take_rows(self, rows: Tensor) -> None:
        """Select rows by int64 index, in this order; indices may repeat."""
        row_numbers = self.rows.index_select(0, rows)
        has_encoder = self.memory_mask is not None
        same_sources = has_encoder and torch.equal(row_numbers, self.rows)
        for cache in self.caches:
            cache.take_rows(rows, same_sources=same_sources)
        self.rows = row_numbers
        self.first, self.memory = (
            None if tensor is None else tensor.index_select(0, rows) for tensor in (self.first, self.memory)
        )
        self.memory_mask = None if self.memory_mask is None else self.memory_mask.select_rows(rows)
