"""Direct preference optimization (DPO, arXiv 2305.18290, eq. 7): loss over pairs of answers.

L = -Σ log σ(β · ((log π(y_w) - log π_ref(y_w)) - (log π(y_l) - log π_ref(y_l))))

y_w is the preferred (chosen) answer, y_l the rejected one; log π is the log-probability of an answer under the
policy, the model with its adapter, and log π_ref under the reference model, the base without its adapter, evaluated
without capacity limits. A row holds both answers of a pair as adjacent documents, the preferred one first, so that a
pair never spans ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe.layers.nll import token_nll
from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.task import Loss


@dataclass(frozen=True)
class Preferences:
    """DPO loss and counts, summed over the preference pairs of some rows; the same on all tensor ranks."""

    loss: Tensor
    """Scalar, float32 or wider; likewise the counts."""
    num_pairs: Tensor
    num_right: Tensor
    """Pairs whose preferred answer has the higher implicit reward, log π - log π_ref (DPO accuracy)."""


def preference_loss_of(model: LanguageModel, batch: SequencesBatch, beta: float) -> Loss:
    """DPO loss summed over preference pairs.

    Each tensor rank gets an equal part of its value and the gradient of its own tokens.
    """
    reference_t = _reference_nll(model, batch)
    nll_t = _nll(model, batch)
    nll_T = model.gather_tokens(batch.tokens, nll_t.detach()).requires_grad_()
    with torch.enable_grad():
        preferences = _preferences(nll_T, model.gather_tokens(batch.tokens, reference_t), batch, beta)
        (by_token_T,) = torch.autograd.grad(preferences.loss, nll_T)
    objective = (model.share(by_token_T.view_as(batch.tokens)) * nll_t).sum()
    part = preferences.loss.detach() * _part_of(model, batch)
    return Loss(objective + (part - objective).detach(), part)


@torch.no_grad()
def preferences_of(model: LanguageModel, batch: SequencesBatch, beta: float) -> Preferences:
    """DPO loss and counts without gradients: this rank's part of the sums over its tensor ranks."""
    nll_T = model.gather_tokens(batch.tokens, _nll(model, batch))
    preferences = _preferences(nll_T, model.gather_tokens(batch.tokens, _reference_nll(model, batch)), batch, beta)
    part = _part_of(model, batch)
    return Preferences(preferences.loss * part, preferences.num_pairs * part, preferences.num_right * part)


def _nll(model: LanguageModel, batch: SequencesBatch) -> Tensor:
    """Negative log-probability `[t]` of this rank's labels."""
    hidden_states = model.hidden_states(batch.tokens, batch.context)
    return token_nll(
        hidden_states, model.output_embedding, model.share(batch.labels), IGNORE_INDEX, batch.label_positions
    )


@torch.no_grad()
def _reference_nll(model: LanguageModel, batch: SequencesBatch) -> Tensor:
    """Negative log-probability `[t]` under the reference model: the base without its adapter."""
    with model.without_adapters():
        return _nll(model, batch.for_evaluation())


def _part_of(model: LanguageModel, batch: SequencesBatch) -> float:
    """1 / number of tensor ranks: this rank's part of a value that all of them hold."""
    return 1.0 if model.tensor_group is None else 1.0 / model.tensor_group.size()


def _preferences(nll_T: Tensor, reference_T: Tensor, batch: SequencesBatch, beta: float) -> Preferences:
    documents = batch.context.documents
    if documents is None or not documents.numel():
        return Preferences(nll_T.sum() * 0.0, nll_T.new_zeros(()), nll_T.new_zeros(()))
    num_rows, num_answers = len(documents), 2 * (int(documents.max()) // 2 + 1)
    real = documents.reshape(-1) >= 0
    answer_T = torch.arange(num_rows, device=documents.device)[:, None] * num_answers + documents
    index = answer_T.reshape(-1)[real].long()
    gain = nll_T.new_zeros(num_rows * num_answers).index_add(0, index, (reference_T - nll_T)[real])
    has_answer = torch.zeros(num_rows * num_answers, dtype=torch.bool, device=documents.device)
    has_answer[index] = True
    preferred_gain, other_gain = gain.view(-1, 2)[has_answer.view(-1, 2).all(1)].unbind(1)
    margin = beta * (preferred_gain - other_gain)
    return Preferences(
        -functional.logsigmoid(margin).sum(), margin.new_tensor(len(margin)), (margin > 0).sum().to(margin.dtype)
    )
