"""Cross-entropy over a vocabulary, with optional label smoothing, without materializing `[T, V]` logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe.overrides import overridable
from moe.parallel.accelerator import accelerator, multiplies
from moe.plan.cost.layer_bytes import loss_tokens


@overridable
def smoothed_nll(
    hidden_states: Tensor,
    table: Tensor,
    labels: Tensor,
    smoothing: float,
    ignore_index: int,
    positions: Tensor | None = None,
    *,
    projects_all: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (label-smoothed negative log-likelihood, plain negative log-likelihood), summed over real tokens in at
    least float32. Only the first is differentiable.

    Logits are `hidden_states` [..., M] · `table` [V, M] transposed, bounded by `cap` (`cap_logits`). `labels` int64
    [...] are `ignore_index` where no token is predicted: these positions are not projected. `positions` int64 [n]:
    indices of the labels to predict, in the flattened labels; without them, the host waits for a GPU to find them,
    unless `projects_all`: then all positions are projected, those without labels as zeros, and shapes do not depend on
    the labels. The smoothed target is 1 - smoothing on the label plus smoothing / V on every token (arXiv 1512.00567,
    section 7).
    """
    hidden_TM, labels_T = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1)
    is_real_T = None
    if projects_all:
        is_real_T = labels_T != ignore_index
        hidden_TM, labels_T = hidden_TM.masked_fill(~is_real_T[:, None], 0.0), labels_T.masked_fill(~is_real_T, 0)
    else:
        real = _positions_of(labels_T, ignore_index) if positions is None else positions
        hidden_TM, labels_T = hidden_TM.index_select(0, real), labels_T.index_select(0, real)
    loss, nll = _SmoothedNLL.apply(hidden_TM, table, labels_T, smoothing, is_real_T, cap)
    return loss, nll


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Soft-capped logits: cap · tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2); unchanged without a cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


def token_nll(
    hidden_states: Tensor,
    table: Tensor,
    labels: Tensor,
    ignore_index: int,
    positions: Tensor | None = None,
    *,
    cap: float | None = None,
) -> Tensor:
    """Negative log-likelihood `[T]` of each label, at least float32, 0 where it is `ignore_index`, for losses that are
    not sums over tokens. `hidden_states` `[T, M]`, `table` `[V, M]`, `labels` int64 `[T]`; `positions`
    and `cap` as in `smoothed_nll`. Logits are recomputed in the backward pass."""
    real = _positions_of(labels, ignore_index) if positions is None else positions
    real_nll = _TokenNLL.apply(hidden_states.index_select(0, real), table, labels.index_select(0, real), cap)
    return real_nll.new_zeros(len(labels)).index_copy(0, real, real_nll)


def _positions_of(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels != ignore_index).nonzero().squeeze(1)


class _TokenNLL(torch.autograd.Function):
    """Negative log-likelihood of tokens from one chunk of logits at a time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, hidden_TM: Tensor, table_VM: Tensor, labels_T: Tensor, cap: float | None) -> Tensor:
        ctx.save_for_backward(hidden_TM, table_VM, labels_T)
        ctx.cap = cap
        wide = torch.promote_types(hidden_TM.dtype, torch.float32)
        nll_T = hidden_TM.new_empty(len(labels_T), dtype=wide)
        for chunk, _, _, logp_CV, _ in _chunks_of_logp(hidden_TM, table_VM, cap):
            nll_T[chunk] = -logp_CV.gather(1, labels_T[chunk, None]).squeeze(1)
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TM, table_VM, labels_T = ctx.saved_tensors
        needs_hidden, needs_table, *_ = ctx.needs_input_grad
        grad_hidden_TM = torch.empty_like(hidden_TM) if needs_hidden else None
        grad_table_VM = torch.zeros_like(table_VM, dtype=gradient_T.dtype) if needs_table else None
        for chunk, chunk_CM, work_VM, logp_CV, slope_CV in _chunks_of_logp(hidden_TM, table_VM, ctx.cap):
            grad_CV = logp_CV.exp_()  # d nll / d logits = softmax - one-hot label
            grad_CV.scatter_add_(1, labels_T[chunk, None], grad_CV.new_full((grad_CV.shape[0], 1), -1.0))
            grad_CV = grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.mul_(gradient_T[chunk, None]).to(work_VM.dtype)
            if grad_hidden_TM is not None:
                grad_hidden_TM[chunk] = grad_CV @ work_VM
            if grad_table_VM is not None:
                grad_table_VM += grad_CV.t() @ chunk_CM
        return grad_hidden_TM, None if grad_table_VM is None else grad_table_VM.to(table_VM.dtype), None, None


def _chunks_of_logp(
    hidden_TM: Tensor, table_VM: Tensor, cap: float | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield chunks of tokens: (their slice, hidden states, table in the compute dtype, log-probabilities `[C, V]`,
    derivative `[C, V]` of capped logits, if they are capped).

    Products are computed in the dtype of the hidden states, or on the same values in a wider one if that is faster.
    """
    wide = torch.promote_types(hidden_TM.dtype, torch.float32)
    arithmetic = hidden_TM.dtype if multiplies(hidden_TM.dtype, hidden_TM.device) else wide
    work_VM = table_VM.to(hidden_TM.dtype).to(arithmetic)
    chunk_tokens = loss_tokens(accelerator(hidden_TM.device).kind, table_VM.shape[0])
    for first in range(0, hidden_TM.shape[0], chunk_tokens):
        chunk = slice(first, first + chunk_tokens)
        chunk_CM = hidden_TM[chunk].to(arithmetic)
        logits_CV, slope_CV = functional.linear(chunk_CM, work_VM), None
        if cap is not None:
            tanh_CV = (logits_CV.to(wide) / cap).tanh_()
            logits_CV, slope_CV = tanh_CV * cap, tanh_CV.square_().neg_().add_(1)
        yield chunk, chunk_CM, work_VM, functional.log_softmax(logits_CV, dim=-1, dtype=wide), slope_CV


