"""Losses over pairs of answers: DPO, IPO, SimPO, ORPO (`train.preference_loss`).

log π is the log-probability of an answer under the model, log π_ref that under the reference model (the base without
its adapter, or a frozen copy of the initial weights), evaluated without capacity limits. y_w is the preferred answer,
y_l the rejected one; |y| counts tokens.

    DPO    -log σ(β · (h(y_w) - h(y_l))), with h(y) = log π(y) - log π_ref(y)          arXiv 2305.18290, eq. 7
    IPO    (h(y_w) / |y_w| - h(y_l) / |y_l| - 1 / 2β)²                                 arXiv 2310.12036, eq. 17
    SimPO  -log σ(β · (m(y_w) - m(y_l)) - γ), with m(y) = log π(y) / |y|               arXiv 2405.14734, eq. 6
    ORPO   -m(y_w) - β · log σ(o(y_w) - o(y_l)), with o(y) = m(y) - log(1 - exp m(y))  arXiv 2403.07691, eq. 6

IPO's log-probabilities are per token, as in TRL, so that β does not depend on the answers' lengths. A row holds both
answers of a pair as adjacent documents, the preferred one first, so that a pair never spans ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe.spec import JobSpec
from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.task import Loss


@dataclass(frozen=True)
class Preferences:
    """Loss and counts, summed over the preference pairs of some rows; the same on all tensor and context ranks."""

    loss: Tensor
    """Scalar, float32 or wider; likewise the counts."""
    num_pairs: Tensor
    num_right: Tensor
    """Pairs whose preferred answer has the higher reward: h for DPO, h / |y| for IPO, m for SimPO and ORPO."""


def preference_loss_of(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> Loss:
    """Loss summed over preference pairs. `reference`: a frozen reference model, instead of the adapter's base.

    Each tensor or context rank gets an equal part of its value and the gradient of its own tokens.
    """
    reference_T = reference_nll(model, reference, batch, spec)
    nll_t = nll_of(model, batch)
    nll_T = model.gather_tokens(batch.tokens, nll_t.detach()).requires_grad_()
    with torch.enable_grad():
        preferences = _preferences(nll_T, reference_T, batch, spec)
        (by_token_T,) = torch.autograd.grad(preferences.loss, nll_T)
    objective = (model.share(by_token_T.view_as(batch.tokens)) * nll_t).sum()
    part = preferences.loss.detach() * rank_share(model)
    return Loss(objective + (part - objective).detach(), part, indexer=model.indexer_loss(batch.context))


@torch.no_grad()
def preferences_of(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> Preferences:
    """Loss and counts without gradients: this rank's part of the sums over its tensor and context ranks."""
    nll_T = model.gather_tokens(batch.tokens, nll_of(model, batch))
    preferences = _preferences(nll_T, reference_nll(model, reference, batch, spec), batch, spec)
    part = rank_share(model)
    return Preferences(preferences.loss * part, preferences.num_pairs * part, preferences.num_right * part)


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
        return reference.gather_tokens(batch.tokens, nll_of(reference, batch))
    with model.without_adapters():
        return model.gather_tokens(batch.tokens, nll_of(model, batch))


def rank_share(model: LanguageModel) -> float:
    """1 / number of tensor and context ranks: this rank's part of a value that all of them hold."""
    return 1.0 / math.prod(group.size() for group in (model.tensor_group, model.context_group) if group is not None)


def _preferences(nll_T: Tensor, reference_T: Tensor | None, batch: SequencesBatch, spec: JobSpec) -> Preferences:
    documents = batch.context.documents
    if documents is None or not documents.numel():
        return Preferences(nll_T.sum() * 0.0, nll_T.new_zeros(()), nll_T.new_zeros(()))
    num_rows, num_answers = len(documents), 2 * (int(documents.max()) // 2 + 1)
    real = documents.reshape(-1) >= 0
    answer_T = torch.arange(num_rows, device=documents.device)[:, None] * num_answers + documents
    index = answer_T.reshape(-1)[real].long()
    has_answer = torch.zeros(num_rows * num_answers, dtype=torch.bool, device=documents.device)
    has_answer[index] = True
    is_pair = has_answer.view(-1, 2).all(1)

    def sum_by_answer(values_T: Tensor) -> Tensor:
        """Sums `[P, 2]` over the tokens of each answer."""
        sums = values_T.new_zeros(num_rows * num_answers).index_add(0, index, values_T[real])
        return sums.view(-1, 2)[is_pair]

    logp_T = -nll_T if reference_T is None else reference_T - nll_T
    num_tokens_P2 = sum_by_answer((batch.labels.reshape(-1) != IGNORE_INDEX).to(nll_T.dtype)).clamp(min=1)
    loss_P, margin_P = pair_losses(sum_by_answer(logp_T), num_tokens_P2, spec)
    return Preferences(loss_P.sum(), margin_P.new_tensor(len(margin_P)), (margin_P > 0).sum().to(margin_P.dtype))


def pair_losses(logp_P2: Tensor, num_tokens_P2: Tensor, spec: JobSpec) -> tuple[Tensor, Tensor]:
    """(losses `[P]`, reward margins `[P]`) of `train.preference_loss` for P pairs, the preferred answer first.

    `logp_P2` are log-probabilities of answers, minus those under the reference model if the loss has one;
    `num_tokens_P2` the tokens of each.
    """
    beta, name = spec.preference_beta, spec.train.preference_loss
    if name == "dpo":
        margin_P = beta * _difference(logp_P2)
        return -functional.logsigmoid(margin_P), margin_P
    mean_logp_P2 = logp_P2 / num_tokens_P2
    margin_P = _difference(mean_logp_P2)
    if name == "ipo":
        return (margin_P - 1 / (2 * beta)) ** 2, margin_P
    if name == "simpo":
        return -functional.logsigmoid(beta * margin_P - spec.preference_margin), margin_P
    log_odds_P2 = mean_logp_P2 - _log1mexp(mean_logp_P2)
    return -mean_logp_P2[:, 0] - beta * functional.logsigmoid(_difference(log_odds_P2)), margin_P


def _difference(values_P2: Tensor) -> Tensor:
    return values_P2[:, 0] - values_P2[:, 1]


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp x) for x < 0, by the more exact of two forms (Mächler, "Accurately computing log(1 - exp(-|a|))")."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -0.6931471805599453
    near_zero = torch.log(-torch.expm1(torch.where(is_near_zero, x, -1.0)))
    return torch.where(is_near_zero, near_zero, torch.log1p(-torch.exp(torch.where(is_near_zero, -1.0, x))))
