"""Loss of a micro-batch of sequences: cross-entropy of the next token."""

from moe.layers.nll import smoothed_nll
from moe.tasks.language.batches import NOTHING, SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.task import Loss


def loss_of(model: LanguageModel, batch: SequencesBatch, smoothing: float = 0.0) -> Loss:
    """Sums over the predicted tokens of which this rank has the share: smoothed, and as they are."""
    hidden_states = model.hidden_states(batch.tokens, batch.context)
    return Loss(
        *smoothed_nll(hidden_states, model.output_embedding, model.share(batch.labels), smoothing, NOTHING)
    )
