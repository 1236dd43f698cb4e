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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe.spec import JobSpec
from moe.tasks.language.answers import AnswerSums, backward_through_tokens, nll_of, rank_share, reference_nll
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
    objective, part, _ = backward_through_tokens(
        model, batch, lambda nll_T: _preferences(nll_T, reference_T, batch, spec)
    )
    return Loss(objective, part, indexer=model.indexer_loss(batch.context))


@torch.no_grad()
def preferences_of(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> Preferences:
    """Loss and counts without gradients: this rank's part of the sums over its tensor and context ranks."""
    nll_T = model.gather_tokens(batch.tokens, nll_of(model, batch))
    preferences = _preferences(nll_T, reference_nll(model, reference, batch, spec), batch, spec)
    part = rank_share(model)
    return Preferences(preferences.loss * part, preferences.num_pairs * part, preferences.num_right * part)


def _preferences(nll_T: Tensor, reference_T: Tensor | None, batch: SequencesBatch, spec: JobSpec) -> Preferences:
    sums = AnswerSums(batch, multiple=2)
    is_pair = sums.exists.view(-1, 2).all(1)

    def pair_sums(values_T: Tensor) -> Tensor:
        """Sums `[P, 2]` over the tokens of each answer of the pairs."""
        return sums(values_T).view(-1, 2)[is_pair]

    logp_T = -nll_T if reference_T is None else reference_T - nll_T
    num_tokens_P2 = pair_sums((batch.labels.reshape(-1) != IGNORE_INDEX).to(nll_T.dtype)).clamp(min=1)
    loss_P, margin_P = pair_losses(pair_sums(logp_T), num_tokens_P2, spec)
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
