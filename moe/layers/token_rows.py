"""Trained rows of a vocabulary's table, which replace the frozen rows of their tokens."""

import torch
from torch import Tensor
from torch.nn import functional


class TokenIds:
    """Tokens of trained rows `[n, M]`, in the order of the rows, on one device."""

    def __init__(self, ids: tuple[int, ...], device: torch.device) -> None:
        ids_n = torch.tensor(ids, dtype=torch.int64, device=device)
        self._ids_n = ids_n
        self._sorted_n, self._order_n = ids_n.sort()

    def replace_embeddings(self, x: Tensor, tokens: Tensor, rows_nM: Tensor) -> Tensor:
        """Replace the embeddings `x` `[..., M]` of these tokens among `tokens` int64 `[...]`."""
        position = torch.searchsorted(self._sorted_n, tokens).clamp_(max=len(self._sorted_n) - 1)
        is_trained = self._sorted_n[position] == tokens
        return torch.where(is_trained[..., None], functional.embedding(self._order_n[position], rows_nM), x)

    def replace_logits(self, logits: Tensor, logits_of_rows: Tensor) -> Tensor:
        """Replace the logits `[..., V]` of these tokens by `[..., n]`."""
        return logits.index_copy(-1, self._ids_n, logits_of_rows)
