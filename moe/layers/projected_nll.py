"""Cross-entropy over a vocabulary whose output projection has an adapter: any module computes the logits, chunk by
chunk, again in the backward pass."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe.parallel.accelerator import accelerator
from moe.plan.cost.layer_bytes import loss_tokens

Projection = Callable[[Tensor, Tensor], Tensor]
"""Logits `[C, V]` of hidden states `[C, M]` at the positions int64 `[C]` of this rank's tokens."""


def projected_token_nll(
    hidden_TM: Tensor, project: Projection, labels_T: Tensor, ignore_index: int, vocab_size: int,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood `[T]` of each label, as `moe.layers.nll.token_nll` computes it from a table."""
    real = _positions_of(labels_T, ignore_index) if positions is None else positions
    parts = [nll_C for nll_C, _ in _chunks(hidden_TM, project, labels_T, real, vocab_size)]
    nll_T = hidden_TM.new_zeros(len(labels_T), dtype=torch.promote_types(hidden_TM.dtype, torch.float32))
    return nll_T.index_copy(0, real, torch.cat(parts))


def projected_nll(
    hidden_TM: Tensor, project: Projection, labels_T: Tensor, smoothing: float, ignore_index: int, vocab_size: int,
    positions: Tensor | None = None, *, projects_all: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(label-smoothed loss, plain negative log-likelihood), summed over real tokens, as `moe.layers.nll.smoothed_nll`
    computes them from a table; both are differentiable."""
    wide = torch.promote_types(hidden_TM.dtype, torch.float32)
    nll, spread = hidden_TM.new_zeros((), dtype=wide), hidden_TM.new_zeros((), dtype=wide)
    is_real_T = labels_T != ignore_index
    if projects_all:
        real = torch.arange(len(labels_T), device=labels_T.device)
        labels_T, weight_T = labels_T.masked_fill(~is_real_T, 0), is_real_T.to(wide)
    else:
        real = _positions_of(labels_T, ignore_index) if positions is None else positions
        weight_T = is_real_T.to(wide)
    first = 0
    for nll_C, spread_C in _chunks(hidden_TM, project, labels_T, real, vocab_size):
        weight_C = weight_T.index_select(0, real[first : first + len(nll_C)])
        nll, spread, first = nll + (nll_C * weight_C).sum(), spread + (spread_C * weight_C).sum(), first + len(nll_C)
    return (1 - smoothing) * nll + smoothing * spread, nll.detach()


def _chunks(
    hidden_TM: Tensor, project: Projection, labels_T: Tensor, real: Tensor, vocab_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (nll `[C]` of labels, mean nll `[C]` of all tokens) of the tokens at positions `real`; without any, one
    empty chunk, so that every rank has gradients."""
    chunk_tokens = loss_tokens(accelerator(hidden_TM.device).kind, vocab_size)
    for positions_C in real.split(chunk_tokens):
        arguments: tuple[Any, ...] = project, hidden_TM.index_select(0, positions_C), positions_C, labels_T[positions_C]
        if torch.is_grad_enabled():
            yield checkpoint(_nll_of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            yield _nll_of_chunk(*arguments)


def _nll_of_chunk(
    project: Projection, hidden_CM: Tensor, positions_C: Tensor, labels_C: Tensor
) -> tuple[Tensor, Tensor]:
    logits_CV = project(hidden_CM, positions_C)
    logp_CV = functional.log_softmax(logits_CV, dim=-1, dtype=torch.promote_types(logits_CV.dtype, torch.float32))
    return -logp_CV.gather(1, labels_C[:, None]).squeeze(1), -logp_CV.mean(1)


def _positions_of(labels_T: Tensor, ignore_index: int) -> Tensor:
    return (labels_T != ignore_index).nonzero().squeeze(1)
