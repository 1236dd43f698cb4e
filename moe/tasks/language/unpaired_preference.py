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
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.language.preference import nll_of, rank_share, reference_nll
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
    nll_t = nll_of(model, batch)
    nll_T = model.gather_tokens(batch.tokens, nll_t.detach()).requires_grad_()
    with torch.enable_grad():
        preferences = _preferences(nll_T, reference_T, batch, spec)
        (by_token_T,) = torch.autograd.grad(preferences.loss, nll_T)
    objective = (model.share(by_token_T.view_as(batch.tokens)) * nll_t).sum()
    share = rank_share(model)
    part = preferences.loss.detach() * share
    sums = torch.stack((preferences.rewards.detach(), preferences.num_by_label), 1) * share
    means = dict(zip(("reward_desirable", "reward_undesirable"), sums, strict=True))
    numbers = {} if batch.kl is None else {"kl": batch.kl}
    return Loss(
        objective + (part - objective).detach(), part,
        numbers=numbers, means=means, indexer=model.indexer_loss(batch.context),
    )  # fmt: skip


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
    kl = kl_of(*sums)
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
    documents = _Documents(mismatched)
    log_ratios_P = documents.sums(reference_T - nll_T)
    return torch.stack((log_ratios_P.sum(), log_ratios_P.new_tensor(len(log_ratios_P)))).double() * rank_share(model)


def kl_of(log_ratio: Tensor, num_answers: Tensor) -> Tensor:
    """KL estimate from the sum of h over mismatched answers, and their number."""
    return (log_ratio / num_answers.clamp(min=1)).clamp(min=0)


class _Documents:
    """The documents of some rows, in order: P of them."""

    def __init__(self, batch: SequencesBatch) -> None:
        documents = batch.context.documents
        if documents is None:
            documents = torch.zeros_like(batch.tokens)
        num_rows = len(documents)
        self._width = int(documents.max()) + 1 if documents.numel() else 0
        self._is_real = documents.reshape(-1) >= 0
        numbers = torch.arange(num_rows, device=documents.device)[:, None] * self._width + documents
        self._index = numbers.reshape(-1)[self._is_real].long()
        self._exists = torch.zeros(num_rows * self._width, dtype=torch.bool, device=documents.device)
        self._exists[self._index] = True

    def sums(self, values_T: Tensor) -> Tensor:
        """Sums `[P]` over the tokens of each document."""
        sums = values_T.new_zeros(len(self._exists)).index_add(0, self._index, values_T[self._is_real])
        return sums[self._exists]

    def select(self, values_BP: Tensor) -> Tensor:
        """`[P]` from values by row and document."""
        return values_BP[:, : self._width].reshape(-1)[self._exists]


def _preferences(
    nll_T: Tensor, reference_T: Tensor | None, batch: SequencesBatch, spec: JobSpec
) -> UnpairedPreferences:
    assert reference_T is not None
    assert batch.desirable is not None
    documents = _Documents(batch)
    desirable_P = documents.select(batch.desirable)
    losses_P, rewards_P = answer_losses(documents.sums(reference_T - nll_T), desirable_P, batch.kl, spec)
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
