"""Log-probabilities of answers under a model and its reference, and losses over them.

Tensor and context ranks compute the same loss from the log-probabilities of all tokens, and each the gradient of its
own tokens.
"""

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moe.spec import JobSpec
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.model import LanguageModel


class _Sums(Protocol):
    @property
    def loss(self) -> Tensor: ...


S = TypeVar("S", bound=_Sums)


def nll_of(model: LanguageModel, batch: SequencesBatch) -> Tensor:
    """Negative log-probability `[t]` of this rank's labels."""
    hidden_states = model.hidden_states(batch.tokens, batch.context)
    return model.token_nll(hidden_states, batch)


@torch.no_grad()
def reference_nll(
    model: LanguageModel, reference: LanguageModel | None, batch: SequencesBatch, spec: JobSpec
) -> Tensor | None:
    """Negative log-probability `[T]` under the reference model; None if the loss has none."""
    if not spec.has_reference:
        return None
    batch = batch.for_evaluation()
    if reference is not None:
        reference.stages = model.stages  # in a pipeline it is cut alike, and runs the stages that the model runs
        return reference.gather_tokens(batch.tokens, nll_of(reference, batch))
    with model.without_adapters():
        return model.gather_tokens(batch.tokens, nll_of(model, batch))


def rank_share(model: LanguageModel) -> float:
    """1 / number of tensor and context ranks: this rank's part of a value that all of them hold."""
    return 1.0 / math.prod(group.size() for group in (model.tensor_group, model.context_group) if group is not None)


def backward_through_tokens(
    model: LanguageModel, batch: SequencesBatch, sums_of: Callable[[Tensor], S]
) -> tuple[Tensor, Tensor, S]:
    """(objective, this rank's part of the loss, sums) of `sums_of`, a function of the negative log-probabilities `[T]`.

    The objective has the value of the part, and the gradient of this rank's tokens.
    """
    nll_t = nll_of(model, batch)
    nll_T = model.gather_tokens(batch.tokens, nll_t.detach()).requires_grad_()
    with torch.enable_grad():
        sums = sums_of(nll_T)
        (by_token_T,) = torch.autograd.grad(sums.loss, nll_T)
    objective = (model.share(by_token_T.view_as(batch.tokens)) * nll_t).sum()
    part = sums.loss.detach() * rank_share(model)
    return objective + (part - objective).detach(), part, sums


class AnswerSums:
    """Sums over the tokens of each answer in some rows: A answers, `width` for each row, some of which do not exist."""

    def __init__(self, batch: SequencesBatch, multiple: int = 1) -> None:
        """`multiple`: number that `width` is rounded up to a multiple of."""
        documents = batch.context.documents
        if documents is None:
            documents = torch.zeros_like(batch.tokens)
        num_rows = len(documents)
        num_answers = int(documents.max()) + 1 if documents.numel() else 0
        self.width = -(-num_answers // multiple) * multiple
        self._is_real = documents.reshape(-1) >= 0
        numbers = torch.arange(num_rows, device=documents.device)[:, None] * self.width + documents
        self._index = numbers.reshape(-1)[self._is_real].long()
        self.exists = torch.zeros(num_rows * self.width, dtype=torch.bool, device=documents.device)
        """bool `[A]`"""
        self.exists[self._index] = True

    def __call__(self, values_T: Tensor) -> Tensor:
        """Sums `[A]` of the values of tokens; zero for an answer that does not exist."""
        return values_T.new_zeros(len(self.exists)).index_add(0, self._index, values_T[self._is_real])
