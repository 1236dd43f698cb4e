"""Token embedding table, with optional LoRA and trained rows."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.linear import linear
from moe.layers.token_rows import TokenIds
from moe.parallel import Layout


class EmbeddingTable(nn.Module):
    """Rows of tokens, and logits of all tokens where the output projection is tied to it."""

    weight: nn.Parameter
    """`[V, M]`"""
    weight_lora_a: nn.Parameter | None
    """`[r, V]`: LoRA adapter, with the next."""
    weight_lora_b: nn.Parameter | None
    """`[M, r]`"""
    token_rows: nn.Parameter | None
    """`[n, M]`: trained rows of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    lora_scales: Mapping[str, float] = MappingProxyType({})
    """Scale of the adapter, by the name `weight`; empty where adapter and trained rows are disabled."""
    _token_rows_ids: TokenIds | None = None

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "weight_lora_a", "weight_lora_b", "token_rows"):
            self.register_parameter(name, None)

    def set_layout(self, layout: Layout) -> None:
        if self.token_ids:
            self._token_rows_ids = TokenIds(self.token_ids, layout.device)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[..., M]` in `dtype` of `tokens` int64 `[...]`."""
        x = functional.embedding(tokens, self.weight).to(dtype)
        if not self.lora_scales:
            return x
        if self.token_rows is not None:
            assert self._token_rows_ids is not None
            return self._token_rows_ids.replace_embeddings(x, tokens, self.token_rows.to(dtype))
        if self.weight_lora_a is None or self.weight_lora_b is None:
            return x
        low = functional.embedding(tokens, self.weight_lora_a.t()).to(dtype)
        return x.add(linear(low, self.weight_lora_b), alpha=self.lora_scales["weight"])

    def project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of `hidden_states` `[..., M]`, by the table and its trained rows."""
        logits = linear(hidden_states, self.weight)
        if self.token_rows is None or not self.lora_scales:
            return logits
        assert self._token_rows_ids is not None
        return self._token_rows_ids.replace_logits(logits, linear(hidden_states, self.token_rows))
