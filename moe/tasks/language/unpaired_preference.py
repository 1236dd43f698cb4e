"""Losses over answers with a label: KTO and APO-zero (`train.preference_loss`).

h(y) = log π(y) - log π_ref(y) of an answer, with the reference model as in `moe.tasks.language.preference`; w is
`desirable_weight` or `undesirable_weight`.

    KTO        w · (1 - σ(β · (h - KL))) if desirable, w · (1 - σ(β · (KL - h))) if not    arXiv 2402.01306, eq. 7
    APO-zero   w · (1 - σ(β · h)) if desirable, w · σ(β · h) if not                        arXiv 2408.06266

KL is the mean of h over prompts with completions of other records (`moe.data.sequences.unpaired`), at least 0 and
without gradient, as in TRL; both models are evaluated without capacity limits and dropout. TRL estimates it for each
micro-batch, here it is that of the global batch, so that the loss does not depend on micro-batches or ranks: it is
evaluated before the step's first backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import Layout, collective
from moe.spec import JobSpec
from moe.tasks.language.answers import AnswerSums, backward_through_tokens, nll_of, rank_share, reference_nll
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.task import Loss


@dataclass(frozen=True)
class UnpairedPreferences:
    """Sums over the labelled answers of some rows; the same on all tensor and context ranks."""

    loss: Tensor
    """Scalar, float32 or wider; likewise the rest."""
    num_answers: Tensor
    rewards: Tensor
    """`[2]`: β · h, summed over desirable answers and over undesirable ones."""
    num_by_label: Tensor
    """`[2]`: numbers of both."""


def unpaired_preference_loss_of(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> Loss:
    """Loss summed over labelled answers. `reference`: a frozen reference model, instead of the adapter's base.

    Each tensor or context rank gets an equal part of its value and the gradient of its own tokens.
    """
    reference_T = reference_nll(model, reference, batch, spec)
    objective, part, preferences = backward_through_tokens(
        model, batch, lambda nll_T: _preferences(nll_T, reference_T, batch, spec)
    )
    sums = torch.stack((preferences.rewards.detach(), preferences.num_by_label), 1) * rank_share(model)
    means = dict(zip(("reward_desirable", "reward_undesirable"), sums, strict=True))
    numbers = {} if batch.kl is None else {"kl": batch.kl}
    return Loss(objective, part, numbers=numbers, means=means, indexer=model.indexer_loss(batch.context))


@torch.no_grad()
def unpaired_preferences_of(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> UnpairedPreferences:
    """Loss and rewards without gradients: this rank's part of the sums over its tensor and context ranks."""
    nll_T = model.gather_tokens(batch.tokens, nll_of(model, batch))
    sums, share = _preferences(nll_T, reference_nll(model, reference, batch, spec), batch, spec), rank_share(model)
    return UnpairedPreferences(
        sums.loss * share, sums.num_answers * share, sums.rewards * share, sums.num_by_label * share
    )


def with_kl(
    model: LanguageModel,
    micro_batches: Sequence[SequencesBatch],
    spec: JobSpec,
    layout: Layout,
    reference: LanguageModel | None = None,
) -> list[SequencesBatch]:
    """The micro-batches of a global batch with its KL estimate. Collective."""
    sums = sum(
        (kl_sums(model, batch, spec, reference) for batch in micro_batches),
        start=torch.zeros(2, dtype=torch.float64, device=layout.device),
    )
    if layout.world_group is not None:
        with collective("all-reduce of the KL estimate"):
            dist.all_reduce(sums, group=layout.world_group)
    kl = kl_of(*sums)  # in a pipeline, all stages have added the same: the ratio is that of one
    return [replace(batch, kl=kl) for batch in micro_batches]


@torch.no_grad()
def kl_sums(
    model: LanguageModel, batch: SequencesBatch, spec: JobSpec, reference: LanguageModel | None = None
) -> Tensor:
    """float64 `[2]`: sum of h over a micro-batch's mismatched answers, and their number; this rank's part of the sums
    over its tensor and context ranks."""
    mismatched = batch.mismatched
    assert mismatched is not None
    nll_T = model.gather_tokens(mismatched.tokens, nll_of(model, mismatched))
    reference_T = reference_nll(model, reference, mismatched, spec)
    assert reference_T is not None
    sums = AnswerSums(mismatched)
    log_ratios_P = sums(reference_T - nll_T)[sums.exists]
    return torch.stack((log_ratios_P.sum(), log_ratios_P.new_tensor(len(log_ratios_P)))).double() * rank_share(model)


def kl_of(log_ratio: Tensor, num_answers: Tensor) -> Tensor:
    """KL estimate from the sum of h over mismatched answers, and their number."""
    return (log_ratio / num_answers.clamp(min=1)).clamp(min=0)


def _preferences(
    nll_T: Tensor, reference_T: Tensor | None, batch: SequencesBatch, spec: JobSpec
) -> UnpairedPreferences:
    assert reference_T is not None
    assert batch.desirable is not None
    sums = AnswerSums(batch)
    desirable_P = batch.desirable[:, : sums.width].reshape(-1)[sums.exists]
    losses_P, rewards_P = answer_losses(sums(reference_T - nll_T)[sums.exists], desirable_P, batch.kl, spec)
    by_label_2P = torch.stack((desirable_P, ~desirable_P)).to(rewards_P.dtype)
    return UnpairedPreferences(
        losses_P.sum(), losses_P.new_tensor(len(losses_P)), by_label_2P @ rewards_P.detach(), by_label_2P.sum(1)
    )


def answer_losses(log_ratio_P: Tensor, desirable_P: Tensor, kl: Tensor | None, spec: JobSpec) -> tuple[Tensor, Tensor]:
    """(losses `[P]`, rewards `[P]`) of `train.preference_loss` for P answers.

    `log_ratio_P` are log-probabilities minus those under the reference model; `desirable_P` bool; `kl` the scalar KL
    estimate of KTO.
    """
    desirable_weight, undesirable_weight = spec.label_weights
    rewards_P = spec.preference_beta * log_ratio_P
    baseline = log_ratio_P.new_zeros(())
    if spec.train.preference_loss == "kto":
        assert kl is not None
        baseline = spec.preference_beta * kl.to(log_ratio_P.dtype)
    sign_P = torch.where(desirable_P, 1.0, -1.0).to(log_ratio_P.dtype)
    weight_P = torch.where(desirable_P, desirable_weight, undesirable_weight).to(log_ratio_P.dtype)
    return weight_P * torch.sigmoid(-sign_P * (rewards_P - baseline)), rewards_P