class _SmoothedNLL(torch.autograd.Function):
    """Computes gradients in the forward pass, in place of each chunk of logits.

    Hidden states of the positions that are not `is_real_T` must be zeros, and their gradients are not masked.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TM: Tensor,
        table_VM: Tensor,
        labels_T: Tensor,
        smoothing: float,
        is_real_T: Tensor | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        vocabulary = table_VM.shape[0]
        wide = torch.promote_types(hidden_TM.dtype, torch.float32)
        nll, spread = hidden_TM.new_zeros((), dtype=wide), hidden_TM.new_zeros((), dtype=wide)
        needs_hidden, needs_table, *_ = ctx.needs_input_grad
        grad_hidden_TM = torch.empty_like(hidden_TM) if needs_hidden else None
        grad_table_VM = torch.zeros_like(table_VM, dtype=wide) if needs_table else None
        for chunk, chunk_CM, work_VM, logp_CV, slope_CV in _chunks_of_logp(hidden_TM, table_VM, cap):
            labels_C1 = labels_T[chunk, None]
            if is_real_T is None:
                nll -= logp_CV.gather(1, labels_C1).sum()
                spread -= logp_CV.sum() / vocabulary
            else:
                nll -= torch.where(is_real_T[chunk, None], logp_CV.gather(1, labels_C1), 0.0).sum()
                spread -= torch.where(is_real_T[chunk], logp_CV.sum(1), 0.0).sum() / vocabulary
            if grad_hidden_TM is None and grad_table_VM is None:
                continue
            # d loss / d logits = softmax - smoothed target
            grad_CV = logp_CV.exp_().sub_(smoothing / vocabulary)
            grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, smoothing - 1, dtype=wide))
            grad_CV = grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.to(work_VM.dtype)
            if grad_hidden_TM is not None and work_VM.dtype == hidden_TM.dtype:
                torch.mm(grad_CV, work_VM, out=grad_hidden_TM[chunk])
            elif grad_hidden_TM is not None:
                grad_hidden_TM[chunk] = grad_CV @ work_VM
            if grad_table_VM is not None and work_VM.dtype == wide:
                grad_table_VM.addmm_(grad_CV.t(), chunk_CM)
            elif grad_table_VM is not None:
                grad_table_VM += grad_CV.t() @ chunk_CM
        ctx.save_for_backward(grad_hidden_TM, grad_table_VM)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * spread, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input_gradients = (
            None if gradient is None else _scale_gradient(gradient, gradients[0]) for gradient in ctx.saved_tensors
        )
        return *input_gradients, None, None, None, None


def _scale_gradient(gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiply and round once: rounding the scale first would bias all of a narrow gradient."""
    wide = torch.promote_types(gradient.dtype, scale.dtype)
    return (gradient.to(wide) * scale.to(wide)).to(gradient.dtype)
